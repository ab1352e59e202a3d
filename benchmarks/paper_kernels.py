"""The papers' tables on single operations: SFI's sparse attention kernel, FastKV's token importance."""

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import torch

from fathom.benchmarks import paper_figures as papers
from fathom.benchmarks.kernel_case import KernelCase, call_seconds
from fathom.kernels.window_scores import pool_saliency, row_mean_scores, window_of

WINDOW = 8
"""FastKV's query rows (section 4)."""


def seconds(work: Callable[[], Any], device: torch.device, repeats: int) -> float:
    """Median time of a call, after one that does not count."""
    call_seconds(work, device)
    return statistics.median(call_seconds(work, device) for _ in range(repeats))


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
    case = KernelCase(batch, length, size.heads, size.kv_heads, size.head_dim, dtype, device)
    dense = seconds(case.two_segments(length), device, repeats)
    entry = 2 * size.kv_heads * size.head_dim * dtype.itemsize
    rows = []
    for share, theirs in papers.SFI_KERNEL_SPEEDUP.items():
        read = max(1, round(length * share / 100))
        ours = seconds(case.two_segments(read), device, repeats)
        row = {"retained %": share, "ms": ours * 1e3, "x": dense / ours, "paper x": theirs}
        rows.append(row | {"GB/s": batch * read * entry / ours / 1e9})
    return rows


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

    ours = seconds(one_layer, device, repeats) * size.layers
    prefill, theirs = papers.FASTKV_SCORING.get(length // 1024, (None, None))
    return {"prompt": length, "estimation s": ours, "paper s": theirs, "paper prefill s": prefill}
