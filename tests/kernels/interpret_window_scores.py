"""Run with TRITON_INTERPRET=1: the Triton kernels of window scores and compaction against their references.

No bfloat16: the interpreter's ``dot`` multiplies its bit patterns. float16 takes the same path through the kernels.
"""

import sys
from pathlib import Path

import torch
from triton.knobs import runtime

sys.path.append(str(Path(__file__).parents[1]))

import interpreter_pace

from fathom.kernels import compact_kv, window_scores, window_scores_triton

CASES = [
    # rows, lengths, heads, kv_heads, dim, dtype, pool
    ([8], [300], 4, 2, 16, torch.float32, 13),
    ([3, 1, 2], [5, 130, 250], 6, 2, 20, torch.float16, 13),
    ([9], [140], 8, 1, 16, torch.float32, 5),
    ([1], [1], 2, 2, 16, torch.float32, 1),
]


def problem(rows, lengths, heads, kv_heads, dim, dtype):
    slots = sum(lengths) + 5
    order = torch.randperm(slots)
    table = torch.full((len(rows), max(lengths)), -1, dtype=torch.int32)
    keys = torch.full((slots, kv_heads, dim), float("nan"), dtype=dtype)
    begin = 0
    for row, length in enumerate(lengths):
        table[row, :length] = order[begin : begin + length]
        keys[order[begin : begin + length]] = torch.randn(length, kv_heads, dim).to(dtype)
        begin += length
    return torch.randn(sum(rows), heads, dim).to(dtype), keys, table


def compare_window_scores(case) -> int:
    rows, lengths, heads, kv_heads, dim, dtype, pool = case
    query, keys, table = problem(rows, lengths, heads, kv_heads, dim, dtype)
    compared = 0
    for causal in (False, True):
        counts = [min(r, n) for r, n in zip(rows, lengths, strict=True)] if causal else rows
        window = window_scores.window_of(counts, lengths, table, causal)
        own = query[: window.total_rows]
        want = window_scores.row_mean_scores_reference(own, keys, window, 0.3)
        got = torch.zeros_like(want)
        window_scores_triton.row_mean(own, keys, *window.device_arguments(), causal, 0.3, got)
        torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-4)
        compared += 1
    window = window_scores.window_of(rows, lengths, table, False)
    start = torch.rand(window.total_rows, max(lengths)) * 0.01
    want = window_scores.pooled_max_scores_reference(query, keys, window, 0.3, pool, start.clone())
    got = start.clone()
    window_scores_triton.pooled_max(query, keys, *window.device_arguments(), 0.3, pool, got)
    torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-4)
    return compared + 1


def compare_compact_kv() -> int:
    keys, values = torch.randn(50, 3, 24), torch.randn(50, 3, 8)
    source = torch.stack([torch.randperm(25)[:19] for _ in range(3)])
    destination = torch.randperm(25)[:19] + 25
    want = keys.clone(), values.clone()
    compact_kv.compact_kv_reference(*want, source, destination)
    compact_kv._launch(keys, values, source, destination)
    assert torch.equal(keys, want[0]) and torch.equal(values, want[1])
    return 1


if __name__ == "__main__":
    assert runtime.interpret, "set TRITON_INTERPRET=1"
    interpreter_pace.install()
    torch.manual_seed(0)
    print(sum(map(compare_window_scores, CASES)) + compare_compact_kv(), "comparisons")
