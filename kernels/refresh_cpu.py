"""Top-K and packing of a refreshed selection on the CPU, one task per request and KV head.

The contracts and plain versions are in ``stable_top_k.py`` and ``pack_segment.py``: same indices, same bytes. The
scores before them have a file of their own.
"""

from typing import Any

import numpy as np
import torch
from numba import njit

from fathom.kernels.numba_cpu import LINE_BYTES, as_lines, match_torch_threads, prefetch
from fathom.kernels.paged_attention_cpu import KEYS_AHEAD
from fathom.kernels.selector_scores_cpu import selector_scores_cpu
from fathom.kernels.work_sharing_cpu import all_threads, on_threads, share_of


def stable_top_k_cpu(
    scores: torch.Tensor, begin: torch.Tensor, end: torch.Tensor, counts: torch.Tensor, width: int
) -> torch.Tensor:
    """Indices of each row's ``counts`` highest scores: [..., width] int32, ascending, padded with -1.

    Args:
        scores: [..., n] float32; begin, end: [...] int64, the candidates; counts: [...] int64, at most so many.
    """
    rows, n = counts.numel(), scores.shape[-1]
    indices = torch.empty((*scores.shape[:-1], width), dtype=torch.int32)
    _top_k(
        scores.reshape(rows, n).view(torch.int32).numpy(),
        *(numbers.reshape(rows).contiguous().numpy() for numbers in (begin, end, counts)),
        indices.view(rows, width).numpy(),
    )
    return indices


BITS = 12
"""Of a score, by which it falls into a bin."""


@njit(cache=True)
def _top_k(scores, begin, end, counts, indices):
    on_threads(_top_k_of_some, all_threads(), scores, begin, end, counts, indices)


@njit(cache=True)
def _top_k_of_some(thread, threads, scores, begin, end, counts, indices):
    width = indices.shape[1]
    first_row, end_row = share_of(len(scores), thread, threads)
    for i in range(first_row, end_row):
        own = indices[i]
        for t in range(width):
            own[t] = -1
        if counts[i] == 0:
            continue
        # Unsigned integers in the order of the scores, -0.0 as +0.0.
        first, n = begin[i], end[i] - begin[i]
        order = np.empty(n, np.uint32)
        least, most = np.uint32(0xFFFFFFFF), np.uint32(0)
        for t in range(n):
            x = scores[i, first + t]
            x = x ^ ((x >> 31) | np.int32(-0x80000000))
            place = np.uint32(x if x != 0x7FFFFFFF else np.int32(-0x80000000))
            order[t] = place
            most = max(most, place)
            least = min(least, place)
        # Bins of equal width say where the last score to be taken lies, bins of that bin more closely, …
        shift = np.uint32(0)
        while (most - least) >> shift >= 1 << BITS:
            shift += np.uint32(1)
        bins, there, size = np.empty(1 << BITS, np.int64), order.copy(), n
        above, border = 0, (most - least) >> shift
        while True:
            bins[:] = 0
            for t in range(size):
                bins[(there[t] - least) >> shift] += 1
            while above + bins[border] < counts[i]:
                above += bins[border]
                border -= np.uint32(1)
            if shift == 0:
                break
            inside = 0
            for t in range(size):
                if (there[t] - least) >> shift == border:
                    there[inside] = there[t]
                    inside += 1
            size, least, finer = inside, least + (border << shift), min(shift, np.uint32(BITS))
            border, shift = (np.uint32(1) << finer) - np.uint32(1), shift - finer
        threshold, room = least + border, counts[i] - above
        place = 0
        for t in range(n):
            if order[t] < threshold:
                continue
            if order[t] == threshold:
                if room == 0:
                    continue
                room -= 1
            indices[i, place] = first + t
            place += 1
            if place == width:
                break


def pack_segment_cpu(
    pool: tuple[torch.Tensor, torch.Tensor],
    compact: tuple[torch.Tensor, torch.Tensor],
    page_table: torch.Tensor,
    rows: torch.Tensor,
    start: torch.Tensor,
    indices: torch.Tensor,
    sink: int,
) -> None:
    """``pack_segment`` on the CPU; same arguments."""
    places = (page_table.numpy(), rows.numpy(), start.numpy(), indices.numpy(), sink)
    for origin, buffer in zip(pool, compact, strict=True):
        _pack(*as_lines(origin), *as_lines(buffer), *places, LINE_BYTES // origin.element_size())


@njit(cache=True)
def _pack(origin, slot, head, buffer, buffer_slot, buffer_head, table, rows, start, indices, sink, line):
    given = (origin, slot, head, buffer, buffer_slot, buffer_head, table, rows, start, indices, sink, line)
    on_threads(_pack_some, all_threads(), given)


@njit(cache=True)
def _pack_some(thread, threads, given):
    """``line``: elements of a cache line."""
    origin, slot, head, buffer, buffer_slot, buffer_head, table, rows, start, indices, sink, line = given
    kv_heads, width = indices.shape[1], indices.shape[2]
    begin, end = share_of(len(rows) * kv_heads, thread, threads)
    for task in range(begin, end):
        e, h = task // kv_heads, task % kv_heads
        if rows[e] < 0:
            continue
        slots = table[rows[e]]
        for t in range(sink + width):
            entry = t if t < sink else indices[e, h, t - sink]
            if entry < 0:
                break
            if 0 <= t + KEYS_AHEAD - sink < width:
                far = max(indices[e, h, t + KEYS_AHEAD - sink], 0)
                for d in range(0, origin.shape[1], line):
                    prefetch(origin, slots[far] * slot + h * head, d)
            source = origin[slots[entry] * slot + h * head]
            target = buffer[(start[e] + t) * buffer_slot + h * buffer_head]
            for d in range(len(source)):
                target[d] = source[d]


def warm_up(dtype: torch.dtype, selector: Any) -> None:
    """Compile the kernels of a refresh now, so that no request waits for it (seconds, cached on disk).

    Args:
        selector: ``ScoreParameters``.
    """
    match_torch_threads()
    one: Any = torch.ones(1, 1, 1)
    selector_scores_cpu(one.unsqueeze(0), one, torch.zeros(1), torch.ones(1), selector)
    pair = one.to(dtype), one.to(dtype)
    number = torch.zeros(1, dtype=torch.int64)
    stable_top_k_cpu(one[0], number, number + 1, number + 1, 1)
    table, indices = torch.zeros(1, 1, dtype=torch.int32), torch.full((1, 1, 1), -1, dtype=torch.int32)
    pack_segment_cpu(pair, pair, table, number, number, indices, 1)
