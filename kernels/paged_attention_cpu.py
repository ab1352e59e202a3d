"""Attention of a few queries per request over paged KV, on the CPU: keys and values are read in place.

One kernel for decode steps (one query), for drafted tokens that are verified and few new tokens over a long prefix
(several), and for fast steps of slow-fast decoding, whose requests also read a run of a compact buffer.
``paged_attention_reference`` is the plain reference; that of the compact buffer and of the evidence is in
``two_segment_attention.py``.
"""

import functools
import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numba import njit, prange

from fathom.kernels.extend_attention import extend_attention_reference
from fathom.kernels.numba_cpu import (
    DTYPES,
    LINE_BYTES,
    as_lines,
    exp_float32,
    match_torch_threads,
    prefetch,
    to_float32,
)

if TYPE_CHECKING:
    from fathom.kernels.two_segment_attention import Evidence

KEYS_PER_TASK = 1024
KEYS_PER_BLOCK = 64
KEYS_AHEAD = 8
"""How far ahead keys and values are asked for: a head's lie too far apart for the processor to guess."""

EVERYTHING = 1 << 40
"""A reach that no table has."""


class Tasks(NamedTuple):
    """Work list of one step, read by every layer: each task is one KV head of one request over one run of keys.

    The tasks of a (request, KV head) pair are consecutive, those of the compact buffer first; ``first`` holds where
    they begin. Query j of n of a request sees the table entries before ``end - n + j + 1``, its own the last.
    """

    row: np.ndarray  # [tasks] int64, page-table row, or -1 for a run of the compact buffer
    request: np.ndarray  # [tasks] int64, index into the batch
    head: np.ndarray  # [tasks] int64, KV head
    start: np.ndarray  # [tasks] int64, table entry or place in the compact buffer
    stop: np.ndarray  # [tasks] int64
    first: np.ndarray  # [batch * kv_heads + 1] int64
    end: np.ndarray  # [batch] int64, end of the table range
    evidence: np.ndarray  # [batch] int64, row of the evidence or -1
    queries: np.ndarray  # [batch + 1] int64, where each request's queries begin among the packed ones
    most: int = 1  # queries of the request that has most
    reach: int = EVERYTHING  # how many earlier table entries a query sees besides its own


def plan_packed(entry: np.ndarray, queries: np.ndarray, kv_heads: int, window: int = -1) -> Tasks:
    """Split a step over page tables that lie one after the other in a table of a single row.

    Args:
        entry: [batch + 1] int64, where each request's slots begin in that row; the last ones are of its queries.
        queries: [batch + 1] int64, as in :class:`Tasks`; each request has at least one.
        window: how many earlier tokens a query sees besides itself; -1 for all.
    """
    begin, end, counts = entry[:-1], entry[1:], np.diff(queries)
    if window >= 0:
        begin = np.maximum(begin, end - counts - window)
    none = np.zeros_like(begin)
    return _split(none, begin, end, none, none, kv_heads)._replace(
        queries=queries, most=int(counts.max(initial=0)), reach=EVERYTHING if window < 0 else window
    )


def plan_tasks(packed: np.ndarray, kv_heads: int) -> Tasks:
    """Split a step of one query per request.

    Args:
        packed: [batch, 6] int32, the columns of ``two_segment_attention.FIELDS``.
    """
    row, begin, end, compact_start, compact_length, evidence = packed.astype(np.int64).T
    return _split(row, begin, end, compact_start, compact_length, kv_heads)._replace(evidence=evidence.copy())


def _split(
    row: np.ndarray,
    begin: np.ndarray,
    end: np.ndarray,
    compact_start: np.ndarray,
    compact_length: np.ndarray,
    kv_heads: int,
) -> Tasks:
    """Tasks of at most ``KEYS_PER_TASK`` keys, at least one for each pair. All arguments [batch] int64."""
    compact_splits = -(-compact_length // KEYS_PER_TASK)
    splits = np.maximum(compact_splits - (-(end - begin) // KEYS_PER_TASK), 1)
    pair_splits = np.repeat(splits, kv_heads)
    first = np.concatenate([[0], np.cumsum(pair_splits)]).astype(np.int64)
    pair = np.repeat(np.arange(len(pair_splits)), pair_splits)
    request, head = pair // kv_heads, pair % kv_heads
    part = np.arange(len(pair)) - first[pair]
    compact = part < compact_splits[request]
    part = np.where(compact, part, part - compact_splits[request])
    base = np.where(compact, compact_start[request], begin[request])
    limit = np.where(compact, base + compact_length[request], end[request])
    start = base + part * KEYS_PER_TASK
    stop = np.minimum(start + KEYS_PER_TASK, limit)
    kept, queries = np.full(len(row), -1), np.arange(len(row) + 1)
    row = np.where(compact, -1, row[request])
    return Tasks(row, request, head, start, stop, first, end.copy(), kept, queries)


def paged_attention_reference(
    query: torch.Tensor,
    pool: tuple[torch.Tensor, torch.Tensor],
    slots: torch.Tensor,
    entry: list[int],
    queries: list[int],
    scale: float,
    window: int = -1,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Reference for :func:`paged_attention` in float32: that of extend attention, request by request.

    Args:
        slots: [entries] of all requests; entry, queries, window: as in :func:`plan_packed`.
    """
    parts = []
    for request in range(len(entry) - 1):
        own = slots[entry[request] : entry[request + 1]].long()
        q = query[queries[request] : queries[request + 1]]
        parts.append(extend_attention_reference(q, pool[0][own], pool[1][own], scale, window))
    outputs, lses = zip(*parts, strict=True)
    return torch.cat(outputs), torch.cat(lses)


def paged_attention(
    query: torch.Tensor,
    pool: tuple[torch.Tensor, torch.Tensor],
    page_table: torch.Tensor,
    tasks: Tasks,
    scale: float,
    compact: tuple[torch.Tensor, torch.Tensor] | None = None,
    evidence: "Evidence | None" = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of each request's last tokens over the tokens before them and causally over themselves.

    Args:
        query: [queries, heads, head_dim], float32, bfloat16 or float16; packed, request after request.
        pool: keys [slots, kv_heads, head_dim] and values [slots, kv_heads, value_dim] of one layer, float32,
            bfloat16 or float16, last dimension contiguous; those of the queries' own tokens are in it.
        page_table: [rows, max_length] int32, slot of each token.
        scale: factor on the dot products.
        compact: the layer's compact buffers; shapes and dtype as the pool's.
        evidence: written in place for the requests that have a row of it.

    Returns:
        output [queries, heads, value_dim] float32, zero for a query that sees nothing, and log-sum-exp
        [queries, heads] float32.

    Raises:
        TypeError: for a KV dtype other than float32, bfloat16 and float16.
    """
    count, heads, head_dim = query.shape
    kv_heads, value_dim = pool[0].shape[1], pool[1].shape[2]
    group = heads // kv_heads
    most = group * tasks.most
    kernel = _compiled(group, head_dim, value_dim, pool[0].dtype)
    output, lse = torch.empty(count, heads, value_dim), torch.empty(count, heads)
    partials = (
        np.empty((len(tasks.row), most, value_dim), np.float32),
        np.empty((len(tasks.row), most), np.float32),
        np.empty((len(tasks.row), most), np.float32),
    )
    if evidence is None:
        tasks = tasks._replace(evidence=np.full(len(tasks.evidence), -1))
        kept = (np.empty((1, kv_heads, most, 1), np.float32), np.empty((1, kv_heads, 1), np.float32))
    else:
        logits = evidence.logits.view(len(evidence.logits), kv_heads, most, -1)
        kept = (logits.numpy(), evidence.key_norms.numpy())
    pool_lines = *as_lines(pool[0]), *as_lines(pool[1])
    kernel(
        query.float().numpy(),
        pool_lines,
        pool_lines if compact is None else (*as_lines(compact[0]), *as_lines(compact[1])),
        page_table.numpy(),
        tuple(tasks),
        kept,
        partials,
        (output.numpy(), lse.numpy()),
        np.float32(scale),
    )
    return output, lse


def warm_up(heads: int, kv_heads: int, head_dim: int, value_dim: int, dtype: torch.dtype) -> None:
    """Compile the kernel for these shapes now, so that no request waits for it (a few seconds, cached on disk)."""
    query = torch.zeros(1, heads, head_dim, dtype=dtype)
    pool = tuple(torch.zeros(1, kv_heads, dim, dtype=dtype) for dim in (head_dim, value_dim))
    one = np.arange(2)
    paged_attention(query, pool, torch.zeros(1, 1, dtype=torch.int32), plan_packed(one, one, kv_heads), 1.0)


@njit(error_model="numpy", cache=True)
def _four_lines(array, width, cache_line, slots, paged, entry, last, slot, first):
    """Lines of four entries in a row, the last one's for those behind it. Later ones are asked for."""
    for far in range(entry + KEYS_AHEAD, entry + KEYS_AHEAD + 4):
        e = min(far, last)
        for d in range(0, width, cache_line):
            prefetch(array, (slots[e] if paged else e) * slot + first, d)
    e1, e2, e3 = min(entry + 1, last), min(entry + 2, last), min(entry + 3, last)
    if paged:
        return (
            slots[entry] * slot + first,
            slots[e1] * slot + first,
            slots[e2] * slot + first,
            slots[e3] * slot + first,
        )
    return entry * slot + first, e1 * slot + first, e2 * slot + first, e3 * slot + first


@functools.cache
def _compiled(group: int, head_dim: int, value_dim: int, dtype: torch.dtype):
    """The kernel with the bounds of its inner loops fixed, which lets LLVM unroll and vectorise them."""
    if dtype not in DTYPES:
        raise TypeError(f"KV dtype {dtype} is not supported on the CPU; legal: {', '.join(map(str, DTYPES))}")
    match_torch_threads()
    block = KEYS_PER_BLOCK
    cache_line = LINE_BYTES // dtype.itemsize

    # One function: a closure over another compiled function would never be found in the cache on disk.
    @njit(
        parallel=True, fastmath={"reassoc", "contract", "nsz", "arcp", "afn"}, error_model="numpy", cache=True
    )
    def kernel(query, pool, compact, table, tasks, evidence, partials, results, scale):
        row, request, head, start, stop, first, end, evidence_row, queries, _, reach = tasks
        logits, norms = evidence
        partial, partial_max, partial_sum = partials
        for i in prange(len(row)):
            b, h = request[i], head[i]
            at, window = queries[b], queries[b + 1] - queries[b]
            rows = group * window
            q = np.empty((rows, head_dim), np.float32)
            visible = np.empty(rows, np.int64)
            for r in range(rows):
                visible[r] = end[b] - window + r % window + 1
                given = query[at + r % window, h * group + r // window]
                for d in range(head_dim):
                    q[r, d] = given[d] * scale
            scores = np.empty((rows, block), np.float32)
            acc = np.zeros((rows, value_dim), np.float32)
            top = np.full(rows, -np.inf, np.float32)
            total = np.zeros(rows, np.float32)
            paged, line, kept = row[i] >= 0, max(row[i], 0), max(evidence_row[b], 0)
            keep = paged and evidence_row[b] >= 0
            keys, key_slot, key_head, values, value_slot, value_head = pool if paged else compact
            key_line, value_line = h * key_head, h * value_head
            slots, last = table[line], stop[i] - 1
            for begin in range(start[i], stop[i], block):
                n = min(block, stop[i] - begin)
                # Four keys at a time share each load of the query; a last group of fewer repeats its last key.
                for t in range(0, n, 4):
                    l0, l1, l2, l3 = _four_lines(
                        keys, head_dim, cache_line, slots, paged, begin + t, last, key_slot, key_line
                    )
                    k0, k1, k2, k3 = keys[l0], keys[l1], keys[l2], keys[l3]
                    for r in range(rows):
                        q_row, score = q[r], scores[r]
                        dot0 = dot1 = dot2 = dot3 = np.float32(0)
                        for d in range(head_dim):
                            x = q_row[d]
                            dot0 += x * to_float32(k0[d])
                            dot1 += x * to_float32(k1[d])
                            dot2 += x * to_float32(k2[d])
                            dot3 += x * to_float32(k3[d])
                        score[t] = dot0
                        score[t + 1] = dot1
                        score[t + 2] = dot2
                        score[t + 3] = dot3
                if keep:
                    # A loop of its own: within the loop above, LLVM would not vectorise it.
                    for t in range(n):
                        key, square = keys[slots[begin + t] * key_slot + key_line], np.float32(0)
                        for d in range(head_dim):
                            x = to_float32(key[d])
                            square += x * x
                        norms[kept, h, begin + t] = math.sqrt(square)
                for r in range(rows):
                    if paged:
                        for t in range(max(visible[r] - begin, 0), n):
                            scores[r, t] = -np.inf
                        for t in range(min(visible[r] - 1 - reach - begin, n)):
                            scores[r, t] = -np.inf
                    if keep:
                        for t in range(n):
                            logits[kept, h, r, begin + t] = scores[r, t]
                    new_top = top[r]
                    for t in range(n):
                        new_top = max(new_top, scores[r, t])
                    if new_top == -np.inf:
                        scores[r] = 0
                        continue
                    if new_top > top[r]:
                        rescale = np.float32(math.exp(top[r] - new_top))
                        top[r] = new_top
                        total[r] *= rescale
                        for d in range(value_dim):
                            acc[r, d] *= rescale
                    block_total = np.float32(0)
                    for t in range(n):
                        weight = exp_float32(scores[r, t] - new_top)
                        scores[r, t] = weight
                        block_total += weight
                    total[r] += block_total
                    scores[r, n : n + -n % 4] = 0
                for t in range(0, n, 4):
                    l0, l1, l2, l3 = _four_lines(
                        values, value_dim, cache_line, slots, paged, begin + t, last, value_slot, value_line
                    )
                    v0, v1, v2, v3 = values[l0], values[l1], values[l2], values[l3]
                    for r in range(rows):
                        sums, score = acc[r], scores[r]
                        w0, w1, w2, w3 = score[t], score[t + 1], score[t + 2], score[t + 3]
                        for d in range(value_dim):
                            sums[d] += (
                                w0 * to_float32(v0[d])
                                + w1 * to_float32(v1[d])
                                + w2 * to_float32(v2[d])
                                + w3 * to_float32(v3[d])
                            )
            for r in range(rows):
                partial[i, r] = acc[r]
                partial_max[i, r] = top[r]
                partial_sum[i, r] = total[r]

        output, lse = results
        for pair in prange(len(first) - 1):
            begin, stop_at = first[pair], first[pair + 1]
            b, h = request[begin], head[begin]
            window = queries[b + 1] - queries[b]
            for r in range(group * window):
                at, of = queries[b] + r % window, h * group + r // window
                top_all = np.float32(-np.inf)
                for i in range(begin, stop_at):
                    top_all = max(top_all, partial_max[i, r])
                mixed = np.zeros(value_dim, np.float32)
                total_all = np.float32(0)
                if top_all > -np.inf:
                    for i in range(begin, stop_at):
                        weight = np.float32(math.exp(partial_max[i, r] - top_all))
                        total_all += weight * partial_sum[i, r]
                        for d in range(value_dim):
                            mixed[d] += weight * partial[i, r, d]
                lse[at, of] = top_all + math.log(total_all)
                for d in range(value_dim):
                    output[at, of, d] = mixed[d] / total_all if total_all > 0 else np.float32(0)

    return kernel
