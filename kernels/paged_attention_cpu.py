"""Attention of a few queries per request over paged KV, on the CPU: keys and values are read in place.

One kernel for decode steps (one query), for drafted tokens that are verified and few new tokens over a long prefix
(several), and for fast steps of slow-fast decoding, whose requests also read a run of a compact buffer.
``paged_attention_reference`` is the plain reference; that of the compact buffer and of the evidence is in
``two_segment_attention.py``.
"""

import functools
import math
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numba import njit, types
from numba.extending import overload

from fathom.kernels.bfloat16_cpu import LANES, has_bfloat16_products
from fathom.kernels.extend_attention import extend_attention_reference
from fathom.kernels.four_lines_cpu import (
    add_four,
    ask_for_four,
    dot_four,
    four_lines,
    next_head,
    places_of_sums,
    square_four,
)
from fathom.kernels.kv_pair import KvPair
from fathom.kernels.numba_cpu import (
    APPROXIMATE,
    DTYPES,
    INNER,
    LINE_BYTES,
    LOOPS,
    as_array,
    literal_values,
    match_torch_threads,
    prefetch,
)
from fathom.kernels.softmax_cpu import KEYS_PER_BLOCK, PARTS, raise_top, unit_of_top, weigh
from fathom.kernels.work_sharing_cpu import on_threads, take

if TYPE_CHECKING:
    from fathom.kernels.two_segment_attention import Evidence

KEYS_PER_TASK = 512
COMPACT_PER_TASK = 4096
KEYS_AHEAD = 32
"""How far ahead keys and values are asked for: the processor does not guess which four come next."""

KEYS_AHEAD_OF_ONE_HEAD = 64
"""The same where a task reads one head, so that a key is fewer bytes."""

HEADS_PER_TASK = 8
"""KV heads whose keys a task reads together at most, in the order of memory, where each request has one query."""

TASKS_PER_THREAD = 4

TASK_IN_KEYS = 16
"""What a task costs beside its keys, as so many keys."""

NO_REACH = np.empty(0, np.int64)
"""Where no query's reach limits anything."""


class Tasks(NamedTuple):
    """Work list of one step, read by every layer: each task is some KV heads of one request over one run of keys.

    The tasks of a request are consecutive; ``first`` holds where they begin. Those of the compact buffer come
    first, each of one KV head, whose entries lie together there. Query j of n of a request sees the table entries
    before ``end - n + j + 1``, its own the last.
    """

    row: np.ndarray  # [tasks] int64, page-table row, or -1 for a run of the compact buffer
    request: np.ndarray  # [tasks] int64, index into the batch
    head: np.ndarray  # [tasks] int64, first KV head
    heads: np.ndarray  # [tasks] int64, KV heads
    start: np.ndarray  # [tasks] int64, table entry or place in the compact buffer
    stop: np.ndarray  # [tasks] int64
    first: np.ndarray  # [batch + 1] int64
    end: np.ndarray  # [batch] int64, end of the table range
    evidence: np.ndarray  # [batch] int64, row of the evidence or -1
    queries: np.ndarray  # [batch + 1] int64, where each request's queries begin among the packed ones
    shares: np.ndarray  # [threads + 1] int64, where each thread's tasks begin: about the same work for each
    most_heads: int  # KV heads of the task that has most
    most: int = 1  # queries of the request that has most
    reach: np.ndarray = NO_REACH  # [queries] int64, of plan_packed; of size 0 where each query sees all runs


def plan_packed(
    entry: np.ndarray, queries: np.ndarray, kv_heads: int, reach: np.ndarray | None = None
) -> Tasks:
    """Split a step over page tables that lie one after the other in a table of a single row.

    Args:
        entry: [batch + 1] int64, where each request's slots begin in that row; the last ones are of its queries.
        queries: [batch + 1] int64, as in :class:`Tasks`; each request has at least one.
        reach: [queries] int64, how many earlier table entries each query sees besides its own; None for all. A
            query's own entry less its reach never decreases within a request.
    """
    begin, end, counts = entry[:-1], entry[1:], np.diff(queries)
    limits = NO_REACH
    if reach is not None:
        first = first_seen(entry, queries, reach)
        begin = np.maximum(begin, first[queries[:-1]])
        if (first > np.repeat(begin, counts)).any():
            limits = np.ascontiguousarray(reach, np.int64)
    none, most = np.zeros_like(begin), int(counts.max(initial=0))
    return _split(none, begin, end, none, none, kv_heads, most)._replace(
        queries=queries, most=most, reach=limits
    )


def first_seen(entry: np.ndarray, queries: np.ndarray, reach: np.ndarray) -> np.ndarray:
    """[queries] int64: own entry less reach, which may be before the request's first; as in :func:`plan_packed`."""
    own = np.repeat(entry[1:] - queries[1:], np.diff(queries)) + np.arange(queries[-1])
    return own - reach


def plan_tasks(packed: np.ndarray, kv_heads: int) -> Tasks:
    """Split a step of one query per request.

    Args:
        packed: [batch, 6] int32, the columns of ``two_segment_attention.FIELDS``.
    """
    row, begin, end, compact_start, compact_length, evidence = np.ascontiguousarray(packed.T, np.int64)
    tasks = _split(row, begin, end, compact_start, compact_length, kv_heads, 1)
    return tasks._replace(evidence=evidence)


def _split(
    row: np.ndarray,
    begin: np.ndarray,
    end: np.ndarray,
    compact_start: np.ndarray,
    compact_length: np.ndarray,
    kv_heads: int,
    most: int,
) -> Tasks:
    """Tasks of bounded runs, at least one for each request. All arguments but the last two are [batch] int64.

    Heads are read together or apart, but runs are always cut alike: an answer does not depend on what else there
    is in the batch.
    """
    row, request, head, heads, start, stop, first, shares, together = _cut(
        row, begin, end, compact_start, compact_length, kv_heads, most == 1, torch.get_num_threads()
    )
    kept, queries = np.full(len(end), -1), np.arange(len(end) + 1)
    return Tasks(row, request, head, heads, start, stop, first, end.copy(), kept, queries, shares, together)


@njit(**LOOPS)
def _cut(row, begin, end, compact_start, compact_length, kv_heads, one_query, threads):
    """The tasks' columns, where each request's begin, each thread's share of them, and how many heads are together.

    Compiled, because it is done anew in each step, and each of an interpreter's steps is slow once weights have
    gone through the caches.
    """
    compact_runs = (compact_length + COMPACT_PER_TASK - 1) // COMPACT_PER_TASK
    runs = (end - begin + KEYS_PER_TASK - 1) // KEYS_PER_TASK
    for i in range(len(row)):
        if compact_runs[i] + runs[i] == 0:
            runs[i] = 1
    together = 1
    if one_query:
        most_heads = min(HEADS_PER_TASK, runs.sum() * kv_heads // (TASKS_PER_THREAD * threads))
        for n in range(2, most_heads + 1):
            if kv_heads % n == 0:
                together = n
    first = np.zeros(len(row) + 1, np.int64)
    first[1:] = np.cumsum(compact_runs * kv_heads + runs * (kv_heads // together))
    tasks = np.empty((6, first[-1]), np.int64)
    place = 0
    for i in range(len(row)):
        # Of the compact buffer, head by head; of the page table, runs in the order of memory.
        for head in range(kv_heads):
            for run in range(compact_runs[i]):
                start = compact_start[i] + run * COMPACT_PER_TASK
                stop = min(start + COMPACT_PER_TASK, compact_start[i] + compact_length[i])
                _note(tasks, place, -1, i, head, 1, start, stop)
                place += 1
        for run in range(runs[i]):
            start = begin[i] + run * KEYS_PER_TASK
            stop = min(start + KEYS_PER_TASK, end[i])
            for head in range(0, kv_heads, together):
                _note(tasks, place, row[i], i, head, together, start, stop)
                place += 1
    _, _, _, heads, start, stop = tasks
    shares = _share(heads * (stop - start + TASK_IN_KEYS), threads)
    return tasks[0], tasks[1], tasks[2], heads, start, stop, first, shares, together


@njit(**LOOPS)
def _note(tasks, place, row, request, head, heads, start, stop):
    for column, value in enumerate((row, request, head, heads, start, stop)):
        tasks[column, place] = value


@njit(**LOOPS)
def _share(work, threads):
    """[threads + 1] int64: cuts of a list of tasks so that the parts are about the same work."""
    cuts, total, done, place = np.zeros(threads + 1, np.int64), work.sum(), 0, 0
    for thread in range(threads + 1):
        # The first whose middle is not before this thread's beginning.
        while place < len(work) and (2 * done + work[place]) * threads < 2 * total * thread:
            done += work[place]
            place += 1
        cuts[thread] = place
    return cuts


def paged_attention_reference(
    query: torch.Tensor,
    pool: tuple[torch.Tensor, torch.Tensor],
    slots: torch.Tensor,
    entry: list[int],
    queries: list[int],
    scale: float,
    reach: np.ndarray | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Reference for :func:`paged_attention` in float32: that of extend attention, request by request.

    Args:
        slots: [entries] of all requests; entry, queries, reach: as in :func:`plan_packed`.
    """
    parts = []
    for request in range(len(entry) - 1):
        own = slots[entry[request] : entry[request + 1]].long()
        rows = slice(queries[request], queries[request + 1])
        limits = None if reach is None else reach[rows]
        parts.append(extend_attention_reference(query[rows], pool[0][own], pool[1][own], scale, limits))
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
    rows = group * tasks.most
    if (dtype := pool[0].dtype) not in DTYPES:
        raise TypeError(f"KV dtype {dtype} is not supported on the CPU; legal: {', '.join(map(str, DTYPES))}")
    products = takes_products(query.dtype, dtype, head_dim, value_dim)
    kernel = _compiled(group, head_dim, value_dim)
    output, lse = torch.empty(count, heads, value_dim), torch.empty(count, heads)
    most = rows * tasks.most_heads
    partials = (
        np.empty((len(tasks.row), most, value_dim), np.float32),
        np.empty((len(tasks.row), most), np.float32),
        np.empty((len(tasks.row), most), np.float32),
    )
    kept = NO_EVIDENCE
    if evidence is not None:
        logits = evidence.logits.view(len(evidence.logits), kv_heads, group, -1)
        kept = (logits.numpy(), evidence.key_norms.numpy())
    pool_lines = KvPair.of(pool).lines
    kernel(
        as_array(query.contiguous()) if products else query.float().numpy(),
        pool_lines,
        pool_lines if compact is None else KvPair.of(compact).lines,
        page_table.numpy(),
        tuple(tasks),
        kept,
        partials,
        (output.numpy(), lse.numpy()),
        np.float32(scale),
    )
    return output, lse


NO_EVIDENCE = (np.empty((0, 0, 0, 0), np.float32), np.empty((0, 0, 0), np.float32))


def takes_products(query: torch.dtype, pool: torch.dtype, *widths: int) -> bool:
    """Whether attention is computed in bfloat16 products (``bfloat16_cpu.py``): for queries and KV of these dtypes,
    keys and values of these widths.
    """
    fits = all(width % LANES == 0 for width in widths)
    return query == pool == torch.bfloat16 and fits and has_bfloat16_products()


def warm_up(heads: int, kv_heads: int, head_dim: int, value_dim: int, dtype: torch.dtype) -> None:
    """Compile the kernel for these shapes now, so that no request waits for it (a few seconds, cached on disk)."""
    query = torch.zeros(1, heads, head_dim, dtype=dtype)
    pool = tuple(torch.zeros(1, kv_heads, dim, dtype=dtype) for dim in (head_dim, value_dim))
    one = np.arange(2)
    paged_attention(query, pool, torch.zeros(1, 1, dtype=torch.int32), plan_packed(one, one, kv_heads), 1.0)


def address_of_kernel(group: int, head_dim: int, value_dim: int, arguments: tuple) -> int:
    """The address of a kernel's machine code, which stays there.

    Args:
        group: heads per KV head.
        arguments: Numba's types of the kernel's.
    """
    kernel = _compiled(group, head_dim, value_dim)
    kernel.compile(arguments)
    code, kind = attrgetter("library", "fndesc")(kernel.overloads[arguments])
    return code.get_pointer_to_function(kind.llvm_func_name)


@functools.cache
def _compiled(group: int, head_dim: int, value_dim: int):
    """The kernel with the bounds of its inner loops fixed, which lets LLVM unroll and vectorise them."""
    match_torch_threads()

    # It closes over numbers, not over compiled functions: one that does is never found in the cache on disk.
    @njit(**APPROXIMATE)
    def kernel(query, pool, compact, table, tasks, evidence, partials, results, scale):
        _, _, _, _, _, _, _, _, _, _, shares, _, _, _ = tasks
        taken, threads = shares[:-1].copy(), len(shares) - 1
        given = (query, pool, compact, table, tasks, evidence, partials, scale)
        on_threads(_attend, threads, taken, given, (group, head_dim, value_dim))
        on_threads(_mix, threads, query, tasks, partials, results, (group, value_dim))

    return kernel


def _attend(thread, threads, taken, given, sizes):
    """The thread's tasks: what the keys of each give of its queries' output."""


@overload(_attend, jit_options=INNER, prefer_literal=True)
def _attend_to_keys(thread, threads, taken, given, sizes):
    group, head_dim, value_dim = literal_values(sizes)
    of_query, (of_keys, *_) = given[0], given[1]
    operand = np.uint16 if of_query.dtype == types.uint16 else np.float32
    cache_line, floats_per_line = LINE_BYTES * 8 // of_keys.dtype.bitwidth, LINE_BYTES // 4
    block = KEYS_PER_BLOCK

    def attend(thread, threads, taken, given, sizes):
        query, pool, compact, table, tasks, evidence, partials, scale = given
        row, request, head, heads, start, stop, _, end, evidence_row, queries, shares, _, _, reach = tasks
        logits, norms = evidence
        partial, partial_max, partial_sum = partials
        limited = len(reach) > 0
        while True:
            i = take(taken, shares, thread)
            if i < 0:
                break
            b, h0, many = request[i], head[i], heads[i]
            at, window = queries[b], queries[b + 1] - queries[b]
            rows = group * window
            total_rows = many * rows
            q = np.empty((total_rows, head_dim), operand)
            for x in range(total_rows):
                own = query[at + x % window, h0 * group + x // window]
                for d in range(head_dim):
                    q[x, d] = own[d]
            scores = np.empty((total_rows, block), np.float32)
            weights = np.empty((total_rows, block), operand)
            squares = np.empty((many, block), np.float32)
            acc = np.zeros((total_rows, value_dim), np.float32)
            top = np.full(total_rows, -np.inf, np.float32)
            totals = np.zeros((total_rows, PARTS), np.float32)
            paged, line, kept = row[i] >= 0, max(row[i], 0), max(evidence_row[b], 0)
            keep = paged and evidence_row[b] >= 0 and len(norms) > 0
            keys, key_slot, key_head, values, value_slot, value_head = pool if paged else compact
            key_line, value_line = h0 * key_head, h0 * value_head
            slots, last = table[line], stop[i] - 1
            # The next run of the table is likely to be this thread's next task.
            horizon = end[b] - 1 if paged else last
            ahead = KEYS_AHEAD if many > 1 else KEYS_AHEAD_OF_ONE_HEAD
            # Those that the loops below ask for too late: unless the last task did, nobody has.
            for t in range(start[i], min(start[i] + ahead, stop[i]), 4):
                key_lines = four_lines(slots, paged, t, last, key_slot, key_line)
                value_lines = four_lines(slots, paged, t, last, value_slot, value_line)
                for _ in range(many):
                    key_lines = ask_for_four(keys, key_lines, key_head, head_dim, cache_line)
                    value_lines = ask_for_four(values, value_lines, value_head, value_dim, cache_line)
            for begin in range(start[i], stop[i], block):
                n = min(block, stop[i] - begin)
                if keep:
                    # What the next block writes is asked for: a line that is written is read before.
                    for t in range(begin + block, begin + 2 * block, floats_per_line):
                        for x in range(total_rows):
                            prefetch(logits[kept, h0 + x // rows], x % rows, t)
                        for h in range(many):
                            prefetch(norms[kept], h0 + h, t)
                # Four keys at a time share each load of the query; a last group of fewer repeats its last key.
                for t in range(0, n, 4):
                    lines = four_lines(slots, paged, begin + t, last, key_slot, key_line)
                    later = four_lines(slots, paged, begin + t + ahead, horizon, key_slot, key_line)
                    for h in range(many):
                        later = ask_for_four(keys, later, key_head, head_dim, cache_line)
                        dot_four(q, h * rows, rows, keys, lines, scores, t, scale, head_dim)
                        if keep:
                            square_four(q, keys, lines, squares, h, t, head_dim)
                        lines = next_head(lines, key_head)
                if keep:
                    for h in range(many):
                        kept_norms, own_squares = norms[kept, h0 + h], squares[h]
                        for t in range(n):
                            kept_norms[begin + t] = math.sqrt(own_squares[t])
                # Whole blocks from here on: sums are grouped alike however many keys there are.
                for x in range(total_rows):
                    scores[x, n:] = -np.inf
                    if paged:
                        visible = end[b] - window + x % window + 1
                        for t in range(max(visible - begin, 0), n):
                            scores[x, t] = -np.inf
                        if limited:
                            for t in range(min(visible - 1 - reach[at + x % window] - begin, n)):
                                scores[x, t] = -np.inf
                    if keep:
                        kept_scores, own_scores = logits[kept, h0 + x // rows, x % rows], scores[x]
                        for t in range(n):
                            kept_scores[begin + t] = own_scores[t]
                    raise_top(scores, x, np.float32(1), weights, acc, top, totals, x)
                for x in range(total_rows):
                    weigh(scores, x, np.float32(1), weights, x, top, totals, x)
                for t in range(0, n, 4):
                    lines = four_lines(slots, paged, begin + t, last, value_slot, value_line)
                    later = four_lines(slots, paged, begin + t + ahead, horizon, value_slot, value_line)
                    for h in range(many):
                        later = ask_for_four(values, later, value_head, value_dim, cache_line)
                        add_four(acc, h * rows, rows, weights, t, values, lines, value_dim)
                        lines = next_head(lines, value_head)
            for x in range(total_rows):
                for d in range(value_dim):
                    partial[i, x, d] = acc[x, d]
                partial_max[i, x] = top[x]
                partial_sum[i, x] = totals[x].sum()

    return attend


def _mix(thread, threads, query, tasks, partials, results, sizes):
    """The thread's share of outputs: of each, the parts that tasks gave together."""


@overload(_mix, jit_options=INNER, prefer_literal=True)
def _mix_parts(thread, threads, query, tasks, partials, results, sizes):
    group, value_dim = literal_values(sizes)
    products = query.dtype == types.uint16
    places, unit = places_of_sums(value_dim, products), np.float32(unit_of_top(products))

    def mix(thread, threads, query, tasks, partials, results, sizes):
        _, _, head, heads, _, _, first, _, _, queries, _, _, _, _ = tasks
        partial, partial_max, partial_sum = partials
        output, lse = results
        kv_heads = query.shape[1] // group
        pairs = (len(first) - 1) * kv_heads
        for pair in range(pairs * thread // threads, pairs * (thread + 1) // threads):
            b, h = pair // kv_heads, pair % kv_heads
            window = queries[b + 1] - queries[b]
            rows = group * window
            for r in range(rows):
                at, of = queries[b] + r % window, h * group + r // window
                top_all = np.float32(-np.inf)
                for i in range(first[b], first[b + 1]):
                    if head[i] <= h < head[i] + heads[i]:
                        top_all = max(top_all, partial_max[i, (h - head[i]) * rows + r])
                mixed = np.zeros(value_dim, np.float32)
                total_all = np.float32(0)
                if top_all > -np.inf:
                    for i in range(first[b], first[b + 1]):
                        if head[i] <= h < head[i] + heads[i]:
                            x = (h - head[i]) * rows + r
                            weight = np.float32(math.exp((partial_max[i, x] - top_all) * unit))
                            total_all += weight * partial_sum[i, x]
                            for d in range(value_dim):
                                mixed[d] += weight * partial[i, x, d]
                lse[at, of] = top_all * unit + math.log(total_all)
                for d in range(value_dim):
                    output[at, of, d] = mixed[places[d]] / total_all if total_all > 0 else np.float32(0)

    return mix
