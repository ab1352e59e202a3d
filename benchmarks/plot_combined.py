"""Ratios to dense of each policy as one PNG: a panel per prompt length, bars for TTFT, TPOT and end to end."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fathom.benchmarks.combined import Row

BARS = {"ttft": "TTFT", "tpot": "TPOT", "e2e": "end to end"}


def _label(row: Row) -> str:
    return row.variant if row.exact is None else f"{row.variant}\n{100 * row.exact:.0f} % exact"


def _panel(axis, rows: list[Row], title: str) -> None:
    height = 0.8 / len(BARS)
    for i, (metric, label) in enumerate(BARS.items()):
        at = [place + (i - 1) * height for place in range(len(rows))]
        bars = axis.barh(at, [row.ratios[metric] for row in rows], height, label=label)
        axis.bar_label(bars, fmt="%.2f", fontsize=7, padding=2)
        for place, row in zip(at, rows, strict=True):
            if row.product:
                axis.plot([row.product[metric]] * 2, [place - height / 2, place + height / 2], "k:", lw=1.2)
    axis.axvline(1, color="black", lw=0.8)
    axis.set_yticks(range(len(rows)), [_label(row) for row in rows], fontsize=8)
    axis.set_title(title, fontsize=10)
    axis.grid(axis="x", alpha=0.3)


def plot(rows: Sequence[Row], path: Path) -> None:
    """Write the figure to `path`; a dotted line where the product of the parts' ratios would be."""
    from matplotlib.figure import Figure

    cells = list(dict.fromkeys((row.prompt, row.batch) for row in rows))
    shown = [[row for row in rows if (row.prompt, row.batch) == cell and row.ratios] for cell in cells]
    figure = Figure(figsize=(5.2 * len(cells) + 1, 0.62 * len(shown[0]) + 1.2), layout="constrained")
    axes = figure.subplots(1, len(cells), squeeze=False, sharey=True).flat
    for axis, (prompt, batch), panel in zip(axes, cells, shown, strict=True):
        _panel(axis, panel, f"{prompt:,} tokens" + (f", {batch} requests" if batch > 1 else ""))
    figure.axes[0].invert_yaxis()  # shared
    figure.axes[0].legend(fontsize=8, loc="lower right")
    figure.supxlabel("times faster than dense (dotted: product of the parts)", fontsize=9)
    figure.savefig(path, dpi=130)
