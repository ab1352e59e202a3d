"""Attention of many queries over paged KV with bfloat16 products, on the CPU: what a prefill step computes.

Keys and values are read in place, 64 at a time, and laid out for products of tiles of queries; a cached prefix and
the new tokens themselves are one run of keys, so nothing is computed apart and merged. What a query gets does not
depend, to the bit, on how its prompt was cut into chunks. ``paged_attention_reference`` is the plain reference.
"""

import numpy as np
import torch
from numba import njit, prange

from fathom.kernels.amx_cpu import has_amx
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

if has_amx():
    from fathom.kernels.amx_cpu import COLUMNS, ROWS, add_product, begin_products, end_products, product
else:
    from fathom.kernels.bfloat16_cpu import COLUMNS, ROWS, add_product, begin_products, end_products, product

TILE_ROWS = 256
"""Query rows that share a layout of keys and values."""

KEYS_PER_BLOCK = 64
ROWS_TOGETHER = 32
"""Rows whose scores of a block stay in a core's nearest cache until they are used."""


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
        EVERYTHING if window < 0 else window,
        torch.get_num_threads(),
    )


def warm_up() -> None:
    """Compile the kernel now, so that no request waits for it (seconds, cached on disk)."""
    match_torch_threads()
    query = torch.zeros(1, 1, 32, dtype=torch.bfloat16)
    one = np.arange(2)
    tiles = plan_tiles(one, one, np.ones(1, bool), 1, 1)
    prefill_attention(query, (query, query), np.zeros(1, np.int32), tiles, 1.0, torch.empty_like(query))


@njit(parallel=True, **APPROXIMATE)
def _kernel(query, key_lines, value_lines, slots, tiles, output, group, scale, reach, threads):
    pairs, value_dim = query.shape[2], output.shape[2]
    # Columns that lie together for a product.
    panel, value_panel = COLUMNS, COLUMNS if value_dim % COLUMNS == 0 else 32
    panels, value_panels = KEYS_PER_BLOCK // panel, value_dim // value_panel
    keys, key_slot, key_head = key_lines
    values, value_slot, value_head = value_lines
    # One list for all threads.
    queue, taken = np.array([0, len(tiles)]), np.zeros(1, np.int64)
    for _thread in prange(threads):
        others = begin_products()
        while True:
            i = take(taken, queue, 0)
            if i < 0:
                break
            first, end, at, count, h = tiles[i]
            key_line, value_line = h * key_head, h * value_head
            rows = count * group
            whole = (rows + ROWS - 1) // ROWS * ROWS
            q = np.zeros((whole, pairs), np.int32)
            for x in range(rows):
                given = query[at + x // group, h * group + x % group]
                for d in range(pairs):
                    q[x, d] = given[d]
            scores = np.empty((ROWS_TOGETHER, KEYS_PER_BLOCK), np.float32)
            weights = np.zeros((ROWS_TOGETHER, KEYS_PER_BLOCK), np.uint16)
            weight_pairs = weights.view(np.int32)
            sums = np.zeros((whole, value_dim), np.float32)
            top = np.full(rows, -np.inf, np.float32)
            total = np.zeros(rows, np.float32)
            # Pairs of a key's elements, and pairs of two keys' values, where products read them.
            key_pairs = np.zeros((panels, pairs, panel), np.int32)
            mixed_values = np.zeros((value_panels, KEYS_PER_BLOCK // 2, 2 * value_panel), np.uint16)
            value_pairs = mixed_values.view(np.int32)
            for begin in range(first, end, KEYS_PER_BLOCK):
                n = min(KEYS_PER_BLOCK, end - begin)
                for t in range(n):
                    key = keys[slots[begin + t] * key_slot + key_line]
                    lines, column = key_pairs[t // panel], t % panel
                    for d in range(pairs):
                        lines[d, column] = key[d]
                for t in range(0, n, 2):
                    # The last key stands in for one behind it, whose weight is nothing.
                    one = values[slots[begin + t] * value_slot + value_line]
                    two = values[slots[min(begin + t + 1, end - 1)] * value_slot + value_line]
                    for c in range(value_panels):
                        mixed, start = mixed_values[c, t // 2], c * value_panel
                        for d in range(value_panel):
                            mixed[2 * d] = one[start + d]
                            mixed[2 * d + 1] = two[start + d]
                if n < KEYS_PER_BLOCK:
                    mixed_values[:, (n + 1) // 2 :] = 0
                # Whether some query of the tile does not see all keys of the block.
                partly = begin + KEYS_PER_BLOCK > end - count + 1 or end - 1 - reach > begin
                for row in range(0, rows, ROWS_TOGETHER):
                    last = min(row + ROWS_TOGETHER, rows) - 1
                    seen = min(end - count + last // group + 1 - begin, n)
                    if seen <= 0:
                        continue
                    here = (seen + panel - 1) // panel
                    lines = min(ROWS_TOGETHER, whole - row)
                    for j in range(here):
                        columns = slice(j * panel, (j + 1) * panel)
                        product(scores[:lines, columns], q[row : row + lines], key_pairs[j])
                    here *= panel
                    for x in range(row, last + 1):
                        score = scores[x - row, :here]
                        if partly:
                            visible = end - count + x // group + 1 - begin
                            for t in range(max(visible, 0), len(score)):
                                score[t] = -np.inf
                            for t in range(min(visible - 1 - reach, len(score))):
                                score[t] = -np.inf
                        weight = weights[x - row, :here]
                        fold_block(score, scale, weight, sums[x], top, total, x)
                    left = weight_pairs[:lines, : here // 2]
                    for c in range(value_panels):
                        columns = slice(c * value_panel, (c + 1) * value_panel)
                        add_product(sums[row : row + lines, columns], left, value_pairs[c, : here // 2])
            for x in range(rows):
                result, factor = output[at + x // group, h * group + x % group], np.float32(1) / total[x]
                for d in range(value_dim):
                    result[d] = from_float32(sums[x, d] * factor, result)
        end_products(others)
