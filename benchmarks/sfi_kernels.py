"""`fathom bench --kernels`: SFI's attention kernel alone against dense decode attention, as in the paper's Table 1.

One layer, one new token per request. The dense kernel reads a whole page table; the two-segment kernel reads a run
of what is retained in a compact buffer, and the recent tokens in place. Calls alternate, and each ratio is of two
calls that follow each other. Slots in ascending order, as a fresh pool gives them, favour the dense kernel.
"""

from __future__ import annotations

import argparse
import datetime
import json
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path

from fathom.benchmarks import report, stats

RETAINED = (0.016, 0.063, 0.125, 0.25, 0.5)
PAPER = {0.016: 10.67, 0.063: 9.56, 0.125: 7.15, 0.25: 3.96, 0.5: 2.10}
"""Slow-Fast Inference, Table 1: KV length 16K, batch 16, bfloat16, on a GPU."""
RECENT = 256


def parser() -> argparse.ArgumentParser:
    """Every flag with its default."""
    p = argparse.ArgumentParser(prog="fathom bench --kernels", description=__doc__)
    add = p.add_argument
    add("--length", type=int, default=16384, help="KV entries per request (default: %(default)s)")
    add("--batch", type=int, default=16, help="requests (default: %(default)s)")
    add("--heads", type=int, default=16, help="query heads (default: %(default)s)")
    add("--kv-heads", type=int, default=4, help="default: %(default)s")
    add("--head-dim", type=int, default=64, help="default: %(default)s")
    add("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    add("--scattered", action="store_true", help="slots in random order, as in a pool long in use")
    add("--calls", type=int, default=21, help="of each kernel (default: %(default)s)")
    add("--out", type=Path, help="JSON to write")
    return p


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


class Case:
    """Queries, a pool with each request's KV in scattered slots, and a compact buffer."""

    def __init__(self, args: argparse.Namespace):
        import torch

        self.args, self.torch = args, torch
        dtype, total = getattr(torch, args.dtype), args.batch * args.length
        source = torch.Generator().manual_seed(0)

        def draw(*size: int):
            return torch.randn(*size, generator=source).to(dtype)

        self.query = draw(args.batch, args.heads, args.head_dim)
        self.keys, self.values = (draw(total, args.kv_heads, args.head_dim) for _ in range(2))
        slots = torch.randperm(total, generator=source) if args.scattered else torch.arange(total)
        self.table = slots.to(torch.int32).view(args.batch, args.length).contiguous()
        self.compact = self.keys.clone(), self.values.clone()
        self.scale = args.head_dim**-0.5

    def dense(self) -> Callable[[], object]:
        """The kernel of dense decode steps."""
        from fathom.kernels.decode_attention import decode_attention, plan_decode

        torch, args = self.torch, self.args
        lengths = torch.full((args.batch,), args.length)
        plan = plan_decode(torch.arange(args.batch), lengths, args.kv_heads)
        return lambda: decode_attention(self.query, self.keys, self.values, self.table, plan, self.scale)

    def two_segments(self, retained: float) -> Callable[[], object]:
        """The kernel of fast steps, reading this share of the entries."""
        from fathom.kernels.two_segment_attention import plan_segments, two_segment_attention

        torch, args = self.torch, self.args
        budget = round(retained * args.length)
        recent = min(RECENT, budget // 2)

        def each(value: int):
            return torch.full((args.batch,), value, dtype=torch.int64)

        rows, begin, end = torch.arange(args.batch), each(args.length - recent), each(args.length)
        plan = plan_segments(
            rows, begin, end, rows * args.length, each(budget - recent), each(-1), args.kv_heads
        )
        query, pool = self.query.unsqueeze(1).contiguous(), (self.keys, self.values)
        return lambda: two_segment_attention(query, pool, self.compact, self.table, plan, self.scale)


def measure(args: argparse.Namespace) -> list[dict]:
    """Per retained share: milliseconds of both kernels and their ratio, each as median and extremes."""
    case = Case(args)
    dense = case.dense()
    found = []
    for retained in RETAINED:
        fast = case.two_segments(retained)
        for call in (dense, fast):  # compiled, and its memory touched
            call()
        pairs = []
        for number in range(args.calls):
            order = stats.order([0, 1], number)
            taken = {which: _seconds((dense, fast)[which]) for which in order}
            pairs.append((taken[0], taken[1]))
        slow, quick = zip(*pairs, strict=True)
        found.append(
            {
                "retained": retained,
                "dense_seconds": stats.summary(slow),
                "fast_seconds": stats.summary(quick),
                "ratio": stats.summary(stats.pair_ratios(slow, quick)),
                "entries_ratio": args.length / round(retained * args.length),
                "paper": PAPER[retained],
            }
        )
    return found


def table(rows: list[dict]) -> str:
    """Markdown."""
    head = ["retained", "dense (ms)", "two segments (ms)", "ratio", "by entries read", "Table 1 (GPU)"]
    lines = [head, ["--:"] * len(head)]
    for row in rows:
        times: list[dict] = [row["dense_seconds"], row["fast_seconds"]]
        slow, quick = (f"{1e3 * each['median']:.2f}" for each in times)
        ratio = "{median:.2f} [{min:.2f}–{max:.2f}]".format_map(row["ratio"])
        shown = [
            f"{row['retained']:.1%}",
            slow,
            quick,
            ratio,
            f"{row['entries_ratio']:.1f}",
            f"{row['paper']}",
        ]
        lines.append(shown)
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main(argv: list[str]) -> int:
    """Measure, print, write."""
    args = parser().parse_args(argv)
    rows = measure(args)
    names = ("length", "batch", "heads", "kv_heads", "head_dim", "dtype", "scattered")
    sizes = {key: getattr(args, key) for key in names}
    result: dict = {
        "schema": report.SCHEMA,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["fathom", "bench", "--kernels", *argv]),
        "hardware": report.hardware(),
        "versions": report.versions(),
        "git": report.git_state(),
        "sizes": sizes,
        "rows": rows,
    }
    print(table(rows), f"One layer; {sizes}; {result['hardware']['cpu']}.", sep="\n\n")
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result, indent=1) + "\n")
        print(f"\nWritten: {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
