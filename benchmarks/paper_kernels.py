"""The papers' tables on single operations: SFI's sparse attention kernel, FastKV's token importance."""

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import torch

from fathom.benchmarks import paper_figures as papers
from fathom.benchmarks.gpu_timing import Clock, capture
from fathom.benchmarks.kernel_case import KernelCase, call_seconds
from fathom.kernels.window_scores import pool_saliency, row_mean_scores, window_of

WINDOW = 8
"""FastKV's query rows (section 4)."""
LAYERS = 8
"""Of SFI's Table 1, on a GPU, at most: a pool and a compact buffer as large for each have to fit."""


def seconds(work: Callable[[], Any], clock: Clock) -> float:
    """Median time of a call, after one that does not count.

    On a GPU that of a replay as a CUDA graph: decode steps are replayed, and in prefill the host launches what
    comes next while the device works, so what it takes to launch is no part of either.
    """
    call_seconds(work, clock.device)
    graph = capture(work)[0] if clock.device.type == "cuda" else None
    return statistics.median(clock.samples(work if graph is None else graph.replay))


def tables(report: Any, target: Any, sfi_target: Any, args: argparse.Namespace) -> None:
    """Print SFI's Table 1 and FastKV's Table 8."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    clock = Clock(device, args.rounds)
    dtype = getattr(torch, args.dtype)
    title = f"Slow-Fast Inference, Table 1: kernel at KV length {args.kernel_length}, batch {args.sfi_batch}"
    report.table(title, sparse_rows(sfi_target, args.kernel_length, args.sfi_batch, dtype, clock))
    rows = [scoring_row(target, length, dtype, clock) for length in args.lengths]
    report.table("FastKV, Table 8: estimation of token importance, all layers", rows)


def sparse_rows(size: Any, length: int, batch: int, dtype: torch.dtype, clock: Clock) -> list[dict[str, Any]]:
    """Time of the two-segment kernel by the share of entries that it reads, against all of them.

    On a GPU calls follow each other as the layers of a decode step, each on KV of its own: no cache holds it, and
    they share what a replay takes to begin.
    """
    shape = size.heads, size.kv_heads, size.head_dim
    entry = 2 * size.kv_heads * size.head_dim * dtype.itemsize
    layers = 1
    if clock.device.type == "cuda":
        free, _ = torch.cuda.mem_get_info()
        layers = max(min(LAYERS, free // (3 * batch * length * entry)), 1)
    cases = [KernelCase(batch, length, *shape, dtype, clock.device) for _ in range(layers)]

    def each(read: int) -> float:
        calls = [case.two_segments(read) for case in cases]
        return seconds(lambda: [call() for call in calls], clock) / layers

    dense = each(length)
    rows = []
    for share, theirs in papers.SFI_KERNEL_SPEEDUP.items():
        read = max(1, round(length * share / 100))
        ours = each(read)
        row = {"retained %": share, "ms": ours * 1e3, "x": dense / ours, "paper x": theirs}
        rows.append(row | {"GB/s": batch * read * entry / ours / 1e9})
    return rows


def scoring_row(size: Any, length: int, dtype: torch.dtype, clock: Clock) -> dict[str, Any]:
    """Time of the window's scores, their pooling and the choice, once per layer, for one prompt."""
    device = clock.device
    keys = torch.randn(length, size.kv_heads, size.head_dim, device=device).to(dtype)
    query = torch.randn(WINDOW, size.heads, size.head_dim, device=device).to(dtype)
    slots = torch.arange(length, dtype=torch.int32, device=device).view(1, length)
    window = window_of([WINDOW], [length], slots, causal=True)
    budget = max(1, round(0.1 * length))

    def one_layer() -> torch.Tensor:
        mean = row_mean_scores(query, keys, window, size.head_dim**-0.5)
        return pool_saliency(mean[0], length - WINDOW, size.kv_heads).topk(budget).indices

    ours = seconds(one_layer, clock) * size.layers
    prefill, theirs = papers.FASTKV_SCORING.get(length // 1024, (None, None))
    return {"prompt": length, "estimation s": ours, "paper s": theirs, "paper prefill s": prefill}
