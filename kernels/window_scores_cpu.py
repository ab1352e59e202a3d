"""FastKV's window scores on the CPU; contract and plain version are in ``window_scores.py``.

Keys are read once. What their products with the window's rows are is kept, a few heads at a time, until the sums of
all exponentials are known.
"""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch
from numba import njit, types
from numba.extending import overload

from fathom.kernels.four_lines_cpu import ask_for_four, dot_four, four_lines, next_head
from fathom.kernels.numba_cpu import (
    APPROXIMATE,
    DTYPES,
    INNER,
    LINE_BYTES,
    as_array,
    as_lines,
    exp_float32,
    literal_values,
    match_torch_threads,
)
from fathom.kernels.paged_attention_cpu import KEYS_AHEAD, takes_products
from fathom.kernels.work_sharing_cpu import all_threads, on_threads, share_of

if TYPE_CHECKING:
    from fathom.kernels.window_scores import Window

KEYS_PER_TASK = 1024
"""A multiple of four."""

VECTOR = 16
"""Floats whose largest are looked for at a time, and between the rows of a task: rows that are a power of two apart
would lie in the same few places of a cache."""

KEPT_BYTES = 16 << 20
"""Exponentials that are kept at a time, unless those of one KV head are more."""


def row_mean_cpu(
    query: torch.Tensor, keys: torch.Tensor, window: "Window", scale: float, out: torch.Tensor
) -> None:
    """``row_mean_scores`` on the CPU, into ``out`` [batch, heads, max_keys] float32.

    Raises:
        TypeError: for keys of another dtype than float32, bfloat16 and float16.
    """
    if keys.dtype not in DTYPES:
        raise TypeError(f"keys of {keys.dtype} are not supported; legal: {', '.join(map(str, DTYPES))}")
    kv_heads, dim = keys.shape[1:]
    products = takes_products(query.dtype, keys.dtype, dim)
    operand = as_array(query.contiguous()) if products else query.float().numpy()
    kernel, lines = _compiled(dim), as_lines(keys)
    for index, rows, length in window.requests():
        own, slots = operand[rows], window.slots[index, :length].long().numpy()
        of_head = len(own) * (operand.shape[1] // kv_heads)
        runs = -(-length // KEYS_PER_TASK)
        at_once = min(max(KEPT_BYTES // (4 * of_head * length), 1), kv_heads)
        weights = np.empty((runs, at_once * of_head, KEYS_PER_TASK + VECTOR), np.float32)
        tops, totals = np.empty((2, runs, at_once * of_head), np.float32)
        kept = weights, tops, totals
        for first in range(0, kv_heads, at_once):
            heads = first, min(at_once, kv_heads - first), operand.shape[1] // kv_heads
            kernel(own, *lines, slots, heads, window.causal, np.float32(scale), kept, out[index].numpy())


def warm_up(heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    """Compile for these shapes now, so that no request waits for it (a few seconds, cached on disk)."""
    from fathom.kernels.window_scores import window_of

    query, keys = (torch.zeros(1, n, head_dim, dtype=dtype) for n in (heads, kv_heads))
    window = window_of([1], [1], torch.zeros(1, 1, dtype=torch.int64), causal=True)
    row_mean_cpu(query, keys, window, 1.0, torch.zeros(1, heads, 1))


@functools.cache
def _compiled(head_dim: int) -> Callable[..., None]:
    """The kernel; its ``heads`` are the first KV head, how many, and query heads on each."""
    match_torch_threads()
    size = KEYS_PER_TASK

    @njit(**APPROXIMATE)
    def kernel(query, keys, slot, head, slots, heads, causal, scale, kept, out):
        tops, totals = kept[1:]
        window, runs, threads = len(query), -(-len(slots) // size), all_threads()
        given = query, (keys, slot, head), slots, heads, causal, scale, kept
        on_threads(_weigh, threads, given, (head_dim,))
        # From here on `tops` holds what makes an exponential its share of the mean over the window's rows.
        for x in range(heads[1] * heads[2] * window):
            top, total = np.float32(-np.inf), np.float32(0)
            for run in range(runs):
                top = max(top, tops[run, x])
            for run in range(runs):
                tops[run, x] = exp_float32(tops[run, x] - top)
                total += tops[run, x] * totals[run, x]
            for run in range(runs):
                tops[run, x] /= total * np.float32(window)
        on_threads(_add_up, threads, window, heads, len(slots), kept, out)

    return kernel


def _weigh(thread, threads, given, sizes):
    """The thread's runs of keys: exponentials of their products, the largest of these and the exponentials' sum."""


@overload(_weigh, jit_options=INNER, prefer_literal=True)
def _weigh_keys(thread, threads, given, sizes):
    (head_dim,), of_query, of_keys = literal_values(sizes), given[0], given[1][0]
    operand = np.uint16 if of_query.dtype == types.uint16 else np.float32
    cache_line, size = LINE_BYTES * 8 // of_keys.dtype.bitwidth, KEYS_PER_TASK
    lowest, zero = np.float32(-np.inf), np.float32(0)

    def weigh(thread, threads, given, sizes):
        query, (keys, slot, head), slots, (h0, many, group), causal, scale, (weights, tops, totals) = given
        window, n = len(query), len(slots)
        rows = group * window
        total_rows = many * rows
        first_run, end_run = share_of(-(-n // size), thread, threads)
        for run in range(first_run, end_run):
            begin, end = run * size, min(run * size + size, n)
            own, q = weights[run], np.empty((total_rows, head_dim), operand)
            for x in range(total_rows):
                row = query[x % window, h0 * group + x // window]
                for d in range(head_dim):
                    q[x, d] = row[d]
            for t in range(0, end - begin, 4):
                lines = four_lines(slots, True, begin + t, end - 1, slot, h0 * head)
                later = four_lines(slots, True, begin + t + KEYS_AHEAD, n - 1, slot, h0 * head)
                for h in range(many):
                    later = ask_for_four(keys, later, head, head_dim, cache_line)
                    dot_four(q, h * rows, rows, keys, lines, own, t, scale, head_dim)
                    lines = next_head(lines, head)
            best = np.empty(VECTOR, np.float32)
            for x in range(total_rows):
                line, seen = own[x, :size], end - begin
                if causal:
                    seen = min(max(n - window + x % window + 1 - begin, 0), seen)
                line[seen:] = lowest
                best[:] = lowest
                for first in range(0, size, VECTOR):
                    part = line[first : first + VECTOR]
                    for j in range(VECTOR):
                        best[j] = part[j] if part[j] > best[j] else best[j]
                top, total = lowest, zero
                for j in range(VECTOR):
                    top = max(top, best[j])
                if seen == 0:
                    line[:] = zero
                else:
                    for t in range(size):
                        weight = exp_float32(line[t] - top)
                        line[t] = weight
                        total += weight
                tops[run, x], totals[run, x] = top, total

    return weigh


@njit(**APPROXIMATE)
def _add_up(thread, threads, window, heads, n, kept, out):
    """The thread's runs of keys: the mean over the window's rows."""
    (h0, many, group), (weights, tops, _), size = heads, kept, KEYS_PER_TASK
    first_run, end_run = share_of(-(-n // size), thread, threads)
    for run in range(first_run, end_run):
        begin, end = run * size, min(run * size + size, n)
        for y in range(many * group):
            line = out[h0 * group + y, begin:end]
            line[:] = np.float32(0)
            for x in range(y * window, y * window + window):
                share, weight = tops[run, x], weights[run, x]
                for t in range(len(line)):
                    line[t] += share * weight[t]
