"""Training curves as one PNG: `python -m fathom.demo.plot curves.png draft=DIR target=DIR speed=DIR`."""

from __future__ import annotations

import json
import sys
from itertools import pairwise
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def read_log(folder: str | Path) -> list[dict]:
    """Log lines by step; a resumed run overwrites the lines it repeats."""
    lines = [json.loads(line) for line in (Path(folder) / "log.jsonl").read_text().splitlines()]
    return [d for _, d in sorted({d["step"]: d for d in lines}.items())]


def plot(target: str | Path, runs: dict[str, str]) -> None:
    """Exact match per task (and the attention mass on guided keys) against tokens, one panel per run."""
    figure, axes = plt.subplots(1, len(runs), figsize=(5 * len(runs), 3.6), squeeze=False)
    for axis, (name, folder) in zip(axes[0], runs.items(), strict=True):
        log = read_log(folder)
        for key in sorted({k for d in log for k in d if k.startswith("em_") or k == "copy"}):
            points = [(d["tokens"] / 1e6, d[key]) for d in log if key in d]
            axis.plot(*zip(*points, strict=True), label=key.removeprefix("em_"), lw=1.2)
        for a, b in pairwise(log):
            if a["length"] != b["length"]:
                axis.axvline(b["tokens"] / 1e6, color="grey", lw=0.5, ls=":")
        axis.set(title=name, xlabel="training tokens (millions)", ylim=(0, 1.02))
        axis.legend(fontsize=6)
    axes[0][0].set_ylabel("exact match; guided mass (copy)")
    figure.tight_layout()
    figure.savefig(target, dpi=110)


def main(argv: list[str] | None = None) -> None:
    target, *pairs = argv or sys.argv[1:]
    plot(target, dict(p.split("=", 1) for p in pairs))


if __name__ == "__main__":
    main()
