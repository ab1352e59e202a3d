"""The operations that run Triton kernels, as problems to check and to time (attention is in gpu_attention)."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import triton

from fathom.benchmarks.gpu_attention import (
    CHUNK,
    SFI,
    decode,
    extend,
    fast_step,
    flashinfer_extend,
    slow_step,
)
from fathom.benchmarks.gpu_inputs import EXACT, SCORE_TOLERANCE, Inputs, Pair, Pool, Problem, Setting, part
from fathom.kernels import window_scores
from fathom.kernels.compact_kv import compact_kv, compact_kv_reference
from fathom.kernels.pack_segment import pack_segment, pack_segment_torch
from fathom.kernels.selector_scores import selector_scores, selector_scores_torch
from fathom.kernels.span_tables import BLOCK, span_tables, span_tables_torch
from fathom.kernels.stable_top_k import stable_top_k, stable_top_k_reference
from fathom.kernels.store_kv import EIGHT_BITS, narrowed, store_kv_8bit
from fathom.runtime.fastkv.config import FastKVConfig
from fathom.runtime.sfi.config import SelectorConfig
from fathom.runtime.specprefill.config import SpecPrefillConfig

FASTKV, SPECPREFILL = FastKVConfig(), SpecPrefillConfig()
DRAFTED = 8
"""New tokens per request where drafted ones are verified."""
SPANS = 4
BEYOND = 3
"""Tokens behind each request's last one that its page tables name."""
CHECKED_ENTRIES = 64
"""Copied entries that are compared where the reference cannot afford them all."""


def candidates(
    inputs: Inputs, sink: int, recent: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
    """Range of each request's candidates as two int64 lists and a mask [batch, longest], and how many there are."""
    last = [max(n - recent, 0) for n in inputs.s.lengths]
    first = [min(n, sink) for n in last]
    begin, end = (inputs.integers(each, torch.int64) for each in (first, last))
    index = torch.arange(max(inputs.s.lengths), **inputs.there)
    valid = (index >= begin.unsqueeze(-1)) & (index < end.unsqueeze(-1))
    return begin, end, valid, sum(last) - sum(first)


def selector(s: Setting, sink: int = SFI.sink, recent: int = SFI.recent) -> Problem:
    """SFI's Selector up to Top-K, from the logits of a slow step."""
    inputs = Inputs(s)
    rows, longest, config = s.heads // s.kv_heads, max(s.lengths), SelectorConfig()
    begin, end, valid, count = candidates(inputs, sink, recent)
    logits = inputs.normal(s.batch, s.kv_heads, rows, longest, dtype=torch.float32).mul_(3)
    norms = inputs.normal(s.batch, s.kv_heads, longest, dtype=torch.float32).abs_().add_(0.5)
    logits.masked_fill_(~valid[:, None, None], float("nan"))
    norms.masked_fill_(~valid[:, None], float("nan"))

    def call() -> Any:
        return selector_scores(logits, norms, begin, end, config)

    def pairs(got: Any, last: bool) -> Iterator[Pair]:
        own = part(s, last)
        want = selector_scores_torch(logits[own], norms[own], begin[own], end[own], config)
        yield "scores", got[own].masked_fill(~valid[own][:, None], float("-inf")), want, SCORE_TOLERANCE

    moved = 4 * s.kv_heads * count * (rows + 2) + 16 * s.batch
    return Problem(call, pairs, moved)


def top_k(
    s: Setting, sink: int = SFI.sink, recent: int = SFI.recent, selected: int = SFI.selected
) -> Problem:
    """Top-K of the Selector's scores."""
    inputs = Inputs(s)
    longest = max(s.lengths)
    *ranges, valid, count = candidates(inputs, sink, recent)
    # Rounded, so that there are ties.
    scores = inputs.normal(s.batch, s.kv_heads, longest, dtype=torch.float32).mul_(64).round_()
    scores.masked_fill_(~valid[:, None], float("nan"))
    width = min(selected, longest)
    budgets = inputs.integers([max(width - i, 0) for i in range(s.batch)], torch.int64)
    low, high, budget = (each.unsqueeze(-1) for each in (*ranges, budgets))

    def call() -> Any:
        return stable_top_k(scores, low, high, budget, width)

    def pairs(got: Any, last: bool) -> Iterator[Pair]:
        where = (s.batch - 1, s.kv_heads - 1) if last else (slice(None), slice(None))
        each = scores[where].reshape(-1, longest).cpu()
        begin, end, most = (x.expand(scores.shape[:2])[where].reshape(-1).cpu() for x in (low, high, budget))
        with torch.device("cpu"):
            chosen = stable_top_k_reference(each, begin, end, most)
        want = torch.tensor([own + [-1] * (width - len(own)) for own in chosen])
        yield "indices", got[0][where].reshape(-1, width).cpu(), want.cpu(), EXACT
        counts = torch.tensor([len(own) for own in chosen]).cpu()
        yield "counts", got[1][where].reshape(-1).cpu(), counts, EXACT

    moved = s.kv_heads * (4 * count + s.batch * (4 * width + 28))
    return Problem(call, pairs, moved)


def pack(s: Setting, sink: int = SFI.sink, recent: int = SFI.recent, selected: int = SFI.selected) -> Problem:
    """Sink and selection of each request into its run of the compact buffer; one without a whole sink has none."""
    inputs = Inputs(s)
    pool = Pool(inputs)
    selected = min(selected, max(s.lengths))
    room = sink + selected
    taken = [min(selected, max(n - recent - sink, 0)) if n >= sink else -1 for n in s.lengths]
    indices = torch.full((s.batch, s.kv_heads, selected), -1, dtype=torch.int32, **inputs.there)
    for i, (n, count) in enumerate(zip(s.lengths, taken, strict=True)):
        for h in range(s.kv_heads if count > 0 else 0):
            indices[i, h, :count] = inputs.order(n - recent - sink)[:count].sort().values + sink
    there = inputs.integers([count >= 0 for count in taken], torch.bool)
    rows = torch.where(there, pool.rows, -1)
    starts = inputs.integers([i * room for i in range(s.batch)], torch.int64)
    compact, want = (
        tuple(
            inputs.empty(s.kv_heads, s.batch * room, dim, dtype=s.held).transpose(0, 1)
            for dim in (s.head_dim, s.value_dim)
        )
        for _ in range(2)
    )

    def poison() -> None:
        for buffer in compact:
            buffer.fill_(float("nan"))

    def call() -> Any:
        pack_segment(pool.pair, compact, pool.table, rows, starts, indices, sink)

    def pairs(_: Any, last: bool) -> Iterator[Pair]:
        own = part(s, last)
        pack_segment_torch(pool.pair, want, pool.table, rows[own], starts[own], indices[own], sink)
        run = slice(own.start * room, s.batch * room)
        for name, buffer, reference in zip(("keys", "values"), compact, want, strict=True):
            yield name, buffer[run], reference[run], EXACT

    moved = sum(sink + count for count in taken if count >= 0)
    moved = 2 * moved * s.entry_bytes + 4 * s.kv_heads * (moved + s.batch * selected) + 16 * s.batch
    return Problem(call, pairs, moved, poison=poison)


def compact(s: Setting, share: float = 0.1) -> Problem:
    """FastKV's retention: each head's kept entries of one request, the longest, into other slots."""
    inputs = Inputs(s)
    slots = 2 * max(s.lengths)
    kept = max(1, round(share * max(s.lengths)))
    places = inputs.order(slots).long()
    free, held = places[: slots // 2], places[slots // 2 :]
    source = torch.stack([held[inputs.order(len(held))[:kept].long()] for _ in range(s.kv_heads)])
    destination = free[:kept]
    buffers = [inputs.held(slots, s.kv_heads, dim) for dim in (s.head_dim, s.value_dim)]

    def poison() -> None:
        for buffer in buffers:
            buffer[destination] = float("nan")

    def call() -> Any:
        compact_kv(buffers[0], buffers[1], source, destination, disjoint=True)

    def pairs(_: Any, last: bool) -> Iterator[Pair]:
        own = slice(kept - CHECKED_ENTRIES if last and kept > CHECKED_ENTRIES else 0, kept)
        heads = slice(s.kv_heads - 1 if last else 0, s.kv_heads)
        copies = [buffer[:, heads].clone() for buffer in buffers]
        for copy in copies:
            copy[destination] = float("nan")
        compact_kv_reference(copies[0], copies[1], source[heads, own], destination[own])
        for name, buffer, copy in zip(("keys", "values"), buffers, copies, strict=True):
            if last:
                buffer, copy = buffer[destination[own]], copy[destination[own]]
            yield name, buffer[:, heads], copy, EXACT

    moved = kept * (2 * s.entry_bytes + 8 * s.kv_heads + 8)
    return Problem(call, pairs, moved, poison=poison)


def store(s: Setting) -> Problem:
    """New keys and values of so many tokens, rounded to 8 bits into their slots; e5m2 where KV has more bits."""
    held = s.held if s.held in EIGHT_BITS else torch.float8_e5m2
    inputs = Inputs(s)
    rows = sum(s.lengths)
    slots = inputs.order(rows + 9).long()[:rows]
    new = [inputs.heads_of(rows, s.kv_heads, dim) * 100 for dim in (s.head_dim, s.value_dim)]
    pool = tuple(inputs.empty(rows + 9, s.kv_heads, x.shape[2], dtype=held) for x in new)

    def poison() -> None:
        for buffer in pool:
            buffer.fill_(float("nan"))

    def call() -> Any:
        store_kv_8bit(new[0], new[1], (pool[0], pool[1]), slots)

    def pairs(_: Any, last: bool) -> Iterator[Pair]:
        for name, buffer, x in zip(("keys", "values"), pool, new, strict=True):
            want = torch.full_like(buffer, float("nan"), dtype=torch.float32)
            want[slots] = narrowed(x, held).float()
            yield name, buffer.float(), want, EXACT

    numbers = rows * s.kv_heads * (s.head_dim + s.value_dim)
    moved = numbers * (1 + s.dtype.itemsize) + 8 * rows
    return Problem(call, pairs, moved, poison=poison)


def windowed(
    s: Setting, rows: int, causal: bool
) -> tuple[Inputs, torch.Tensor, Pool, window_scores.Window, int]:
    """Inputs, query, pool and window of the requests that have keys, and the pairs of a row and a key."""
    s = replace(s, lengths=tuple(n for n in s.lengths if n))
    inputs = Inputs(s)
    pool = Pool(inputs)
    counts = [min(rows, n) if causal else rows for n in s.lengths]
    query = inputs.normal(sum(counts), s.heads, s.head_dim)
    window = window_scores.window_of(counts, s.lengths, pool.padded, causal)
    return inputs, query, pool, window, sum(r * n for r, n in zip(counts, s.lengths, strict=True))


def last_of(window: window_scores.Window) -> window_scores.Window:
    """The window of the last request alone."""
    return window_scores.window_of(window.rows[-1:], window.lengths[-1:], window.slots[-1:], window.causal)


def saliency(s: Setting, rows: int = FASTKV.window) -> Problem:
    """FastKV's scores: the mean over a prompt's last query rows."""
    _, query, pool, window, seen = windowed(s, rows, causal=True)
    scale = s.head_dim**-0.5

    def call() -> Any:
        return window_scores.row_mean_scores(query, pool.keys, window, scale)

    def pairs(got: Any, last: bool) -> Iterator[Pair]:
        only = last_of(window) if last else window
        own = query[-only.total_rows :]
        want = window_scores.row_mean_scores_reference(own, pool.keys, only, scale)
        yield "scores", got[-len(only.rows) :], want, SCORE_TOLERANCE

    entries, item = sum(window.lengths), s.held.itemsize
    moved = entries * (s.kv_heads * s.head_dim * item + 4 + 4 * s.heads) + query.nbytes
    return Problem(call, pairs, moved, 2 * seen * s.heads * s.head_dim)


def lookahead(s: Setting, rows: int = SPECPREFILL.lookahead, pool_width: int = SPECPREFILL.pool) -> Problem:
    """SpecPrefill's scores: pooled along the prompt, the maximum over heads and what earlier layers found."""
    inputs, query, pool, window, seen = windowed(s, rows, causal=False)
    scale = s.head_dim**-0.5
    earlier = inputs.normal(window.total_rows, window.slots.shape[1], dtype=torch.float32).abs_().mul_(1e-3)
    out = earlier.clone()

    def call() -> Any:
        return window_scores.pooled_max_scores(query, pool.keys, window, scale, pool_width, out)

    def pairs(got: Any, last: bool) -> Iterator[Pair]:
        only = last_of(window) if last else window
        own = slice(window.total_rows - only.total_rows, window.total_rows)
        given = query[own], pool.keys, only, scale, pool_width, earlier[own].clone()
        yield "scores", got[own], window_scores.pooled_max_scores_reference(*given), SCORE_TOLERANCE

    entries, item = sum(window.lengths), s.held.itemsize
    moved = entries * (s.kv_heads * s.head_dim * item + 4) + query.nbytes + 8 * seen
    return Problem(call, pairs, moved, 2 * seen * s.heads * s.head_dim, partial(out.copy_, earlier))


def tables(s: Setting, page: int = 1, spans: int = SPANS) -> Problem:
    """The page tables of a decode step; every other one is a private table, other ones at each span."""
    inputs = Inputs(s)
    longest, unwritten = max(s.lengths), -5
    new = [min(n, 1) for n in s.lengths]
    most = longest + BEYOND
    pages, blocks = triton.cdiv(most, page), triton.cdiv(triton.cdiv(most, page), BLOCK)
    head = torch.full((spans, 5, s.batch + 3), 7, dtype=torch.int32, **inputs.there)
    for span in range(spans):
        source = [row if (span + row) % 2 else -1 - row for row in range(s.batch)]
        room = [n + BEYOND for n in s.lengths]
        begin, first = ([sum(each[:i]) for i in range(s.batch)] for each in (room, new))
        before = [n - f for n, f in zip(s.lengths, new, strict=True)]
        for line, numbers in enumerate(([1 + b for b in begin], s.lengths, before, source, first)):
            head[span, line, : s.batch] = inputs.integers(numbers)
    given = (
        inputs.below(pages * page, s.batch, most),
        inputs.below(pages, spans, pages),
        inputs.order(spans * s.batch * blocks).view(spans, s.batch, blocks),
        inputs.below(pages, spans * s.batch * blocks, BLOCK),
    )
    slots = torch.full(
        (spans, sum(s.lengths) + BEYOND * s.batch + 2), unwritten, dtype=torch.int32, **inputs.there
    )
    write = torch.full((spans, sum(new) + 1), unwritten, dtype=torch.int64, **inputs.there)
    want = slots.clone(), write.clone()

    def poison() -> None:
        slots.fill_(unwritten)
        write.fill_(unwritten)

    def call() -> Any:
        span_tables(head, slots, write, s.batch, longest, BEYOND, *given, page)

    def pairs(_: Any, last: bool) -> Iterator[Pair]:
        span_tables_torch(head, *want, s.batch, BEYOND, *given, page)
        yield "slots", slots, want[0], EXACT
        yield "slots to write", write, want[1], EXACT

    listed = sum(triton.cdiv(n, page) for n in s.lengths)
    private = sum((span + row + 1) % 2 * n for span in range(spans) for row, n in enumerate(s.lengths))
    moved = spans * (4 * sum(s.lengths) + 4 * listed + 8 * sum(new) + 20 * s.batch)
    moved += 4 * (spans * sum(s.lengths) - private)
    return Problem(call, pairs, moved, poison=poison)


@dataclass(frozen=True)
class Form:
    """How an operation is timed.

    Attributes:
        label: in tables.
        arguments: further ones of the operation's ``build``.
        shorter: all requests but the last have so many times fewer entries.
        several: only where there are several requests.
    """

    label: str = ""
    arguments: dict[str, Any] = field(default_factory=dict)
    shorter: int = 1
    several: bool = False

    def lengths(self, length: int, batch: int) -> tuple[int, ...]:
        """KV entries of each request where the longest has ``length``."""
        return (max(length // self.shorter, 1),) * (batch - 1) + (length,)


@dataclass(frozen=True)
class Operation:
    """An operation in the forms in which it is checked and timed.

    Attributes:
        name: in tables and on the command line.
        build: the problem of a setting.
        checked: further arguments of ``build``, for ragged lengths.
        timed: forms for the lengths asked for.
        single: a call is of one request, whatever the batch.
    """

    name: str
    build: Callable[..., Problem]
    checked: tuple[dict[str, Any], ...] = ({},)
    timed: tuple[Form, ...] = (Form(),)
    single: bool = False


FEW = {"sink": 2, "recent": 3, "selected": 24}
"""SFI's numbers for ragged lengths, some of them short."""
RANGES = {"sink": 2, "recent": 3}

OPERATIONS: tuple[Operation, ...] = (
    Operation(
        "paged_decode",
        decode,
        ({"pieces": 1}, {"page": 16, "pieces": 3}),
        (
            Form("pages of 1"),
            Form("pages of 16", {"page": 16}),
            Form("one long request", shorter=64, several=True),
        ),
    ),
    Operation(
        "paged_extend",
        extend,
        (
            {"chunk": 300},
            {"new": 5, "splits": 3, "page": 16},
            {"new": 12, "splits": 3, "room": 17, "usual": 8},
        ),
        (
            Form(f"chunk of {CHUNK}"),
            Form(f"{DRAFTED} drafted", {"new": DRAFTED}),
            Form(f"{DRAFTED} drafted, captured", {"new": DRAFTED, "room": 17, "usual": 8}),
        ),
    ),
    Operation(
        "two_segment_attention",
        fast_step,
        (FEW, {**FEW, "slow": 2}),
        (Form("all fast"), Form("one slow request", {"slow": 1}, several=True)),
    ),
    Operation("decode_logits", slow_step),
    Operation("selector_scores", selector, (RANGES,)),
    Operation("stable_top_k", top_k, (FEW,)),
    Operation("pack_segment", pack, (FEW,)),
    Operation("compact_kv", compact, single=True),
    Operation("store_kv", store, single=True),
    Operation("row_mean_scores", saliency),
    Operation("pooled_max_scores", lookahead),
    Operation("span_tables", tables, ({}, {"page": 16})),
)
if torch.cuda.is_available() and importlib.util.find_spec("flashinfer"):
    of_chunks = Form(f"chunk of {CHUNK}"), Form(f"chunk of {CHUNK}, gathered", {"gathered": True})
    OPERATIONS += (Operation("flashinfer_extend", flashinfer_extend, (), of_chunks),)
