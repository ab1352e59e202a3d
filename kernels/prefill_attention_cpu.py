"""Attention of many queries over paged KV with bfloat16 products, on the CPU: what a prefill step computes.

Keys and values are read in place, 64 at a time, and laid out for products of tiles of queries; a cached prefix and
the new tokens themselves are one run of keys, so nothing is computed apart and merged. What a query gets does not
depend, to the bit, on how its prompt was cut into chunks. ``paged_attention_reference`` is the plain reference.
"""

import functools
from collections.abc import Callable

import numpy as np
import torch
from numba import njit, prange

from fathom.kernels.bfloat16_cpu import tile_products
from fathom.kernels.kv_pair import KvPair
from fathom.kernels.numba_cpu import (
    APPROXIMATE,
    as_array,
    from_float32,
    match_torch_threads,
)
from fathom.kernels.paged_attention_cpu import EVERYTHING
from fathom.kernels.softmax_cpu import fold_block
from fathom.kernels.work_sharing_cpu import take

TILE_ROWS = 256
"""Query rows that share a layout of keys and values."""

KEYS_PER_BLOCK = 64
ROWS_AT_ONCE = 4
"""Four rows of four vectors each are the sums that registers hold."""


def plan_tiles(
    entry: np.ndarray, queries: np.ndarray, segments: np.ndarray, heads: int, kv_heads: int, window: int = -1
) -> np.ndarray:
    """Cut segments into tiles of neighbouring queries on one KV head.

    Args:
        entry: [segments + 1] int64, where each segment's slots begin; the last ones are of its queries.
        queries: [segments + 1] int64, where each segment's queries begin among the packed ones.
        segments: [segments] bool, those to compute.
        window: how many earlier tokens a query sees besides itself; -1 for all.

    Returns:
        [tiles, 5] int64: first and end of the slots, first query, queries, KV head; the most work first.
    """
    size = max(TILE_ROWS * kv_heads // heads, 1)
    tiles = []
    for segment in np.flatnonzero(segments).tolist():
        begin, end = int(entry[segment]), int(entry[segment + 1])
        count = int(queries[segment + 1] - queries[segment])
        for first in range(0, count, size):
            rows = min(size, count - first)
            stop = end - count + first + rows
            # Blocks lie alike for all tiles of a segment.
            unseen = max(stop - rows - window - begin, 0) if window >= 0 else 0
            start = begin + unseen // KEYS_PER_BLOCK * KEYS_PER_BLOCK
            tiles += [(start, stop, int(queries[segment]) + first, rows, head) for head in range(kv_heads)]
    found = np.array(tiles, np.int64).reshape(-1, 5)
    return found[np.argsort((found[:, 0] - found[:, 1]) * found[:, 3], kind="stable")]


def prefill_attention(
    query: torch.Tensor,
    pool: tuple[torch.Tensor, torch.Tensor],
    slots: np.ndarray,
    tiles: np.ndarray,
    scale: float,
    output: torch.Tensor,
    window: int = -1,
) -> None:
    """Causal attention of new tokens over all tokens up to themselves.

    Args:
        query: [rows, heads, head_dim] bfloat16, packed, segment after segment.
        pool: keys [slots, kv_heads, head_dim] and values [slots, kv_heads, value_dim] of one layer, bfloat16,
            those of the new tokens in it; widths in whole multiples of 32.
        slots: [entries] int32, as :func:`plan_tiles` was told.
        tiles: of :func:`plan_tiles`, with the same ``window``.
        output: [rows, heads, value_dim] bfloat16, contiguous; the rows of the tiles are written.
    """
    heads, head_dim = query.shape[1:]
    kv_heads, value_dim = pool[1].shape[1:]
    keys, key_slot, key_head, *of_values = KvPair.of(pool).lines
    _compiled(heads // kv_heads, head_dim, value_dim)(
        as_array(query.contiguous()).view(np.int32),
        (keys.view(np.int32), key_slot, key_head),
        tuple(of_values),
        slots,
        tiles,
        as_array(output),
        np.float32(scale),
        EVERYTHING if window < 0 else window,
        torch.get_num_threads(),
    )


def warm_up(heads: int, kv_heads: int, head_dim: int, value_dim: int) -> None:
    """Compile the kernel for these shapes now, so that no request waits for it (seconds, cached on disk)."""
    query, output = (torch.zeros(1, heads, dim, dtype=torch.bfloat16) for dim in (head_dim, value_dim))
    pool = query[:, :kv_heads], output[:, :kv_heads].clone()
    one = np.arange(2)
    tiles = plan_tiles(one, one, np.ones(1, bool), heads, kv_heads)
    prefill_attention(query, pool, np.zeros(1, np.int32), tiles, 1.0, output)


@functools.cache
def _compiled(group: int, head_dim: int, value_dim: int) -> Callable[..., None]:
    match_torch_threads()
    block, half_block, at_once = KEYS_PER_BLOCK, KEYS_PER_BLOCK // 2, ROWS_AT_ONCE
    pairs, key_vectors = head_dim // 2, KEYS_PER_BLOCK // 16
    value_vectors = 4 if value_dim % 64 == 0 else 2
    step = 16 * value_vectors

    @njit(parallel=True, **APPROXIMATE)
    def kernel(query, key_lines, value_lines, slots, tiles, output, scale, reach, threads):
        keys, key_slot, key_head = key_lines
        values, value_slot, value_head = value_lines
        # One list for all threads.
        queue, taken = np.array([0, len(tiles)]), np.zeros(1, np.int64)
        for _thread in prange(threads):
            while True:
                i = take(taken, queue, 0)
                if i < 0:
                    break
                first, end, at, count, h = tiles[i]
                key_line, value_line = h * key_head, h * value_head
                rows = count * group
                whole = (rows + at_once - 1) // at_once * at_once
                q = np.zeros((whole, pairs), np.int32)
                for x in range(rows):
                    given = query[at + x // group, h * group + x % group]
                    for d in range(pairs):
                        q[x, d] = given[d]
                scores = np.empty((whole, block), np.float32)
                weights = np.zeros((whole, block), np.uint16)
                sums = np.zeros((whole, value_dim), np.float32)
                top = np.full(rows, -np.inf, np.float32)
                total = np.zeros(rows, np.float32)
                # Pairs of a key's elements, and pairs of two keys' values, where a tile of products reads them.
                key_pairs = np.zeros((pairs, block), np.int32)
                value_pairs = np.zeros((half_block, 2 * value_dim), np.uint16)
                for begin in range(first, end, block):
                    n = min(block, end - begin)
                    for t in range(n):
                        key = keys[slots[begin + t] * key_slot + key_line]
                        for d in range(pairs):
                            key_pairs[d, t] = key[d]
                    for t in range(0, n, 2):
                        # The last key stands in for one behind it, whose weight is nothing.
                        one = values[slots[begin + t] * value_slot + value_line]
                        two = values[slots[min(begin + t + 1, end - 1)] * value_slot + value_line]
                        mixed = value_pairs[t // 2]
                        for d in range(value_dim):
                            mixed[2 * d] = one[d]
                            mixed[2 * d + 1] = two[d]
                    if n < block:
                        value_pairs[(n + 1) // 2 :] = 0
                    for x in range(0, whole, at_once):
                        tile_products(scores, x, 0, q, key_pairs, pairs, at_once, key_vectors, 0, 0)
                    # Whether some query of the tile does not see all keys of the block.
                    partly = begin + block > end - count + 1 or end - 1 - reach > begin
                    for x in range(rows):
                        score = scores[x]
                        if partly:
                            visible = end - count + x // group + 1 - begin
                            for t in range(max(visible, 0), block):
                                score[t] = -np.inf
                            for t in range(min(visible - 1 - reach, block)):
                                score[t] = -np.inf
                        fold_block(score, scale, weights[x], sums[x], top, total, x)
                    for column in range(0, value_dim, step):
                        for x in range(0, whole, at_once):
                            tile_products(
                                sums,
                                x,
                                column,
                                weights.view(np.int32),
                                value_pairs.view(np.int32),
                                half_block,
                                at_once,
                                value_vectors,
                                1,
                                0,
                            )
                for x in range(rows):
                    result, factor = output[at + x // group, h * group + x % group], np.float32(1) / total[x]
                    for d in range(value_dim):
                        result[d] = from_float32(sums[x, d] * factor, result)

    return kernel
