"""Decode attention over paged KV: one new query per request, keys and values read in place from the pool.

``decode_attention`` is the CPU kernel, ``decode_attention_reference`` the plain-PyTorch reference it is tested
against. Both return the log-sum-exp beside the output so that segments can be merged (``merge_segments``).
"""

import functools
import math
from dataclasses import dataclass

import numpy as np
import torch
from numba import njit, prange

from fathom.kernels.numba_cpu import (
    DTYPES,
    LINE_BYTES,
    as_lines,
    exp_float32,
    match_torch_threads,
    prefetch,
    to_float32,
)

KEYS_PER_TASK = 1024
KEYS_PER_BLOCK = 64
KEYS_AHEAD = 8
"""How far ahead keys and values are asked for: a head's lie too far apart for the processor to guess."""


@dataclass(frozen=True)
class DecodePlan:
    """Work list of one decode step; built once per step, read by every layer.

    Each task is one KV head of one request over the keys ``start .. stop - 1`` of its page-table row. The tasks of
    a (request, KV head) pair are consecutive, and ``first`` holds where each pair's tasks begin.
    """

    row: np.ndarray  # [tasks] int64, row of the page table
    request: np.ndarray  # [tasks] int64, index into the batch
    head: np.ndarray  # [tasks] int64, KV head
    start: np.ndarray  # [tasks] int64
    stop: np.ndarray  # [tasks] int64
    first: np.ndarray  # [batch * kv_heads + 1] int64


def plan_decode(rows: torch.Tensor, lengths: torch.Tensor, kv_heads: int, window: int = -1) -> DecodePlan:
    """Split one decode step into tasks of at most ``KEYS_PER_TASK`` keys.

    Args:
        rows: [batch] row of each request in the page table.
        lengths: [batch] keys each request sees, its own new token included.
        window: how many earlier tokens a query sees besides itself; -1 for all.
    """
    row, stop = rows.numpy().astype(np.int64), lengths.numpy().astype(np.int64)
    return _split(row, np.zeros_like(stop), stop, kv_heads, window)


def plan_decode_packed(entry: np.ndarray, kv_heads: int, window: int = -1) -> DecodePlan:
    """As :func:`plan_decode`, for page tables that lie one after the other in a table of a single row.

    Args:
        entry: [batch + 1] int64, where each request's slots begin in that row.
    """
    return _split(np.zeros(len(entry) - 1, np.int64), entry[:-1], entry[1:], kv_heads, window)


def _split(row: np.ndarray, begin: np.ndarray, stop: np.ndarray, kv_heads: int, window: int) -> DecodePlan:
    start = np.maximum(stop - window - 1, begin) if window >= 0 else begin
    splits = np.maximum(-(-(stop - start) // KEYS_PER_TASK), 1)
    pair_splits = np.repeat(splits, kv_heads)
    first = np.concatenate([[0], np.cumsum(pair_splits)]).astype(np.int64)
    pair = np.repeat(np.arange(len(pair_splits)), pair_splits)
    request, head = pair // kv_heads, pair % kv_heads
    task_start = start[request] + (np.arange(len(pair)) - first[pair]) * KEYS_PER_TASK
    task_stop = np.minimum(task_start + KEYS_PER_TASK, stop[request])
    return DecodePlan(row[request], request, head, task_start, task_stop, first)


def decode_attention_reference(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    page_table: torch.Tensor,
    rows: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    window: int = -1,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Reference for :func:`decode_attention` in float32; same shapes, rows and lengths in place of the plan."""
    group = query.shape[1] // keys.shape[1]
    outputs, lses = [], []
    for i, (row, length) in enumerate(zip(rows.tolist(), lengths.tolist(), strict=True)):
        begin = max(length - window - 1, 0) if window >= 0 else 0
        slots = page_table[row, begin:length].long()
        k = keys[slots].float().repeat_interleave(group, 1)
        v = values[slots].float().repeat_interleave(group, 1)
        scores = torch.einsum("hd,nhd->hn", query[i].float(), k) * scale
        lses.append(scores.logsumexp(-1))
        outputs.append(torch.einsum("hn,nhd->hd", scores.softmax(-1), v))
    return torch.stack(outputs), torch.stack(lses)


def decode_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    page_table: torch.Tensor,
    plan: DecodePlan,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of one query per request over its KV slots, on the CPU.

    Args:
        query: [batch, heads, head_dim], float32, bfloat16 or float16.
        keys: [slots, kv_heads, head_dim]; values: [slots, kv_heads, value_dim]; the pool's buffers of one layer,
            float32, bfloat16 or float16. Last dimension contiguous.
        page_table: [rows, max_length] int32, slot of each token.
        scale: factor on the dot products.

    Returns:
        output [batch, heads, value_dim] float32 and log-sum-exp [batch, heads] float32.
    """
    batch, heads, head_dim = query.shape
    kv_heads, value_dim = keys.shape[1], values.shape[2]
    group = heads // kv_heads
    kernel = _compiled(group, head_dim, value_dim, keys.dtype)
    output = torch.empty(batch, heads, value_dim)
    lse = torch.empty(batch, heads)
    tasks = len(plan.row)
    partial = np.empty((tasks, group, value_dim), np.float32)
    partial_max = np.empty((tasks, group), np.float32)
    partial_sum = np.empty((tasks, group), np.float32)
    kernel(
        query.float().numpy(),
        as_lines(keys),
        as_lines(values),
        page_table.numpy(),
        (plan.row, plan.request, plan.head, plan.start, plan.stop, plan.first),
        (partial, partial_max, partial_sum),
        (output.numpy(), lse.numpy()),
        np.float32(scale),
    )
    return output, lse


def warm_up(heads: int, kv_heads: int, head_dim: int, value_dim: int, dtype: torch.dtype) -> None:
    """Compile the kernel for these shapes now, so that no request waits for it (a few seconds, cached on disk)."""
    table = torch.zeros(1, 1, dtype=torch.int32)
    query = torch.zeros(1, heads, head_dim, dtype=dtype)
    keys = torch.zeros(1, kv_heads, head_dim, dtype=dtype)
    values = torch.zeros(1, kv_heads, value_dim, dtype=dtype)
    plan = plan_decode(torch.zeros(1, dtype=torch.int64), torch.ones(1, dtype=torch.int64), kv_heads)
    decode_attention(query, keys, values, table, plan, 1.0)


@functools.cache
def _compiled(group: int, head_dim: int, value_dim: int, dtype: torch.dtype):
    """The kernel with its loop bounds fixed, which lets LLVM unroll and vectorise them."""
    if dtype not in DTYPES:
        raise TypeError(f"KV dtype {dtype} is not supported on the CPU; legal: {', '.join(map(str, DTYPES))}")
    match_torch_threads()
    block, ahead = KEYS_PER_BLOCK, KEYS_AHEAD
    line = LINE_BYTES // dtype.itemsize

    @njit(
        parallel=True, fastmath={"reassoc", "contract", "nsz", "arcp", "afn"}, error_model="numpy", cache=True
    )
    def kernel(query, pool_keys, pool_values, table, tasks, partials, results, scale):
        row, request, head, start, stop, first = tasks
        keys, key_slot, key_head = pool_keys
        values, value_slot, value_head = pool_values
        partial, partial_max, partial_sum = partials
        for i in prange(len(row)):
            q = np.empty((group, head_dim), np.float32)
            for g in range(group):
                for d in range(head_dim):
                    q[g, d] = query[request[i], head[i] * group + g, d] * scale
            scores = np.empty((group, block), np.float32)
            acc = np.zeros((group, value_dim), np.float32)
            top = np.full(group, -np.inf, np.float32)
            total = np.zeros(group, np.float32)
            h, last = head[i], stop[i] - 1
            key_line, value_line = h * key_head, h * value_head
            slots = table[row[i]]
            for begin in range(start[i], stop[i], block):
                n = min(block, stop[i] - begin)
                # Four keys at a time share each load of the query; a last group of fewer repeats its last key.
                for t in range(0, n, 4):
                    for far in range(begin + t + ahead, begin + t + ahead + 4):
                        for d in range(0, head_dim, line):
                            prefetch(keys, slots[min(far, last)] * key_slot + key_line, d)
                    k0 = keys[slots[begin + t] * key_slot + key_line]
                    k1 = keys[slots[min(begin + t + 1, last)] * key_slot + key_line]
                    k2 = keys[slots[min(begin + t + 2, last)] * key_slot + key_line]
                    k3 = keys[slots[min(begin + t + 3, last)] * key_slot + key_line]
                    for g in range(group):
                        q_row, score = q[g], scores[g]
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
                for g in range(group):
                    score = scores[g]
                    new_top = top[g]
                    for t in range(n):
                        new_top = max(new_top, score[t])
                    if new_top > top[g]:
                        rescale = np.float32(math.exp(top[g] - new_top))
                        top[g] = new_top
                        total[g] *= rescale
                        for d in range(value_dim):
                            acc[g, d] *= rescale
                    added = np.float32(0)
                    for t in range(n):
                        weight = exp_float32(score[t] - new_top)
                        score[t] = weight
                        added += weight
                    total[g] += added
                    score[n : n + -n % 4] = 0
                for t in range(0, n, 4):
                    for far in range(begin + t + ahead, begin + t + ahead + 4):
                        for d in range(0, value_dim, line):
                            prefetch(values, slots[min(far, last)] * value_slot + value_line, d)
                    v0 = values[slots[begin + t] * value_slot + value_line]
                    v1 = values[slots[min(begin + t + 1, last)] * value_slot + value_line]
                    v2 = values[slots[min(begin + t + 2, last)] * value_slot + value_line]
                    v3 = values[slots[min(begin + t + 3, last)] * value_slot + value_line]
                    for g in range(group):
                        sums, score = acc[g], scores[g]
                        w0, w1, w2, w3 = score[t], score[t + 1], score[t + 2], score[t + 3]
                        for d in range(value_dim):
                            sums[d] += (
                                w0 * to_float32(v0[d])
                                + w1 * to_float32(v1[d])
                                + w2 * to_float32(v2[d])
                                + w3 * to_float32(v3[d])
                            )
            for g in range(group):
                partial_max[i, g] = top[g]
                partial_sum[i, g] = total[g]
                for d in range(value_dim):
                    partial[i, g, d] = acc[g, d]

        output, lse = results
        pairs = len(first) - 1
        for pair in prange(pairs):
            begin, end = first[pair], first[pair + 1]
            b, h = request[begin], head[begin]
            for g in range(group):
                top_all = np.float32(-np.inf)
                for i in range(begin, end):
                    top_all = max(top_all, partial_max[i, g])
                total_all = np.float32(0)
                mixed = np.zeros(value_dim, np.float32)
                for i in range(begin, end):
                    weight = np.float32(math.exp(partial_max[i, g] - top_all))
                    total_all += weight * partial_sum[i, g]
                    for d in range(value_dim):
                        mixed[d] += weight * partial[i, g, d]
                lse[b, h * group + g] = top_all + math.log(total_all)
                for d in range(value_dim):
                    output[b, h * group + g, d] = mixed[d] / total_all

    return kernel
