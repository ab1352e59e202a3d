"""Registers, spills and shared memory of every Triton kernel, compiled without a GPU.

`PYTHONPATH=.venv/gpu-triton .venv/bin/python -m fathom.benchmarks.triton_resources` writes
benchmarks/results/triton-resources.md, with the Triton that a GPU gets (`make test` installs it there).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import triton

from fathom.kernels.triton_aot import SHARED_MEMORY, Resources, Specialization, compile_ahead, discover

OUT = Path("benchmarks/results/triton-resources.md")

Row = tuple[str, Specialization, dict[int, Resources]]


def measure() -> list[Row]:
    """Module, specialization and resources per target, for every kernel there is."""
    return [
        (name, item, {arch: compile_ahead(item, arch) for arch in SHARED_MEMORY if arch >= item.least})
        for name, item in discover()
    ]


def table(rows: list[Row]) -> str:
    """The rows as Markdown."""
    limits = ", ".join(f"sm_{arch} {limit // 1024} KiB" for arch, limit in SHARED_MEMORY.items())
    targets = [f"sm_{arch}" for arch in SHARED_MEMORY]
    lines = [
        "# Resources of the Triton kernels",
        "",
        f"Triton {triton.__version__}, compiled ahead of time; nothing was run, there was no GPU. Per target:",
        "registers per thread / spilled bytes per thread / KiB of shared memory per block. Limits: 255 registers;",
        f"shared memory {limits}. –: the GPU has no such numbers.",
        "",
        "Written by `PYTHONPATH=.venv/gpu-triton .venv/bin/python -m fathom.benchmarks.triton_resources`;",
        "`tests/kernels/test_compile.py` checks them.",
        "",
        f"| module | kernel | warps | {' | '.join(targets)} |",
        f"|:--|:--|--:|{':--|' * len(targets)}",
    ]
    for name, item, resources in rows:
        shown = [_cell(resources.get(arch)) for arch in SHARED_MEMORY]
        warps = item.options.get("num_warps", 4)
        lines.append(f"| {name} | {item.label} | {warps} | " + " | ".join(shown) + " |")
    return "\n".join(lines) + "\n"


def _cell(r: Resources | None) -> str:
    return "–" if r is None else f"{r.registers} / {r.spilled} / {r.shared / 1024:.1f}"


def main(argv: list[str]) -> int:
    """Write the table; 1 if a kernel does not fit, with a line on stderr for each."""
    p = argparse.ArgumentParser(prog="python -m fathom.benchmarks.triton_resources", description=__doc__)
    p.add_argument("--out", type=Path, default=OUT, help="default: %(default)s")
    out = p.parse_args(argv).out
    rows = measure()
    out.write_text(table(rows))
    bad = [
        f"{item.label}, sm_{arch}: {problem}"
        for _, item, resources in rows
        for arch, each in resources.items()
        for problem in each.problems(arch)
    ]
    print(*bad, sep="\n", file=sys.stderr)
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
