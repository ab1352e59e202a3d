"""`fathom bench --kernels`: SFI's attention kernel alone against dense decode attention, as in the paper's Table 1.

One layer, one new token per request. The dense kernel reads a whole page table; the two-segment kernel reads a run
of what is retained in a compact buffer, and the recent tokens in place. Calls alternate, and each ratio is of two
calls that follow each other. Slots in ascending order, as a fresh pool gives them, favour the dense kernel.
"""

from __future__ import annotations

import argparse
import json
import sys

from fathom.benchmarks import paper_figures as papers
from fathom.benchmarks import report, stats
from fathom.benchmarks.args import result_file
from fathom.server.units import token_count

RETAINED = (1.6, 6.3, 12.5, 25.0, 50.0)
"""Of the shares of the paper's Table 1, in per cent."""


def parser() -> argparse.ArgumentParser:
    """Every flag with its default."""
    p = argparse.ArgumentParser(prog="fathom bench --kernels", description=__doc__)
    add = p.add_argument

    def count(flag: str, default: int, text: str) -> None:
        add(flag, type=token_count, default=default, metavar="N", help=f"{text} (default: %(default)s)")

    count("--length", 16384, "KV entries per request")
    count("--batch", 16, "requests")
    count("--heads", 16, "query heads, a multiple of the KV heads")
    count("--kv-heads", 4, "KV heads")
    count("--head-dim", 64, "numbers per head")
    count("--calls", 21, "of each kernel")
    add("--dtype", choices=["bfloat16", "float32"], default="bfloat16", help="default: %(default)s")
    add("--scattered", action="store_true", help="slots in random order, as in a pool long in use")
    add("--out", type=result_file, metavar="FILE.json", help="JSON to write")
    return p


def measure(args: argparse.Namespace) -> list[dict]:
    """Per retained share: milliseconds of both kernels and their ratio, each as median and extremes."""
    import torch

    from fathom.benchmarks.kernel_case import KernelCase, call_seconds

    case = KernelCase(
        batch=args.batch,
        length=args.length,
        heads=args.heads,
        kv_heads=args.kv_heads,
        head_dim=args.head_dim,
        dtype=getattr(torch, args.dtype),
        scattered=args.scattered,
    )
    dense = case.dense()
    found = []
    for percent in RETAINED:
        read = max(1, round(percent / 100 * args.length))
        fast = case.two_segments(read)
        for call in (dense, fast):  # compiled, and its memory touched
            call()
        pairs = []
        for number in range(args.calls):
            order = stats.order([0, 1], number)
            taken = {which: call_seconds((dense, fast)[which], case.device) for which in order}
            pairs.append((taken[0], taken[1]))
        slow, quick = zip(*pairs, strict=True)
        found.append(
            {
                "retained": percent / 100,
                "dense_seconds": stats.summary(slow),
                "fast_seconds": stats.summary(quick),
                "ratio": stats.summary(stats.pair_ratios(slow, quick)),
                "entries_ratio": args.length / read,
                "paper": papers.SFI_KERNEL_SPEEDUP[percent],
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
    p = parser()
    args = p.parse_args(argv)
    if args.heads % args.kv_heads:
        p.error(f"--heads must be a multiple of --kv-heads, got {args.heads} and {args.kv_heads}")
    rows = measure(args)
    names = ("length", "batch", "heads", "kv_heads", "head_dim", "dtype", "scattered")
    sizes = {key: getattr(args, key) for key in names}
    result: dict = {
        "schema": report.SCHEMA,
        **report.provenance("bench", ["--kernels", *argv]),
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
