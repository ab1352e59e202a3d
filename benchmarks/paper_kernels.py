"""The papers' tables on single operations: SFI's sparse attention kernel, FastKV's token importance."""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from fathom.benchmarks import paper_figures as papers
from fathom.kernels import two_segment_attention as segments
from fathom.kernels.window_scores import pool_saliency, row_mean_scores, window_of

RECENT, WINDOW = 256, 8
"""Tokens that SFI reads in place (section 5.1); FastKV's query rows (section 4)."""


def seconds(work: Callable[[], Any], repeats: int) -> float:
    """Median time of a call, after one that does not count; on a GPU by events."""
    times = []
    for turn in range(-1, repeats):
        if torch.cuda.is_available():
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
            work()
            last.record()
            torch.cuda.synchronize()
            took = first.elapsed_time(last) / 1e3
        else:
            begin = time.perf_counter()
            work()
            took = time.perf_counter() - begin
        if turn >= 0:
            times.append(took)
    return statistics.median(times)


def tables(report: Any, target: Any, sfi_target: Any, args: argparse.Namespace) -> None:
    """Print SFI's Table 1 and FastKV's Table 8."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = getattr(torch, args.dtype)
    title = f"Slow-Fast Inference, Table 1: kernel at KV length {args.kernel_length}, batch {args.sfi_batch}"
    report.table(
        title, sparse_rows(sfi_target, args.kernel_length, args.sfi_batch, dtype, device, args.rounds)
    )
    rows = [scoring_row(target, length, dtype, device, args.rounds) for length in args.lengths]
    report.table("FastKV, Table 8: estimation of token importance, all layers", rows)


def sparse_rows(
    size: Any, length: int, batch: int, dtype: torch.dtype, device: torch.device, repeats: int
) -> list[dict[str, Any]]:
    """Time of the two-segment kernel by the share of entries that it reads, against all of them."""
    shape = (batch * length, size.kv_heads, size.head_dim)
    pool = tuple(torch.randn(shape, device=device).to(dtype) for _ in range(2))
    compact = tuple(torch.randn(shape, device=device).to(dtype) for _ in range(2))
    table = torch.arange(batch * length, dtype=torch.int32, device=device).view(batch, length)
    query = torch.randn(batch, 1, size.heads, size.head_dim, device=device).to(dtype)
    scale = size.head_dim**-0.5

    def timed(read: int) -> float:
        recent = min(RECENT, read) if read < length else length
        plan = descriptor(batch, length, read - recent, recent, size.kv_heads, device)
        work = lambda: segments.two_segment_attention(query, pool, compact, table, plan, scale)  # noqa: E731
        return seconds(work, repeats)

    dense = timed(length)
    rows = []
    for share, theirs in papers.SFI_KERNEL_SPEEDUP.items():
        ours = timed(max(1, round(length * share / 100)))
        row = {"retained %": share, "ms": ours * 1e3, "x": dense / ours, "paper x": theirs}
        rows.append(
            row
            | {"GB/s": 2 * batch * length * share / 100 * shape[1] * shape[2] * dtype.itemsize / ours / 1e9}
        )
    return rows


def descriptor(
    batch: int, length: int, compact: int, recent: int, kv_heads: int, device: torch.device
) -> segments.SegmentPlan:
    """Each request reads ``compact`` packed entries and the last ``recent`` of its table."""
    rows = torch.arange(batch, device=device)
    same = torch.ones_like(rows)
    begin, starts = same * (length - recent), rows * length
    return segments.plan_segments(rows, begin, same * length, starts, same * compact, -same, kv_heads)


def scoring_row(
    size: Any, length: int, dtype: torch.dtype, device: torch.device, repeats: int
) -> dict[str, Any]:
    """Time of the window's scores, their pooling and the choice, once per layer, for one prompt."""
    keys = torch.randn(length, size.kv_heads, size.head_dim, device=device).to(dtype)
    query = torch.randn(WINDOW, size.heads, size.head_dim, device=device).to(dtype)
    slots = torch.arange(length, dtype=torch.int32, device=device).view(1, length)
    window = window_of([WINDOW], [length], slots, causal=True)
    budget = max(1, round(0.1 * length))

    def one_layer() -> torch.Tensor:
        mean = row_mean_scores(query, keys, window, size.head_dim**-0.5)
        return pool_saliency(mean[0], length - WINDOW, size.kv_heads).topk(budget).indices

    ours = seconds(one_layer, repeats) * size.layers
    prefill, theirs = papers.FASTKV_SCORING.get(length // 1024, (None, None))
    return {"prompt": length, "estimation s": ours, "paper s": theirs, "paper prefill s": prefill}
