"""Slow-fast decoding: what each request of a decode step reads, and how its selection is renewed.

Slow-Fast Inference, Algorithm 1, on a batch whose rows are in any phase, beside rows that always read everything.
:class:`SlowFast` holds what lasts from step to step, :class:`Step` what the layers of one step read. Tables may
have another length in every span.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from fathom.kernels.dispatch import runs_triton
from fathom.kernels.kv_pair import KvPair
from fathom.kernels.two_segment_attention import Evidence, plan_segments, two_segment_attention
from fathom.runtime.kv.device_view import DeviceView
from fathom.runtime.kv.view import SpanView
from fathom.runtime.sfi.buffers import CompactRuns, RunShape
from fathom.runtime.sfi.options import DEFAULT_BUFFER_MIB, DEFAULT_BUFFERS, GPU_SHARE, SfiOptions
from fathom.runtime.sfi.refresh import EvidenceRing, RefreshExecutor, lanes_of
from fathom.runtime.sfi.rules import FROZEN, NONE, RANDOM, Reading
from fathom.runtime.sfi.step import Reads, RefreshBatch, SfiStep, grant_evidence, plan_span, refresh_layer
from fathom.runtime.sfi.trigger import CAUSES, PhaseState, Stretch
from fathom.runtime.staging import send

MIB = 1 << 20
GRAIN = 16
"""Widths of evidence on a GPU are multiples of it: for others Triton would compile its kernels once more."""
AS_SERVED = Reading()


@dataclass(frozen=True)
class Shape:
    """The served model as far as decoding is concerned.

    Attributes:
        span: layers that share a page table.
        longest: most tokens that a request can get.
        rows: request rows of the engine; a row's number is below it.
        device: of keys and values. What each request reads is decided on the host.
        memory: bytes of a GPU that has them; 0 on a CPU.
        devices: that have as many heads each.
    """

    layers: int
    span: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    dtype: torch.dtype
    longest: int
    rows: int
    device: torch.device | str = "cpu"
    memory: int = 0
    devices: int = 1

    def run(self, options: SfiOptions) -> RunShape:
        """Size of one request's compact buffers."""
        itemsize = self.dtype.itemsize
        whole = RunShape.of(
            options.config, self.layers, self.kv_heads, self.head_dim, self.value_dim, itemsize
        )
        return RunShape(min(whole.tokens, self.longest), whole.bytes_per_token)

    def buffer_bytes(self, options: SfiOptions) -> int:
        """Budget of all compact buffers together."""
        if options.buffer_mib is not None:
            return int(options.buffer_mib * MIB)
        one, most = self.run(options).bytes, max(int(DEFAULT_BUFFER_MIB * MIB), self.memory // GPU_SHARE)
        return max(min(DEFAULT_BUFFERS * one, most), one)

    def evidence_bytes(self, options: SfiOptions, slots: int) -> int:
        """Memory of the evidence in a ring of ``slots``; each holds at least the longest request's."""
        longest = 4 * (self.longest + GRAIN) * (self.heads + self.kv_heads)
        return max(int(options.evidence_mib * MIB), slots * longest)


@dataclass(frozen=True)
class Entry:
    """One request of a decode step.

    Attributes:
        row: the engine's request row.
        length: tokens of the request, the one that this step reads included.
        tokens: what the request has generated so far, the token that this step reads included; None for a request
            that always reads everything.
        drafted: tokens that were drafted after these; they are query rows behind the request's own.
        reading: what its fast steps read; looked at when the request is new.
    """

    row: int
    length: int
    tokens: Sequence[int] | None
    drafted: int = 0
    reading: Reading = AS_SERVED


@dataclass(frozen=True)
class Outcome:
    """What a step was for one row.

    Attributes:
        fast: whether it read a selection only.
        cause: why its selection was renewed, one of ``CAUSES``; None where it was not.
        seconds: its share of the time that the Selector and the packing took.
        compact_bytes: size of its compact buffers on all devices, 0 where it has none.
    """

    fast: bool
    cause: str | None
    seconds: float
    compact_bytes: int


class SlowFast:
    """The requests that decode slow and fast, by the engine's row."""

    def __init__(self, shape: Shape, options: SfiOptions, triggers: np.ndarray) -> None:
        """
        Args:
            triggers: [vocabulary] bool, the tokens after which a step is slow.

        Raises:
            ValueError: when the budget does not hold one compact buffer.
        """
        self.shape, self.options = shape, options
        self.config = options.config
        self.spans = shape.layers // shape.span
        self.runs = CompactRuns(shape.run(options), shape.buffer_bytes(options))
        self.phases = PhaseState(shape.rows, triggers, self.config)
        # A head's run lies together: a fast step reads it from end to end. Memory that no request has used yet is
        # not taken from the machine.
        self.compact = [
            KvPair(
                *(
                    torch.empty(
                        shape.kv_heads, self.runs.tokens, dim, dtype=shape.dtype, device=shape.device
                    ).transpose(0, 1)
                    for dim in (shape.head_dim, shape.value_dim)
                )
            )
            for _ in range(shape.layers)
        ]
        self.grain = GRAIN if runs_triton(self.compact[0][0]) else 1
        lanes, slots = lanes_of(shape.device)
        memory = shape.evidence_bytes(options, slots)
        self.ring = EvidenceRing(slots, shape.heads, shape.kv_heads, memory, shape.device)
        self.executor = RefreshExecutor(lanes, slots)
        self.start = np.full(shape.rows, -1)
        self.held = np.full((self.spans, shape.rows), -1)
        self.refreshed = np.zeros(shape.rows, bool)
        self.frozen = np.zeros(shape.rows, bool)
        # Columns: recent tokens, entries to choose, seed of a choice at random or -1.
        self.reading = np.zeros((shape.rows, 3), np.int64)
        self.seen: dict[int, int] = {}  # by row: generated tokens that its phase accounts for
        self.totals = {"slow_steps": 0, "fast_steps": 0, "mixed_steps": 0, "dense_fallbacks": 0} | {
            f"{cause}_refreshes": 0 for cause in CAUSES
        }
        self.refresh_seconds = 0.0
        self._warm_up()

    def _warm_up(self) -> None:
        """Compile the attention now, so that no request waits for it (a few seconds, cached on disk)."""
        shape = self.shape
        there = {"device": shape.device}
        query = torch.zeros(1, 1, shape.heads, shape.head_dim, dtype=shape.dtype, **there)
        keys, values = (
            torch.zeros(1, shape.kv_heads, dim, dtype=shape.dtype, **there)
            for dim in (shape.head_dim, shape.value_dim)
        )
        one, none = (torch.full((1,), value, dtype=torch.int64, **there) for value in (1, 0))
        plan = plan_segments(none, none, one, none, none, none - 1, shape.kv_heads)
        table = torch.zeros(1, 1, dtype=torch.int32, **there)
        pool, compact = (keys, values), self.compact[0]
        two_segment_attention(query, pool, compact, table, plan, 1.0)
        if runs_triton(query):
            evidence = self.ring.view(0, 1, self.wide(1))
            two_segment_attention(query, pool, compact, table, plan, 1.0, evidence)
            nobody = RefreshBatch(send(RefreshBatch.nobody(1).packed, shape.device))
            refresh_layer(evidence, pool, compact, table, nobody, self.config, self.options.selector)
        else:
            from fathom.kernels import refresh_cpu

            refresh_cpu.warm_up(shape.dtype, self.options.selector)

    def wide(self, entries: int) -> int:
        """Width of the evidence for so many entries."""
        return -(-entries // self.grain) * self.grain

    def drop(self, row: int) -> None:
        """The request finished, was aborted, or was taken back: it starts slow if it comes again."""
        if self.seen.pop(row, None) is not None:
            self.runs.release(row)
            self.start[row] = -1

    def clear(self) -> None:
        """Drop all requests."""
        for row in list(self.seen):
            self.drop(row)

    def begin(self, entries: Sequence[Entry], segments: np.ndarray | None = None) -> "Step":
        """Plan a step for these requests, in the order of the batch.

        Args:
            segments: places of the requests among the segments of every span's table, counted from the end (-1 is
                the last one); None for the last ``len(entries)`` ones.
        """
        self.take_in(entries)
        return Step(self, entries, np.arange(-len(entries), 0) if segments is None else segments)

    def stretch(self, row: int) -> Stretch | None:
        """How far a request that was taken in goes on with fast steps; None where all its steps read everything."""
        return None if self.start[row] < 0 else self.phases.stretch(row)

    def take_in(self, entries: Sequence[Entry]) -> None:
        """Bring the phases up to the tokens that this step reads; what is known already changes nothing."""
        entries = [
            entry
            for entry in entries
            if entry.tokens is not None and self.seen.get(entry.row) != len(entry.tokens)
        ]
        old = [entry for entry in entries if entry.row in self.seen]
        fresh = [entry for entry in entries if entry.row not in self.seen]
        if old:
            new = [list(entry.tokens[self.seen[entry.row] :]) for entry in old]  # type: ignore[index]
            counts = np.array([len(tokens) for tokens in new])
            ids = np.zeros((len(new), counts.max()), np.int64)
            for line, tokens in zip(ids, new, strict=True):
                line[: len(tokens)] = tokens
            rows = np.array([entry.row for entry in old])
            self.phases.advance(rows, self.refreshed[rows], ids, counts)
        if fresh:
            rows = np.array([entry.row for entry in fresh])
            last = np.array([entry.tokens[-1] for entry in fresh])  # type: ignore[index]
            self.phases.admit(rows, last, np.zeros(len(fresh), bool))
            for row in rows.tolist():
                start = self.runs.acquire(row)
                self.start[row] = -1 if start is None else start
                self.totals["dense_fallbacks"] += start is None
            self.held[:, rows] = -1
            self.frozen[rows] = [entry.reading.rule == FROZEN for entry in fresh]
            self.reading[rows] = [self._numbers(entry.reading) for entry in fresh]
        for entry in entries:
            self.seen[entry.row] = len(entry.tokens)  # type: ignore[arg-type]

    def _numbers(self, reading: Reading) -> tuple[int, int, int]:
        """A row of :attr:`reading`."""
        recent = self.config.recent if reading.recent is None else reading.recent
        selected = self.config.selected
        if reading.selected is not None:
            selected = min(reading.selected, selected)
        # The hash behind a choice at random takes a seed of 63 bits.
        seed = reading.seed % (1 << 63) if reading.rule == RANDOM else -1
        return recent, 0 if reading.rule == NONE else selected, seed

    def report(self) -> dict:
        """Buffers, their bytes on all devices, and counters (JSON-safe)."""
        return {
            "buffers": self.runs.count,
            "buffers_in_use": len(self.runs),
            "buffer_bytes": self.runs.shape.bytes * self.shape.devices,
            "total_bytes": self.runs.total_bytes * self.shape.devices,
            "refresh_seconds": self.refresh_seconds,
        } | self.totals


@dataclass
class Planned:
    """A step on page tables of some lengths, on the host.

    Attributes:
        ranges: of every query row its request's table and the entries that it reads there, ``begin .. end - 1``.
        longest: entries of the longest table; width: of the evidence.
    """

    step: SfiStep
    ranges: list[tuple[int, int, int]]
    longest: int
    width: int
    _there: SfiStep | None = None

    def on(self, device: torch.device | str) -> SfiStep:
        """The step with what kernels read on a device; sent once."""
        if self._there is None:
            self._there = self.step.on(device)
        return self._there


@dataclass(frozen=True)
class SpanStep:
    """What the layers of one span read, on the device of the keys.

    Attributes:
        table: int32 page table, a row for each request: [batch, longest], or a span's list of slots.
        width: entries of the evidence.
    """

    step: SfiStep
    table: torch.Tensor
    width: int


class Step:
    """One decode step of a batch.

    A request has one query row, and one for each token that was drafted after its own: such a row reads what the
    request would read in the step that it stands for. Use::

        with executor.step():
            for each layer:
                output = step.attend(...)
        step.finish()

    Attributes:
        capacity: requests whose selection is renewed; width: of their evidence at most.
        at_random: whether one of them chooses at random.
        owner: [query rows] the request of each.
    """

    def __init__(self, state: SlowFast, entries: Sequence[Entry], segments: np.ndarray) -> None:
        """
        Args:
            segments: [len(entries)] as in :meth:`SlowFast.begin`.
        """
        self.state, self.segments = state, segments
        self.rows = np.array([entry.row for entry in entries])
        self.lengths = np.array([entry.length for entry in entries])
        self.alternates = np.array([entry.tokens is not None for entry in entries])
        self.start = np.where(self.alternates, state.start[self.rows], -1)
        self.slow = ~self.alternates | (self.start < 0) | state.phases.slow(self.rows)
        settled = state.frozen[self.rows] & ~state.phases.stale(self.rows)
        asking = self.slow & (self.start >= 0) & ~settled
        # No table is longer than its request.
        self.width = state.wide(int(self.lengths[asking].max(initial=1)))
        room = min(state.ring.capacity(self.width), len(self.rows))
        self.evidence = grant_evidence(asking, self.start, self.lengths, room, state.config)
        renewed = self.evidence >= 0
        self.refreshed = renewed | (self.slow & settled)
        self.capacity = int(renewed.sum())
        self.at_random = bool((state.reading[self.rows[renewed], 2] >= 0).any())
        counts = np.array([1 + entry.drafted for entry in entries])
        assert not (self.slow & (self.start >= 0) & (counts > 1)).any(), "a slow step has one row"
        # Of each query row its request, and the rows of that request behind it.
        self.owner, self.last = np.repeat(np.arange(len(entries)), counts), np.cumsum(counts) - 1
        self.behind = self.last[self.owner] - np.arange(len(self.owner))
        self.spans: dict[int, SpanStep] = {}
        self.planned: dict[int, Planned] = {}  # by span
        # Spans whose tables are as long and as packed as another's share its plan.
        self.plans: dict[tuple[int, ...], Planned] = {}
        self.seconds = 0.0

    def __len__(self) -> int:
        """Requests."""
        return len(self.rows)

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        pool: tuple[torch.Tensor, torch.Tensor],
        view: SpanView,
        scale: float,
        there: DeviceView | None = None,
    ) -> torch.Tensor:
        """Attention of the step's query rows at one layer.

        Args:
            query: [query rows, heads, head_dim], request after request.
            pool: keys [slots, kv_heads, head_dim] and values [slots, kv_heads, value_dim] of the layer, the new
                tokens' included.
            view: of the layer's span; there: the same on the device, where it is; else the table is sent there.

        Returns:
            [query rows, heads, value_dim] float32.
        """
        state, plan = self.state, self.span_step(layer, view, there)
        compact, evidence = state.compact[layer], None
        if self.capacity:
            evidence = state.ring.view(state.executor.acquire(), self.capacity, plan.width)
        output, _ = two_segment_attention(
            query.contiguous().unsqueeze(1), pool, compact, plan.table, plan.step.plan, scale, evidence
        )
        if evidence is not None:
            state.executor.submit(self._refresh(layer, evidence, pool, compact, plan))
        return output.squeeze(1)

    def span_step(self, layer: int, view: SpanView, there: DeviceView | None = None) -> SpanStep:
        """What the layers of a layer's span read; ``view`` is the span's, ``there`` the same on the device."""
        span = layer // self.state.shape.span
        if span not in self.spans:
            planned = self.plan(span, view, there)
            table = self._table(planned, view) if there is None else there.table
            self.spans[span] = SpanStep(planned.on(self.state.shape.device), table, planned.width)
        return self.spans[span]

    def plan(self, span: int, view: SpanView, there: DeviceView | None = None) -> Planned:
        """The plan of a span, on the host."""
        state = self.state
        lengths = np.diff(view.entry)[self.segments]
        held = state.held[span, self.rows]
        rows = np.arange(len(self)) if there is None else there.first[self.segments]
        key = (*lengths.tolist(), *held.tolist(), *rows.tolist())
        if key not in self.plans:
            self.plans[key] = self._plan_tables(rows, lengths, held)
        self.planned[span] = self.plans[key]
        return self.plans[key]

    def _table(self, planned: Planned, view: SpanView) -> torch.Tensor:
        """[batch, longest] int32 page table, for a view that is on the host only."""
        # What the descriptor does not name is never read, and a long table not even touched.
        table = np.empty((len(self), planned.longest), np.int32)
        segments = np.arange(len(view.entry) - 1)[self.segments].tolist()
        for line, begin, end in planned.ranges:
            table[line, begin:end] = view.part(segments[line], begin, end)
        return send(table, self.state.shape.device)

    def _plan_tables(self, rows: np.ndarray, lengths: np.ndarray, held: np.ndarray) -> Planned:
        """The plan for page tables of these lengths.

        Args:
            rows: [requests] of the table.
            lengths, held: [requests] entries of the table and of the compact run, -1 where nothing is packed.
        """
        state, owner = self.state, self.owner
        recent, selected, seed = state.reading[self.rows][owner].T
        step = plan_span(
            rows[owner],
            lengths[owner] - self.behind,
            self.slow[owner],
            self.start[owner],
            held[owner],
            self.evidence[owner],
            self.capacity,
            state.shape.kv_heads,
            state.config,
            Reads(recent, selected, np.where(self.alternates[owner], seed, -1), self.lengths[owner]),
        )
        ranges = [(line, begin, end) for line, begin, end, *_ in step.plan.packed.tolist()]
        width = state.wide(int(lengths[self.evidence >= 0].max(initial=1)))
        return Planned(step, ranges, int(lengths.max()), width)

    def _refresh(
        self,
        layer: int,
        evidence: Evidence,
        pool: tuple[torch.Tensor, torch.Tensor],
        compact: tuple[torch.Tensor, torch.Tensor],
        plan: SpanStep,
    ) -> Callable[[], None]:
        batch: RefreshBatch = plan.step.refresh
        config, selector = self.state.config, self.state.options.selector

        def work() -> None:
            began = time.perf_counter()  # the host's part: on a GPU what it takes to enqueue the work
            refresh_layer(evidence, pool, compact, plan.table, batch, config, selector, layer, self.at_random)
            self.seconds += time.perf_counter() - began

        return work

    def finish(self) -> list[Outcome | None]:
        """Take note of the step once all layers have run.

        Returns:
            Per request what the step was, None for one that always reads everything.
        """
        state, rows = self.state, self.rows
        renewed = self.evidence >= 0
        causes = state.phases.cause(rows).tolist()
        for span, plan in self.planned.items():
            held = plan.step.held[self.last]
            state.held[span, rows] = np.where(self.alternates, held, state.held[span, rows])
        state.refreshed[rows] = np.where(self.alternates, self.refreshed, state.refreshed[rows])
        state.refresh_seconds += self.seconds
        share = self.seconds / max(self.capacity, 1)
        found: list[Outcome | None] = []
        for alternates, slow, new, start, cause in zip(
            self.alternates.tolist(),
            self.slow.tolist(),
            renewed.tolist(),
            self.start.tolist(),
            causes,
            strict=True,
        ):
            if not alternates:
                found.append(None)
                continue
            size = state.runs.shape.bytes * state.shape.devices if start >= 0 else 0
            outcome = Outcome(not slow, CAUSES[cause] if new else None, share if new else 0.0, size)
            state.totals["slow_steps" if slow else "fast_steps"] += 1
            if new:
                state.totals[f"{outcome.cause}_refreshes"] += 1
            found.append(outcome)
        fast = {outcome.fast for outcome in found if outcome is not None}
        state.totals["mixed_steps"] += len(fast) > 1
        return found
