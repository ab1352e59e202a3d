"""Top-K and packing of a refreshed selection on the CPU, one task per request and KV head.

The contracts and plain versions are in ``stable_top_k.py`` and ``pack_segment.py``: same indices, same bytes.
"""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numba import njit, prange

from fathom.kernels.numba_cpu import as_slots, match_torch_threads


def stable_top_k_cpu(
    scores: torch.Tensor, valid: torch.Tensor, counts: torch.Tensor, width: int
) -> torch.Tensor:
    """Indices of each row's ``counts`` highest scores: [..., width] int32, ascending, padded with -1.

    Args:
        scores: [..., n] float32; valid: [..., n] bool; counts: [...] int64, at most the row's valid ones.
    """
    n = scores.shape[-1]
    indices = torch.empty((*scores.shape[:-1], width), dtype=torch.int32)
    _top_k()(
        scores.reshape(-1, n).numpy(),
        valid.reshape(-1, n).numpy(),
        counts.reshape(-1).numpy(),
        indices.view(-1, width).numpy(),
    )
    return indices


@functools.cache
def _top_k() -> Callable[..., None]:
    match_torch_threads()

    @njit(parallel=True, cache=True)
    def kernel(scores, valid, counts, indices):
        n, width = scores.shape[1], indices.shape[1]
        for i in prange(len(scores)):
            indices[i] = -1
            if counts[i] == 0:
                continue
            own, there = np.empty(n, np.float32), 0
            for t in range(n):
                if valid[i, t]:
                    own[there] = scores[i, t]
                    there += 1
            threshold = np.partition(own[:there], there - counts[i])[there - counts[i]]
            room = counts[i]
            for t in range(there):
                room -= own[t] > threshold
            place = 0
            for t in range(n):
                if not valid[i, t] or scores[i, t] < threshold:
                    continue
                if scores[i, t] == threshold:
                    if room == 0:
                        continue
                    room -= 1
                indices[i, place] = t
                place += 1
                if place == width:
                    break

    return kernel


def pack_segment_cpu(
    pool: tuple[torch.Tensor, torch.Tensor],
    compact: tuple[torch.Tensor, torch.Tensor],
    page_table: torch.Tensor,
    rows: torch.Tensor,
    start: torch.Tensor,
    indices: torch.Tensor,
    sink: int,
) -> None:
    """``pack_segment`` on the CPU; same arguments, tensors with [heads, dim] blocks."""
    places = (page_table.numpy(), rows.numpy(), start.numpy(), indices.numpy(), sink)
    for origin, buffer in zip(pool, compact, strict=True):
        _pack()(*as_slots(origin), *as_slots(buffer), *places)


@functools.cache
def _pack() -> Callable[..., None]:
    match_torch_threads()

    @njit(parallel=True, cache=True)
    def kernel(origin, origin_step, buffer, buffer_step, table, rows, start, indices, sink):
        kv_heads, width = indices.shape[1], indices.shape[2]
        for task in prange(len(rows) * kv_heads):
            e, h = task // kv_heads, task % kv_heads
            if rows[e] < 0:
                continue
            slots = table[rows[e]]
            for t in range(sink + width):
                entry = t if t < sink else indices[e, h, t - sink]
                if entry < 0:
                    break
                source = origin[slots[entry] * origin_step, h]
                target = buffer[(start[e] + t) * buffer_step, h]
                for d in range(len(source)):
                    target[d] = source[d]

    return kernel


def warm_up(dtype: torch.dtype) -> None:
    """Compile both kernels now, so that no request waits for it (seconds, cached on disk)."""
    one: Any = torch.ones(1, 1, 1)
    stable_top_k_cpu(one, one.bool(), torch.ones(1, 1, dtype=torch.int64), 1)
    pair = one.to(dtype), one.to(dtype)
    number = torch.zeros(1, dtype=torch.int64)
    table, indices = torch.zeros(1, 1, dtype=torch.int32), torch.full((1, 1, 1), -1, dtype=torch.int32)
    pack_segment_cpu(pair, pair, table, number, number, indices, 1)
