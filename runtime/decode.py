"""Slow-fast decoding: what each request of a decode step reads, and how its selection is renewed.

Slow-Fast Inference, Algorithm 1, on a batch whose rows are in any phase, beside rows that always read everything.
:class:`SlowFast` holds what lasts from step to step, ``decode_step.py`` what the layers of one step read. Tables
may have another length in every span.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from fathom.kernels.dispatch import runs_triton
from fathom.kernels.kv_pair import KvPair
from fathom.kernels.two_segment_attention import plan_segments, two_segment_attention
from fathom.runtime.decode_step import Ahead, Entry, Later, Step
from fathom.runtime.sfi.buffers import CompactRuns, RunShape
from fathom.runtime.sfi.options import (
    DEFAULT_BUFFER_MIB,
    DEFAULT_BUFFERS,
    DEFAULT_EVIDENCE_MIB,
    EVIDENCE_SHARE,
    GPU_SHARE,
    SfiOptions,
)
from fathom.runtime.sfi.refresh import EvidenceRing, RefreshExecutor, lanes_of
from fathom.runtime.sfi.rules import FROZEN, NONE, RANDOM, Reading
from fathom.runtime.sfi.step import RefreshBatch, refresh_layer
from fathom.runtime.sfi.trigger import CAUSES, PhaseState, Stretch
from fathom.runtime.staging import send

MIB = 1 << 20
GRAIN = 16
"""Widths of evidence on a GPU are multiples of it: for others Triton would compile its kernels once more."""


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
        query_dtype: where it is not ``dtype``, which is that of keys and values.
        windowed: layers with a sliding window, which read all of it in every step.
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
    query_dtype: torch.dtype | None = None
    windowed: frozenset[int] = frozenset()

    @property
    def alternating(self) -> list[int]:
        """The layers that read a selection in fast steps."""
        return [layer for layer in range(self.layers) if layer not in self.windowed]

    def run(self, options: SfiOptions) -> RunShape:
        """Size of one request's compact buffers."""
        itemsize = self.dtype.itemsize
        whole = RunShape.of(
            options.config,
            len(self.alternating),
            self.kv_heads,
            self.head_dim,
            self.value_dim,
            itemsize,
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
        if options.evidence_mib is None:
            budget = max(int(DEFAULT_EVIDENCE_MIB * MIB), self.memory // EVIDENCE_SHARE)
        else:
            budget = int(options.evidence_mib * MIB)
        return max(budget, slots * longest)


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
        self.triggers = send(triggers, shape.device)
        self.no_trigger = int(triggers.argmin())
        # A head's run lies together: a fast step reads it from end to end. Memory that no request has used yet is
        # not taken from the machine.
        self.compact = {
            layer: KvPair(
                *(
                    torch.empty(
                        shape.kv_heads, self.runs.tokens, dim, dtype=shape.dtype, device=shape.device
                    ).transpose(0, 1)
                    for dim in (shape.head_dim, shape.value_dim)
                )
            )
            for layer in shape.alternating
        }
        self.grain = GRAIN if runs_triton(self.triggers) else 1
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
        # By row: a step that was launched before the token that it reads was known, and the request's place in it.
        self.pending: dict[int, tuple[Ahead, int, Later]] = {}
        self.totals = {"slow_steps": 0, "fast_steps": 0, "mixed_steps": 0, "dense_fallbacks": 0} | {
            f"{cause}_refreshes": 0 for cause in CAUSES
        }
        self.refresh_seconds = 0.0
        self._warm_up()

    def _warm_up(self) -> None:
        """Compile the attention now, so that no request waits for it (a few seconds, cached on disk)."""
        shape = self.shape
        there = {"device": shape.device}
        dtype = shape.query_dtype or shape.dtype
        query = torch.zeros(1, shape.heads, shape.head_dim, dtype=dtype, **there)
        keys, values = (
            torch.zeros(1, shape.kv_heads, dim, dtype=shape.dtype, **there)
            for dim in (shape.head_dim, shape.value_dim)
        )
        one, none = (torch.full((1,), value, dtype=torch.int64, **there) for value in (1, 0))
        plan = plan_segments(none, none, one, none, none, none - 1, shape.kv_heads)
        table = torch.zeros(1, 1, dtype=torch.int32, **there)
        pool, compact = (keys, values), self.compact[shape.alternating[0]]
        output = query.new_empty(1, shape.heads, shape.value_dim)
        two_segment_attention(query, pool, compact, table, plan, 1.0, None, output)
        if runs_triton(query):
            evidence = self.ring.view(0, 1, self.wide(1))
            two_segment_attention(query, pool, compact, table, plan, 1.0, evidence, output)
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
            self.pending.pop(row, None)

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
        kind = Ahead if any(entry.ahead for entry in entries) else Step
        return kind(self, entries, np.arange(-len(entries), 0) if segments is None else segments)

    def holds_evidence(self, requests: int, length: int) -> bool:
        """Whether so many requests of up to ``length`` tokens can choose anew in one captured step."""
        return requests * self.wide(length) <= self.ring.entries - requests

    def stretch(self, row: int) -> Stretch | None:
        """How far a request that was taken in goes on with fast steps; None where all its steps read everything."""
        return None if self.start[row] < 0 else self.phases.stretch(row)

    def take_in(self, entries: Sequence[Entry]) -> None:
        """Bring the phases up to the tokens that are known; what was known before changes nothing."""
        entries = [
            entry
            for entry in entries
            if entry.tokens is not None and self.seen.get(entry.row) != len(entry.tokens)
        ]
        self._resolve([entry for entry in entries if entry.row in self.pending])
        fresh = [entry for entry in entries if entry.row not in self.seen]
        old = [entry for entry in entries if self.seen.get(entry.row, len(entry.tokens)) < len(entry.tokens)]  # type: ignore[arg-type]
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
            # A first token that is not known yet is told when it is.
            last = np.array([entry.tokens[-1] if entry.tokens else 0 for entry in fresh])
            self.phases.admit(rows, last)
            for row in rows.tolist():
                start = self.runs.acquire(row)
                self.start[row] = -1 if start is None else start
                self.totals["dense_fallbacks"] += start is None
            self.held[:, rows], self.refreshed[rows] = -1, False
            self.frozen[rows] = [entry.reading.rule == FROZEN for entry in fresh]
            self.reading[rows] = [self._numbers(entry.reading) for entry in fresh]
        for entry in entries:
            self.seen[entry.row] = len(entry.tokens)  # type: ignore[arg-type]

    def _resolve(self, entries: Sequence[Entry]) -> None:
        """Take note of steps that were launched before the token was known that comes next in these entries."""
        together: dict[Ahead, list[tuple[int, int, Later]]] = {}
        for entry in entries:
            assert entry.tokens is not None
            step, place, later = self.pending.pop(entry.row)
            together.setdefault(step, []).append((place, entry.tokens[self.seen[entry.row]], later))
            self.seen[entry.row] += 1
        for step, own in together.items():
            places, tokens = (np.array(column) for column in zip(*(each[:2] for each in own), strict=True))
            for (_, _, later), outcome in zip(own, step.resolve(places, tokens), strict=True):
                later.outcome = outcome

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
        """What a fast step reads, buffers, their bytes on all devices, and counters (JSON-safe)."""
        return {
            **{name: getattr(self.config, name) for name in ("sink", "recent", "selected")},
            "buffers": self.runs.count,
            "buffers_in_use": len(self.runs),
            "buffer_bytes": self.runs.shape.bytes * self.shape.devices,
            "total_bytes": self.runs.total_bytes * self.shape.devices,
            "refresh_seconds": self.refresh_seconds,
        } | self.totals
