"""Exact match against prompt length as one PNG: a panel per task, a line per policy, 95 % intervals."""

from __future__ import annotations

from pathlib import Path

from fathom.benchmarks.fidelity_report import ALL_TASKS, Row

COLUMNS = 3


def _line(axis, rows: list[Row], shift: float) -> None:
    """One policy's points, moved a little sideways so that intervals do not cover each other."""
    x = [row.context * 2**shift for row in rows if row.context]
    y = [100 * row.share for row in rows]
    below = [max(0.0, 100 * (row.share - row.low)) for row in rows]
    above = [max(0.0, 100 * (row.high - row.share)) for row in rows]
    axis.errorbar(x, y, yerr=[below, above], label=rows[0].policy, marker="o", ms=3, lw=1.2, capsize=2)


def _panel(axis, task: str, rows: list[Row]) -> None:
    policies = list(dict.fromkeys(row.policy for row in rows))
    for i, policy in enumerate(policies):
        _line(axis, [row for row in rows if row.policy == policy], 0.06 * (i - (len(policies) - 1) / 2))
    contexts = sorted({row.context for row in rows if row.context})
    axis.set_xscale("log", base=2)
    axis.set_xticks(contexts, [str(context) for context in contexts])
    axis.set(title=f"{task} (n = {min(row.n for row in rows)})", ylim=(-3, 103))
    axis.grid(alpha=0.3)


def plot(rows: list[Row], path: Path, title: str) -> None:
    """Write the figure to `path`."""
    from matplotlib.figure import Figure

    tasks = [task for task in dict.fromkeys(row.task for row in rows) if task != ALL_TASKS]
    width = min(COLUMNS, len(tasks))
    height = -(-len(tasks) // width)
    figure = Figure(figsize=(4 * width + 1, 2.8 * height + 0.6), layout="constrained")
    axes = figure.subplots(height, width, squeeze=False, sharey=True).flat
    for axis, task in zip(axes, tasks, strict=False):
        _panel(axis, task, [row for row in rows if row.task == task])
    for axis in list(axes)[len(tasks) :]:
        axis.set_visible(False)
    first = next(iter(figure.axes))
    first.legend(fontsize=8, loc="lower left")
    figure.supxlabel("prompt tokens")
    figure.supylabel("exact match (%)")
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=130)
