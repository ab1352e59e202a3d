"""Attention of many queries over paged KV with bfloat16 products, on the CPU: what a prefill step computes.

Keys and values are read in place, 64 at a time, and laid out for products of tiles of queries; a cached prefix and
the new tokens themselves are one run of keys, so nothing is computed apart and merged. What a query gets does not
depend, to the bit, on how its prompt was cut into chunks. ``paged_attention_reference`` is the plain reference.
"""

import numpy as np
import torch
from numba import njit, prange

from fathom.kernels.bfloat16_cpu import turn_sixteen
from fathom.kernels.kv_pair import KvPair
from fathom.kernels.matrix_products_cpu import ROWS, add_product, begin_products, end_products, product
from fathom.kernels.numba_cpu import (
    APPROXIMATE,
    LINE_BYTES,
    as_array,
    from_float32,
    match_torch_threads,
)
from fathom.kernels.paged_attention_cpu import NO_REACH, first_seen
from fathom.kernels.softmax_cpu import KEYS_PER_BLOCK, PARTS, raise_top, weigh
from fathom.kernels.work_sharing_cpu import take

TILE_ROWS = 512
"""Query rows that share a layout of keys and values."""

ROWS_TOGETHER = 16
"""Rows whose scores of a block are weighed while those of the next ones are computed; a multiple of ``ROWS``."""


def plan_tiles(
    entry: np.ndarray,
    queries: np.ndarray,
    segments: np.ndarray,
    heads: int,
    kv_heads: int,
    reach: np.ndarray | None = None,
) -> np.ndarray:
    """Cut segments into tiles of neighbouring queries on one KV head.

    Args:
        entry: [segments + 1] int64, where each segment's slots begin; the last ones are of its queries.
        queries: [segments + 1] int64, where each segment's queries begin among the packed ones.
        segments: [segments] bool, those to compute.
        reach: [queries] int64, of all segments: how many earlier entries each query sees besides its own; None
            for all. A query's own entry less its reach never decreases within a segment.

    Returns:
        [tiles, 5] int64: first and end of the slots, first query, queries, KV head; the most work first.
    """
    size = max(TILE_ROWS * kv_heads // heads, 1)
    oldest = None if reach is None else first_seen(entry, queries, reach)
    tiles = []
    for segment in np.flatnonzero(segments).tolist():
        begin, end = int(entry[segment]), int(entry[segment + 1])
        count = int(queries[segment + 1] - queries[segment])
        for first in range(0, count, size):
            rows, at = min(size, count - first), int(queries[segment]) + first
            stop = end - count + first + rows
            # Blocks lie alike for all tiles of a segment.
            unseen = 0 if oldest is None else max(int(oldest[at]) - begin, 0)
            start = begin + unseen // KEYS_PER_BLOCK * KEYS_PER_BLOCK
            tiles += [(start, stop, at, rows, head) for head in range(kv_heads)]
    found = np.array(tiles, np.int64).reshape(-1, 5)
    return found[np.argsort((found[:, 0] - found[:, 1]) * found[:, 3], kind="stable")]


def prefill_attention(
    query: torch.Tensor,
    pool: tuple[torch.Tensor, torch.Tensor],
    slots: np.ndarray,
    tiles: np.ndarray,
    scale: float,
    output: torch.Tensor,
    reach: np.ndarray | None = None,
) -> None:
    """Causal attention of new tokens over all tokens up to themselves.

    Args:
        query: [rows, heads, head_dim] bfloat16, packed, segment after segment.
        pool: keys [slots, kv_heads, head_dim] and values [slots, kv_heads, value_dim] of one layer, bfloat16,
            those of the new tokens in it; widths in whole multiples of 32.
        slots: [entries] int32, as :func:`plan_tiles` was told.
        tiles: of :func:`plan_tiles`, with the same ``reach``.
        output: [rows, heads, value_dim] bfloat16, contiguous; the rows of the tiles are written.
    """
    heads, kv_heads = query.shape[1], pool[1].shape[1]
    keys, key_slot, key_head, *of_values = KvPair.of(pool).lines
    _kernel(
        as_array(query.contiguous()).view(np.int32),
        (keys.view(np.int32), key_slot, key_head),
        tuple(of_values),
        slots,
        tiles,
        as_array(output),
        heads // kv_heads,
        np.float32(scale),
        NO_REACH if reach is None else reach,
        torch.get_num_threads(),
    )


def warm_up() -> None:
    """Compile the kernel now, so that no request waits for it (seconds, cached on disk)."""
    match_torch_threads()
    query = torch.zeros(1, 1, 32, dtype=torch.bfloat16)
    one = np.arange(2)
    tiles = plan_tiles(one, one, np.ones(1, bool), 1, 1)
    prefill_attention(query, (query, query), np.zeros(1, np.int32), tiles, 1.0, torch.empty_like(query))


@njit(**APPROXIMATE)
def _zeros(rows, size):
    """[rows, size] zero bytes that begin at a line of the processor's caches: products read them faster."""
    space = np.zeros(rows * size + LINE_BYTES, np.uint8)
    begin = -space.ctypes.data % LINE_BYTES
    return space[begin : begin + rows * size].reshape(rows, size)


@njit(parallel=True, **APPROXIMATE)
def _kernel(query, key_lines, value_lines, slots, tiles, output, group, scale, reach, threads):
    pairs, value_dim = query.shape[2], output.shape[2]
    keys, key_slot, key_head = key_lines
    values, value_slot, value_head = value_lines
    # One list for all threads.
    queue, taken = np.array([0, len(tiles)]), np.zeros(1, np.int64)
    limited = len(reach) > 0
    for _thread in prange(threads):
        others = begin_products()
        while True:
            i = take(taken, queue, 0)
            if i < 0:
                break
            first, end, at, count, h = tiles[i]
            key_line, value_line = h * key_head, h * value_head
            oldest = end - 1 - reach[at + count - 1] if limited else first
            rows = count * group
            whole = (rows + ROWS - 1) // ROWS * ROWS
            q = _zeros(whole, 4 * pairs).view(np.int32)
            for x in range(rows):
                for d in range(pairs):
                    q[x, d] = query[at + x // group, h * group + x % group, d]
            scores = _zeros(2 * ROWS_TOGETHER, 4 * KEYS_PER_BLOCK).view(np.float32)
            weights = _zeros(ROWS_TOGETHER, 2 * KEYS_PER_BLOCK).view(np.uint16)
            weight_pairs = weights.view(np.int32)
            sums = _zeros(whole, 4 * value_dim).view(np.float32)
            top = np.full(rows, -np.inf, np.float32)
            totals = _zeros(rows, 4 * PARTS).view(np.float32)
            key_places = np.empty(KEYS_PER_BLOCK, np.int64)
            # Pairs of a key's elements, and pairs of two keys' values, where products read them.
            key_pairs = _zeros(pairs, 4 * KEYS_PER_BLOCK).view(np.int32)
            mixed_values = _zeros(KEYS_PER_BLOCK // 2, 4 * value_dim).view(np.uint16)
            value_pairs = mixed_values.view(np.int32)
            for begin in range(first, end, KEYS_PER_BLOCK):
                n = min(KEYS_PER_BLOCK, end - begin)
                # The last key stands in for those behind it, whose weights are nothing.
                for t in range(KEYS_PER_BLOCK):
                    key_places[t] = slots[min(begin + t, end - 1)] * key_slot + key_line
                for t in range(0, KEYS_PER_BLOCK, 16):
                    for d in range(0, pairs, 16):
                        turn_sixteen(keys, key_places, t, d, key_pairs)
                for t in range(0, n, 2):
                    one = slots[begin + t] * value_slot + value_line
                    two = slots[min(begin + t + 1, end - 1)] * value_slot + value_line
                    for d in range(value_dim):
                        mixed_values[t // 2, 2 * d] = values[one, d]
                        mixed_values[t // 2, 2 * d + 1] = values[two, d]
                if n < KEYS_PER_BLOCK:
                    mixed_values[(n + 1) // 2 :] = 0
                # Whether some query of the tile does not see all keys of the block.
                partly = begin + KEYS_PER_BLOCK > end - count + 1 or oldest > begin
                # The first row that sees a key of the block is one of these.
                unseen = max(begin - (end - count), 0) * group // ROWS_TOGETHER * ROWS_TOGETHER
                product(scores, 0, q, unseen, min(ROWS_TOGETHER, whole - unseen), key_pairs)
                for row in range(unseen, rows, ROWS_TOGETHER):
                    own = (row - unseen) // ROWS_TOGETHER % 2 * ROWS_TOGETHER
                    # AMX's unit works on the rows behind these and before them while the vectors' works on these.
                    later = row + ROWS_TOGETHER
                    if later < rows:
                        lines = min(ROWS_TOGETHER, whole - later)
                        product(scores, ROWS_TOGETHER - own, q, later, lines, key_pairs)
                    if row > unseen:
                        add_product(sums, row - ROWS_TOGETHER, weight_pairs, 0, ROWS_TOGETHER, value_pairs)
                    last = min(later, rows)
                    if partly:
                        for x in range(row, last):
                            visible = end - count + x // group + 1 - begin
                            for t in range(max(visible, 0), KEYS_PER_BLOCK):
                                scores[own + x - row, t] = -np.inf
                            if limited:
                                for t in range(min(visible - 1 - reach[at + x // group], KEYS_PER_BLOCK)):
                                    scores[own + x - row, t] = -np.inf
                    for x in range(row, last):
                        raise_top(scores, own + x - row, scale, weights, sums, top, totals, x)
                    for x in range(row, last):
                        weigh(scores, own + x - row, scale, weights, x - row, top, totals, x)
                rest = (rows - 1) // ROWS_TOGETHER * ROWS_TOGETHER
                add_product(sums, rest, weight_pairs, 0, whole - rest, value_pairs)
            for x in range(rows):
                result = output[at + x // group, h * group + x % group]
                factor = np.float32(1) / totals[x].sum()
                for d in range(value_dim):
                    result[d] = from_float32(sums[x, d] * factor, result)
        end_products(others)
