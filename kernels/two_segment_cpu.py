"""The CPU kernel of two-segment decode attention; contract and reference are in ``two_segment_attention.py``."""

import functools
import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numba import njit, prange

from fathom.kernels.decode_attention import KEYS_AHEAD, KEYS_PER_BLOCK, KEYS_PER_TASK
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

FASTMATH = {"reassoc", "contract", "nsz", "arcp", "afn"}


class Tasks(NamedTuple):
    """Work list of one step: each task is one KV head of one request over one run of keys.

    The tasks of a (request, KV head) pair are consecutive, segment 1 first; ``first`` holds where they begin.
    """

    row: np.ndarray  # [tasks] int64, page-table row, or -1 for a run of the compact buffer
    request: np.ndarray  # [tasks] int64, index into the batch
    head: np.ndarray  # [tasks] int64, KV head
    start: np.ndarray  # [tasks] int64, table entry or place in the compact buffer
    stop: np.ndarray  # [tasks] int64
    first: np.ndarray  # [batch * kv_heads + 1] int64
    end: np.ndarray  # [batch] int64, end of the table range
    evidence: np.ndarray  # [batch] int64, row of the evidence or -1


def plan_tasks(packed: np.ndarray, kv_heads: int) -> Tasks:
    """Split one step into tasks of at most ``KEYS_PER_TASK`` keys.

    Args:
        packed: [batch, 6] int32, the columns of ``two_segment_attention.FIELDS``.
    """
    row, begin, end, compact_start, compact_length, evidence = packed.astype(np.int64).T
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
    return Tasks(
        np.where(compact, -1, row[request]), request, head, start, stop, first, end.copy(), evidence.copy()
    )


def two_segment_attention_cpu(
    query: torch.Tensor,
    pool: tuple[torch.Tensor, torch.Tensor],
    compact: tuple[torch.Tensor, torch.Tensor],
    page_table: torch.Tensor,
    tasks: Tasks,
    scale: float,
    evidence: "Evidence | None" = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``two_segment_attention`` on the CPU; same shapes.

    Raises:
        TypeError: for a KV dtype other than float32, bfloat16 and float16.
    """
    batch, window, heads, head_dim = query.shape
    kv_heads, value_dim = pool[0].shape[1], pool[1].shape[2]
    rows = heads // kv_heads * window
    output = torch.empty(batch, window, heads, value_dim)
    lse = torch.empty(batch, window, heads)
    partials = (
        np.empty((len(tasks.row), rows, value_dim), np.float32),
        np.empty((len(tasks.row), rows), np.float32),
        np.empty((len(tasks.row), rows), np.float32),
    )
    if evidence is None:
        tasks = tasks._replace(evidence=np.full(batch, -1))
        kept = (np.empty((1, kv_heads, rows, 1), np.float32), np.empty((1, kv_heads, 1), np.float32))
    else:
        logits = evidence.logits.view(len(evidence.logits), kv_heads, rows, -1)
        kept = (logits.numpy(), evidence.key_norms.numpy())
    _compiled(rows, head_dim, value_dim, pool[0].dtype)(
        query.float().numpy(),
        (*as_lines(pool[0]), *as_lines(pool[1])),
        (*as_lines(compact[0]), *as_lines(compact[1])),
        page_table.numpy(),
        tuple(tasks),
        kept,
        partials,
        (output.numpy(), lse.numpy()),
        np.float32(scale),
    )
    return output, lse


@functools.cache
def _compiled(rows: int, head_dim: int, value_dim: int, dtype: torch.dtype):
    """The kernel with its loop bounds fixed, which lets LLVM unroll and vectorise them.

    ``rows`` query rows share a KV head: its query heads times the window.
    """
    if dtype not in DTYPES:
        raise TypeError(f"KV dtype {dtype} is not supported on the CPU; legal: {', '.join(map(str, DTYPES))}")
    match_torch_threads()
    block, ahead = KEYS_PER_BLOCK, KEYS_AHEAD
    cache_line = LINE_BYTES // dtype.itemsize

    # One function: a closure over another compiled function would never be found in the cache on disk.
    @njit(parallel=True, fastmath=FASTMATH, cache=True)
    def kernel(query, pool, compact, table, tasks, evidence, partials, results, scale):
        row, request, head, start, stop, first, end, evidence_row = tasks
        logits, norms = evidence
        partial, partial_max, partial_sum = partials
        window = query.shape[1]
        group = rows // window
        for i in prange(len(row)):
            b, h = request[i], head[i]
            q = np.empty((rows, head_dim), np.float32)
            visible = np.empty(rows, np.int64)
            for r in range(rows):
                visible[r] = end[b] - window + r % window + 1
                for d in range(head_dim):
                    q[r, d] = query[b, r % window, head[i] * group + r // window, d] * scale
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
                    e0, e1 = begin + t, min(begin + t + 1, last)
                    e2, e3 = min(begin + t + 2, last), min(begin + t + 3, last)
                    for far in range(e0 + ahead, e0 + ahead + 4):
                        e = min(far, last)
                        for d in range(0, head_dim, cache_line):
                            prefetch(keys, (slots[e] if paged else e) * key_slot + key_line, d)
                    k0 = keys[(slots[e0] if paged else e0) * key_slot + key_line]
                    k1 = keys[(slots[e1] if paged else e1) * key_slot + key_line]
                    k2 = keys[(slots[e2] if paged else e2) * key_slot + key_line]
                    k3 = keys[(slots[e3] if paged else e3) * key_slot + key_line]
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
                    e0, e1 = begin + t, min(begin + t + 1, last)
                    e2, e3 = min(begin + t + 2, last), min(begin + t + 3, last)
                    for far in range(e0 + ahead, e0 + ahead + 4):
                        e = min(far, last)
                        for d in range(0, value_dim, cache_line):
                            prefetch(values, (slots[e] if paged else e) * value_slot + value_line, d)
                    v0 = values[(slots[e0] if paged else e0) * value_slot + value_line]
                    v1 = values[(slots[e1] if paged else e1) * value_slot + value_line]
                    v2 = values[(slots[e2] if paged else e2) * value_slot + value_line]
                    v3 = values[(slots[e3] if paged else e3) * value_slot + value_line]
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
            partial[i], partial_max[i], partial_sum[i] = acc, top, total

        output, lse = results
        for pair in prange(len(first) - 1):
            begin, stop_at = first[pair], first[pair + 1]
            b, h = request[begin], head[begin]
            for r in range(rows):
                w, at = r % window, h * group + r // window
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
                lse[b, w, at] = top_all + math.log(total_all)
                for d in range(value_dim):
                    output[b, w, at, d] = mixed[d] / total_all if total_all > 0 else np.float32(0)

    return kernel
