"""Decode and prefill attention as problems to check and to time: the call, the reference, bytes and operations."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
import triton

from fathom.benchmarks.gpu_inputs import (
    ATTENTION_TOLERANCE,
    EXACT,
    SCORE_TOLERANCE,
    Inputs,
    Pair,
    Pool,
    Problem,
    Setting,
    part,
)
from fathom.kernels.extend_attention import extend_attention_reference
from fathom.kernels.key_shares import pick_pieces
from fathom.kernels.paged_decode import gather_entries, paged_decode, paged_decode_reference
from fathom.kernels.paged_extend import paged_extend, paged_extend_reference, pick_splits
from fathom.kernels.two_segment_attention import (
    Evidence,
    SegmentPlan,
    plan_segments,
    two_segment_attention,
    two_segment_attention_reference,
)
from fathom.runtime.kv.device_view import DeviceTables
from fathom.runtime.kv.view import SpanView
from fathom.runtime.sfi.config import SfiConfig

SFI = SfiConfig()
CHUNK = 8192
"""New tokens of all requests together in a chunk of prefill."""
CHECKED_ROWS = 16
"""Query rows of a request in a chunk that are compared where the reference cannot afford them all."""


def decode(s: Setting, page: int = 1, pieces: int | None = None) -> Problem:
    """Dense decode attention; through the engine's flat list with pages of one slot, else through a plain table."""
    inputs = Inputs(s)
    pool = Pool(inputs, page)
    query = inputs.heads_of(s.batch, s.heads, s.head_dim)
    table, rows = (pool.table, pool.rows) if page == 1 else (pool.padded, inputs.integers(range(s.batch)))
    lengths = inputs.integers(s.lengths)
    scale = s.head_dim**-0.5
    pieces = pieces or pick_pieces(s.kv_heads, s.processors)
    output = inputs.empty(s.batch, s.heads + 1, s.value_dim, dtype=s.dtype)

    def call() -> Any:
        return paged_decode(query, *pool.pair, table, rows, lengths, scale, pieces, output[:, : s.heads])

    def pairs(got: Any, last: bool) -> Iterator[Pair]:
        own = part(s, last)
        want = paged_decode_reference(query[own], *pool.pair, table, rows[own], lengths[own], scale)
        yield "output", got[0][own], want[0], ATTENTION_TOLERANCE[s.dtype]
        yield "log-sum-exp", got[1][own], want[1], SCORE_TOLERANCE
        beyond = output[:, s.heads :]
        yield "beyond the output", beyond, torch.full_like(beyond, float("nan")), EXACT

    entries = sum(s.lengths)
    moved = entries * s.entry_bytes + s.batch * (s.row_bytes(s.dtype.itemsize) + 8) + 4 * sum(pool.pages)
    return Problem(call, pairs, moved, s.product_flops(entries), partial(output.fill_, float("nan")))


def extend(
    s: Setting,
    page: int = 1,
    new: int | None = None,
    chunk: int = CHUNK,
    splits: int | None = None,
    room: int = 0,
    usual: int | None = None,
) -> Problem:
    """Prefill over a prefix: the last ``new`` tokens of each request, or its share of a chunk.

    A captured pass is launched for ``room`` tokens of a request where it has fewer, in tiles for ``usual`` ones.
    """
    inputs = Inputs(s)
    fresh = [min(n, new) if new else min(-(-n // 2), max(chunk // s.batch, 1)) for n in s.lengths]
    before = [n - f for n, f in zip(s.lengths, fresh, strict=True)]
    tokens, most = sum(fresh), max(fresh)
    pool = Pool(Inputs(replace(s, lengths=tuple(before))), page)
    query = inputs.heads_of(tokens, s.heads, s.head_dim)
    own_keys = inputs.heads_of(tokens, s.kv_heads, s.head_dim).to(s.held)
    own_values = inputs.heads_of(tokens, s.kv_heads, s.value_dim).to(s.held)
    table, rows = (pool.table, pool.rows) if page == 1 else (pool.padded, inputs.integers(range(s.batch)))
    prefixes = inputs.integers(before)
    bounds = inputs.integers([sum(fresh[:i]) for i in range(s.batch + 1)])
    scale = s.head_dim**-0.5
    if splits is None:
        programs = triton.cdiv(most * (s.heads // s.kv_heads), 64) * s.batch * s.kv_heads
        splits = pick_splits(programs, max(before), s.processors)
    output = inputs.empty(tokens, s.heads + 1, s.value_dim, dtype=s.dtype)
    given = query, own_keys, own_values, *pool.pair, table, rows, prefixes, bounds

    def call() -> Any:
        return paged_extend(*given, max(most, room), scale, splits, output[:, : s.heads], usual)

    def pairs(got: Any, last: bool) -> Iterator[Pair]:
        at = slice(None)
        if last:  # of the last request the last rows alone
            own, length = slice(tokens - fresh[-1], tokens), before[-1]
            at = slice(tokens - min(CHECKED_ROWS, fresh[-1]), tokens)
            keys, values = (
                torch.cat((gather_entries(held, table[int(rows[-1])], length), fresh_ones[own].float()))
                for held, fresh_ones in ((pool.keys, own_keys), (pool.values, own_values))
            )
            want = extend_attention_reference(query[at], keys, values, scale)
        else:
            want = paged_extend_reference(*given, scale)
        yield "output", got[0][at], want[0], ATTENTION_TOLERANCE[s.dtype]
        yield "log-sum-exp", got[1][at], want[1], SCORE_TOLERANCE
        beyond = output[:, s.heads :]
        yield "beyond the output", beyond, torch.full_like(beyond, float("nan")), EXACT

    seen = sum(f * b + f * (f + 1) // 2 for f, b in zip(fresh, before, strict=True))
    moved = sum(s.lengths) * s.entry_bytes + tokens * s.row_bytes(s.dtype.itemsize)
    moved += 4 * sum(pool.pages) + 4 * (3 * s.batch + 1)
    return Problem(call, pairs, moved, s.product_flops(seen), partial(output.fill_, float("nan")))


def flashinfer_extend(s: Setting, chunk: int = CHUNK, gathered: bool = False) -> Problem:
    """The same by FlashInfer's kernels, as the engine plans them, the rows' own keys in the pool.

    ``gathered``: keys and values are copied from their slots into one piece of memory first, for the kernels that
    read such pieces; the copy is part of the time.

    Raises:
        NotImplementedError: for what the engine gives to Triton, with the reason.
    """
    from fathom.runtime.sglang_host.attention.flashinfer_prefill import FlashInferPrefill, why_not

    reason = why_not(s.held, s.dtype, s.heads, s.kv_heads, s.head_dim, s.value_dim, s.device)
    if reason:
        raise NotImplementedError(reason)
    inputs = Inputs(s)
    pool = Pool(inputs)
    fresh = [min(-(-n // 2), max(chunk // s.batch, 1)) for n in s.lengths]
    tokens, scale = sum(fresh), s.head_dim**-0.5
    query, output = inputs.normal(tokens, s.heads, s.head_dim), inputs.empty(tokens, s.heads, s.value_dim)
    output = output.to(s.dtype)
    entry, bounds = (np.concatenate([[0], np.cumsum(each)]) for each in (s.lengths, fresh))
    slots = pool.table[1 : 1 + sum(s.lengths), 0].cpu().numpy()
    view = SpanView(slots.__getitem__, entry, bounds, np.zeros(tokens, np.int64))
    there = DeviceTables(1, s.batch, sum(s.lengths), tokens, s.device).fill(0, view)
    shape = 1, s.heads, s.kv_heads, s.head_dim, s.dtype, s.device, s.processors
    if s.held != s.dtype and not gathered:
        raise NotImplementedError("KV of 8 bits is read from copies")
    made = FlashInferPrefill(*shape, room=sum(s.lengths) if gathered else 0, kv_dtype=s.held)

    def call() -> Any:
        made.attend(0, view, there, query, pool.pair, scale, output, gathered)

    def pairs(_: Any, last: bool) -> Iterator[Pair]:
        for i in range(s.batch - 1 if last else 0, s.batch):
            own = slots[int(entry[i]) : int(entry[i + 1])]
            at = slice(max(int(bounds[i]), int(bounds[i + 1]) - CHECKED_ROWS), int(bounds[i + 1]))
            keys, values = (held[torch.from_numpy(own).to(s.device).long()].float() for held in pool.pair)
            yield (
                "output",
                output[at],
                extend_attention_reference(query[at], keys, values, scale)[0],
                tolerance,
            )

    tolerance = ATTENTION_TOLERANCE[s.dtype]
    before = [n - f for n, f in zip(s.lengths, fresh, strict=True)]
    seen = sum(f * b + f * (f + 1) // 2 for f, b in zip(fresh, before, strict=True))
    moved = sum(s.lengths) * (s.entry_bytes + 4) + tokens * s.row_bytes(s.dtype.itemsize)
    return Problem(call, pairs, moved, s.product_flops(seen), partial(output.fill_, float("nan")))


def fast_step(
    s: Setting, sink: int = SFI.sink, selected: int = SFI.selected, recent: int = SFI.recent, slow: int = 0
) -> Problem:
    """SFI's fast step: a run of the compact buffer and the last entries in place.

    A short request reads all that it has, and so do the last ``slow`` ones.
    """
    inputs = Inputs(s)
    pool = Pool(inputs)
    room = sink + selected
    packed = [room if n > room + recent and i < s.batch - slow else 0 for i, n in enumerate(s.lengths)]
    begin = [n - recent if p else 0 for n, p in zip(s.lengths, packed, strict=True)]
    wide = tuple(
        inputs.normal(s.kv_heads, s.batch * room, dim).transpose(0, 1) for dim in (s.head_dim, s.value_dim)
    )
    for buffer in wide:
        for i, p in enumerate(packed):
            buffer[i * room + p : (i + 1) * room] = float("nan")
    compact = wide[0].to(s.held), wide[1].to(s.held)
    query = inputs.normal(s.batch, s.heads, s.head_dim)
    starts = [i * room for i in range(s.batch)]
    first, end, start, count, kept = (
        inputs.integers(each) for each in (begin, s.lengths, starts, packed, [-1] * s.batch)
    )
    plan = plan_segments(pool.rows, first, end, start, count, kept, s.kv_heads)
    scale = s.head_dim**-0.5

    def call() -> Any:
        return two_segment_attention(query, pool.pair, compact, pool.table, plan, scale)

    def pairs(got: Any, last: bool) -> Iterator[Pair]:
        own = part(s, last)
        only = SegmentPlan(plan.packed[own], s.kv_heads)
        want = two_segment_attention_reference(query[own], pool.pair, compact, pool.table, only, scale)
        yield "output", got[0][own], want[0], ATTENTION_TOLERANCE[s.dtype]
        yield "log-sum-exp", got[1][own], want[1], SCORE_TOLERANCE

    in_place = sum(n - b for n, b in zip(s.lengths, begin, strict=True))
    entries = in_place + sum(packed)
    moved = entries * s.entry_bytes + 4 * in_place + s.batch * (s.row_bytes(4) + 24)
    return Problem(call, pairs, moved, s.product_flops(entries))


def slow_step(s: Setting) -> Problem:
    """SFI's slow step: everything is read, and the logits and key norms are kept."""
    inputs = Inputs(s)
    pool = Pool(inputs)
    query = inputs.normal(s.batch, s.heads, s.head_dim)
    lengths, nothing = inputs.integers(s.lengths), torch.zeros_like(pool.rows)
    kept = torch.arange(s.batch, device=s.device)
    plan = plan_segments(pool.rows, nothing, lengths, nothing, nothing, kept, s.kv_heads)
    scale, longest = s.head_dim**-0.5, max(s.lengths)

    def unwritten(requests: int) -> Evidence:
        shapes = (requests, s.heads, longest), (requests, s.kv_heads, longest)
        return Evidence(*(torch.full(shape, float("nan"), device=s.device) for shape in shapes))

    evidence = unwritten(s.batch)

    def poison() -> None:
        evidence.logits.fill_(float("nan"))
        evidence.key_norms.fill_(float("nan"))

    def call() -> Any:
        return two_segment_attention(query, pool.pair, pool.pair, pool.table, plan, scale, evidence)

    def pairs(got: Any, last: bool) -> Iterator[Pair]:
        own = part(s, last)
        only = SegmentPlan(plan.packed[own].clone(), s.kv_heads)
        only.packed[:, 5] -= own.start
        kept = unwritten(len(only.packed))
        whole = query[own], pool.pair, pool.pair, pool.table
        want = two_segment_attention_reference(*whole, only, scale, kept)
        yield "output", got[0][own], want[0], ATTENTION_TOLERANCE[s.dtype]
        yield "log-sum-exp", got[1][own], want[1], SCORE_TOLERANCE
        yield "logits", evidence.logits[own], kept.logits, SCORE_TOLERANCE
        yield "key norms", evidence.key_norms[own], kept.key_norms, SCORE_TOLERANCE

    entries = sum(s.lengths)
    moved = entries * (s.entry_bytes + 4 + 4 * (s.heads + s.kv_heads))
    moved += s.batch * (s.row_bytes(4) + 24)
    return Problem(call, pairs, moved, s.product_flops(entries), poison)
