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

from fathom.kernels.two_segment_attention import Evidence, plan_segments, two_segment_attention
from fathom.runtime.sfi.buffers import CompactRuns, RunShape
from fathom.runtime.sfi.options import DEFAULT_BUFFER_MIB, DEFAULT_BUFFERS, SfiOptions
from fathom.runtime.sfi.refresh import EvidenceRing, InOrder, RefreshExecutor
from fathom.runtime.sfi.step import RefreshBatch, SfiStep, grant_evidence, plan_span, refresh_layer
from fathom.runtime.sfi.trigger import CAUSES, PhaseState

MIB = 1 << 20


@dataclass(frozen=True)
class Shape:
    """The served model as far as decoding is concerned.

    Attributes:
        span: layers that share a page table.
        longest: most tokens that a request can get.
        rows: request rows of the engine; a row's number is below it.
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
        one = self.run(options).bytes
        return max(min(DEFAULT_BUFFERS * one, int(DEFAULT_BUFFER_MIB * MIB)), one)


@dataclass(frozen=True)
class Entry:
    """One row of a decode step.

    Attributes:
        row: the engine's request row.
        length: tokens of the request, the one that this step reads included.
        tokens: what the request has generated so far, the token that this step reads included; None for a request
            that always reads everything.
    """

    row: int
    length: int
    tokens: Sequence[int] | None


@dataclass(frozen=True)
class Outcome:
    """What a step was for one row.

    Attributes:
        fast: whether it read a selection only.
        cause: why its selection was renewed, one of ``CAUSES``; None where it was not.
        seconds: its share of the time that the Selector and the packing took.
        compact_bytes: size of its compact buffers, 0 where it has none.
    """

    fast: bool
    cause: str | None
    seconds: float
    compact_bytes: int


class SlowFast:
    """The requests that decode slow and fast, by the engine's row."""

    def __init__(self, shape: Shape, options: SfiOptions, triggers: torch.Tensor) -> None:
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
        # Memory that no request has used yet is not taken from the machine.
        self.compact = [
            tuple(
                torch.empty(self.runs.tokens, shape.kv_heads, dim, dtype=shape.dtype)
                for dim in (shape.head_dim, shape.value_dim)
            )
            for _ in range(shape.layers)
        ]
        longest = 4 * shape.longest * (shape.heads + shape.kv_heads)
        self.ring = EvidenceRing(
            1, shape.heads, shape.kv_heads, max(int(options.evidence_mib * MIB), longest)
        )
        self.executor = RefreshExecutor(InOrder(), slots=1)
        self.start = torch.full((shape.rows,), -1, dtype=torch.int64)
        self.held = torch.full((self.spans, shape.rows), -1, dtype=torch.int64)
        self.refreshed = torch.zeros(shape.rows, dtype=torch.bool)
        self.seen: dict[int, int] = {}  # by row: generated tokens that its phase accounts for
        self.totals = {"slow_steps": 0, "fast_steps": 0, "mixed_steps": 0, "dense_fallbacks": 0} | {
            f"{cause}_refreshes": 0 for cause in CAUSES
        }
        self.refresh_seconds = 0.0
        self._warm_up()

    def _warm_up(self) -> None:
        """Compile the attention now, so that no request waits for it (a few seconds, cached on disk)."""
        shape = self.shape
        query = torch.zeros(1, 1, shape.heads, shape.head_dim)
        keys, values = (
            torch.zeros(1, shape.kv_heads, dim, dtype=shape.dtype)
            for dim in (shape.head_dim, shape.value_dim)
        )
        one, none = torch.ones(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
        plan = plan_segments(none, none, one, none, none, none - 1, shape.kv_heads)
        table = torch.zeros(1, 1, dtype=torch.int32)
        two_segment_attention(query, (keys, values), (keys, values), table, plan, 1.0)

    def drop(self, row: int) -> None:
        """The request finished, was aborted, or was taken back: it starts slow if it comes again."""
        if self.seen.pop(row, None) is not None:
            self.runs.release(row)
            self.start[row] = -1

    def clear(self) -> None:
        """Drop all requests."""
        for row in list(self.seen):
            self.drop(row)

    def begin(self, entries: Sequence[Entry]) -> "Step":
        """Plan a step for these rows, in the order of the batch."""
        self._take_in([entry for entry in entries if entry.tokens is not None])
        rows = torch.tensor([entry.row for entry in entries], dtype=torch.int64)
        lengths = torch.tensor([entry.length for entry in entries])
        alternates = torch.tensor([entry.tokens is not None for entry in entries])
        return Step(self, rows, lengths, alternates)

    def _take_in(self, entries: Sequence[Entry]) -> None:
        """Bring the phases up to the tokens that this step reads."""
        old = [entry for entry in entries if entry.row in self.seen]
        fresh = [entry for entry in entries if entry.row not in self.seen]
        if old:
            new = [list(entry.tokens[self.seen[entry.row] :]) for entry in old]  # type: ignore[index]
            counts = torch.tensor([len(tokens) for tokens in new])
            ids = torch.zeros(len(new), int(counts.max()), dtype=torch.int64)
            for line, tokens in zip(ids, new, strict=True):
                line[: len(tokens)] = torch.tensor(tokens)
            rows = torch.tensor([entry.row for entry in old])
            self.phases.advance(rows, self.refreshed[rows], ids, counts)
        if fresh:
            rows = torch.tensor([entry.row for entry in fresh])
            last = torch.tensor([entry.tokens[-1] for entry in fresh])  # type: ignore[index]
            self.phases.admit(rows, last, torch.zeros(len(fresh), dtype=torch.bool))
            for row in rows.tolist():
                start = self.runs.acquire(row)
                self.start[row] = -1 if start is None else start
                self.totals["dense_fallbacks"] += start is None
            self.held[:, rows] = -1
        for entry in entries:
            self.seen[entry.row] = len(entry.tokens)  # type: ignore[arg-type]

    def report(self) -> dict:
        """Buffers and counters (JSON-safe)."""
        return {
            "buffers": self.runs.count,
            "buffers_in_use": len(self.runs),
            "buffer_bytes": self.runs.shape.bytes,
            "total_bytes": self.runs.total_bytes,
            "refresh_seconds": self.refresh_seconds,
        } | self.totals


@dataclass(frozen=True)
class SpanStep:
    """What the layers of one span read: plan, [batch, width] int32 page table, and the size of the evidence."""

    step: SfiStep
    table: torch.Tensor
    width: int


class Step:
    """One decode step of a batch; its rows are the last ``len(step)`` segments of every span's table.

    Use::

        with executor.step():
            for each layer:
                output = step.attend(...)
        step.finish()
    """

    def __init__(
        self, state: SlowFast, rows: torch.Tensor, lengths: torch.Tensor, alternates: torch.Tensor
    ) -> None:
        """
        Args:
            rows, lengths: [batch] the engine's request rows, and tokens of each request.
            alternates: [batch] bool, whether a row decodes slow and fast; the others always read everything.
        """
        self.state = state
        self.rows = rows
        self.alternates = alternates
        self.start = torch.where(alternates, state.start[rows], -1)
        self.slow = ~alternates | (self.start < 0) | state.phases.slow(rows)
        asking = self.slow & (self.start >= 0)
        # No table is longer than its request.
        room = state.ring.capacity(int(lengths[asking].max())) if asking.any() else 0
        room = min(room, len(rows))
        self.evidence = grant_evidence(self.slow, self.start, lengths, room, state.config)
        self.capacity = int((self.evidence >= 0).sum())
        self.spans: dict[int, SpanStep] = {}
        self.seconds = 0.0

    def __len__(self) -> int:
        return len(self.rows)

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        pool: tuple[torch.Tensor, torch.Tensor],
        slots: np.ndarray,
        entry: np.ndarray,
        scale: float,
    ) -> torch.Tensor:
        """Attention of each row's new token at one layer.

        Args:
            query: [batch, heads, head_dim].
            pool: keys [slots, kv_heads, head_dim] and values [slots, kv_heads, value_dim] of the layer, the new
                tokens' included.
            slots: [entries] int32 slots of the layer's span, segment after segment; entry: [segments + 1] where
                each segment begins. The rows of this step are the last ``len(self)`` segments.

        Returns:
            [batch, heads, value_dim] float32.
        """
        state, span = self.state, layer // self.state.shape.span
        if span not in self.spans:
            self.spans[span] = self._plan(span, slots, entry[-len(self) - 1 :])
        plan = self.spans[span]
        keys, values = state.compact[layer]
        compact, evidence = (keys, values), None
        if self.capacity:
            evidence = state.ring.view(state.executor.acquire(), self.capacity, plan.width)
        output, _ = two_segment_attention(
            query.contiguous().unsqueeze(1), pool, compact, plan.table, plan.step.plan, scale, evidence
        )
        if evidence is not None:
            state.executor.submit(self._refresh(evidence, pool, compact, plan.table, plan.step.refresh))
        return output.squeeze(1)

    def _plan(self, span: int, slots: np.ndarray, entry: np.ndarray) -> SpanStep:
        state, config = self.state, self.state.config
        lengths = torch.from_numpy(np.diff(entry))
        index = torch.arange(len(self))
        step = plan_span(
            index,
            lengths,
            self.slow,
            self.start,
            state.held[span, self.rows],
            self.evidence,
            self.capacity,
            state.shape.kv_heads,
            config,
        )
        table = np.zeros((len(self), int(lengths.max())), np.int32)
        for line, offset, (_, begin, end, *_) in zip(
            table, entry.tolist(), step.plan.packed.tolist(), strict=False
        ):
            line[begin:end] = slots[offset + begin : offset + end]
        taken = step.refresh.rows[step.refresh.rows >= 0]
        width = int(lengths[taken].max()) if len(taken) else 1
        return SpanStep(step, torch.from_numpy(table), width)

    def _refresh(
        self,
        evidence: Evidence,
        pool: tuple[torch.Tensor, torch.Tensor],
        compact: tuple[torch.Tensor, torch.Tensor],
        table: torch.Tensor,
        batch: RefreshBatch,
    ) -> Callable[[], None]:
        def work() -> None:
            began = time.perf_counter()
            refresh_layer(
                evidence, pool, compact, table, batch, self.state.config, self.state.options.selector
            )
            self.seconds += time.perf_counter() - began

        return work

    def finish(self) -> list[Outcome | None]:
        """Take note of the step once all layers have run.

        Returns:
            Per row what the step was, None for a row that always reads everything.
        """
        state, rows = self.state, self.rows
        refreshed = self.evidence >= 0
        causes = state.phases.cause(rows).tolist()
        for span, plan in self.spans.items():
            state.held[span, rows] = torch.where(self.alternates, plan.step.held, state.held[span, rows])
        state.refreshed[rows] = torch.where(self.alternates, refreshed, state.refreshed[rows])
        state.refresh_seconds += self.seconds
        share = self.seconds / max(self.capacity, 1)
        found: list[Outcome | None] = []
        for alternates, slow, renewed, start, cause in zip(
            self.alternates.tolist(),
            self.slow.tolist(),
            refreshed.tolist(),
            self.start.tolist(),
            causes,
            strict=True,
        ):
            if not alternates:
                found.append(None)
                continue
            size = state.runs.shape.bytes if start >= 0 else 0
            outcome = Outcome(not slow, CAUSES[cause] if renewed else None, share if renewed else 0.0, size)
            state.totals["slow_steps" if slow else "fast_steps"] += 1
            if renewed:
                state.totals[f"{outcome.cause}_refreshes"] += 1
            found.append(outcome)
        fast = {outcome.fast for outcome in found if outcome is not None}
        state.totals["mixed_steps"] += len(fast) > 1
        return found
