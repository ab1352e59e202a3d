"""Pictures of named grids: lines over a rate with 95 % intervals, and heat maps of two rates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fathom.benchmarks.fidelity_args import BASELINE
from fathom.benchmarks.fidelity_grids import NamedGrid, Point
from fathom.benchmarks.fidelity_report import ALL_TASKS, Row

Found = dict[str, Row]
"""Rows of one panel by policy."""


def _percent(value: float) -> float:
    return 100 * value


def _families(grid: NamedGrid) -> dict[str, list[Point]]:
    found: dict[str, list[Point]] = {}
    for point in grid.points:
        found.setdefault(point.family, []).append(point)
    return found


def _by_cell(rows: Sequence[Row]) -> dict[str, Found]:
    """By task, with the length where there are several; several cells also together, at the end."""
    found: dict[str, Found] = {}
    lengths = {row.context for row in rows if row.context}
    for row in rows:
        name = f"{row.task}, {row.context} tokens" if row.context and len(lengths) > 1 else row.task
        found.setdefault(name, {})[row.policy] = row
    if len(found) == 2:
        del found[ALL_TASKS]
    return found


def _line(axis: Any, points: list[Point], rows: Found, label: str, shift: float) -> None:
    known = [point for point in points if point.name in rows]
    mine = [rows[point.name] for point in known]
    below = [_percent(max(0.0, row.share - row.low)) for row in mine]
    above = [_percent(max(0.0, row.high - row.share)) for row in mine]
    at = [_percent(point.x) * 2**shift for point in known]
    shares = [_percent(row.share) for row in mine]
    axis.errorbar(at, shares, yerr=[below, above], label=label, marker="o", ms=3, lw=1.2, capsize=2)


def _ticks(axis: Any, values: Sequence[float]) -> None:
    axis.set_xscale("log", base=2)
    axis.set_xticks(values, [f"{value:g}" for value in values])
    axis.minorticks_off()
    axis.grid(alpha=0.3)


def _dense(axis: Any, rows: Found) -> None:
    axis.axhline(_percent(rows[BASELINE].share), color="black", ls="--", lw=0.9, label="dense")


def _lines_panel(axis: Any, families: dict[str, list[Point]], rows: Found, title: str) -> None:
    _dense(axis, rows)
    for i, (family, points) in enumerate(families.items()):
        _line(axis, points, rows, family, 0.04 * (i - (len(families) - 1) / 2))
    _ticks(axis, sorted({_percent(point.x) for points in families.values() for point in points}))
    n = min(row.n for row in rows.values())
    axis.set(title=f"{title} (n = {n})", ylim=(-3, 103), ylabel="exact match (%)")


def _figure(panels: int, width: float = 4.2) -> tuple[Any, list[Any]]:
    from matplotlib.figure import Figure

    columns = min(panels, 3)
    height = -(-panels // columns)
    figure = Figure(figsize=(width * columns + 0.6, 3.1 * height + 0.5), layout="constrained")
    axes = list(figure.subplots(height, columns, squeeze=False).flat)
    for axis in axes[panels:]:
        axis.set_visible(False)
    return figure, axes[:panels]


def _lines(grid: NamedGrid, rows: Sequence[Row]) -> Any:
    """A panel per cell; where decoding alternates, one more with the share of slow steps."""
    cells, families = _by_cell(rows), _families(grid)
    stepped = any(row.fast_steps for row in rows)
    figure, axes = _figure(len(cells) + stepped)
    for axis, (name, found) in zip(axes, cells.items(), strict=False):
        _lines_panel(axis, families, found, name)
    if stepped:
        first = next(iter(cells))
        _slow_panel(
            axes[-1], families, cells[first], f"slow steps, {first}" if len(cells) > 1 else "slow steps"
        )
    axes[0].legend(fontsize=7, loc="best")
    figure.supxlabel(grid.axes[0], fontsize=9)
    return figure


def _slow_panel(axis: Any, families: dict[str, list[Point]], rows: Found, title: str) -> None:
    for family, points in families.items():
        known = [rows[point.name] for point in points if point.name in rows]
        shares = [_percent(row.slow_steps / max(row.slow_steps + row.fast_steps, 1)) for row in known]
        axis.plot([_percent(point.x) for point in points], shares, label=family, marker="o", ms=3, lw=1.2)
    _ticks(axis, sorted({_percent(point.x) for points in families.values() for point in points}))
    axis.set(title=title, ylim=(0, None), ylabel="share of decode steps (%)")


def _map(axis: Any, points: list[Point], rows: Found, label_x: str, x_of: Callable[[float], float]) -> None:
    xs, ys = sorted({p.x for p in points}), sorted({p.y for p in points if p.y is not None})
    values = [[float("nan")] * len(xs) for _ in ys]
    for point in points:
        if point.y is not None and point.name in rows:
            at = xs.index(point.x), ys.index(point.y)
            values[at[1]][at[0]] = share = _percent(rows[point.name].share)
            axis.text(*at, f"{share:.0f}", ha="center", va="center", color="white" if share < 60 else "black")
    axis.imshow(values, vmin=0, vmax=100, origin="lower", aspect="auto", cmap="viridis")
    axis.set_xticks(range(len(xs)), [f"{x_of(x):g}" for x in xs])
    axis.set_yticks(range(len(ys)), [f"{_percent(y):g}" for y in ys])
    axis.set(xlabel=label_x, ylabel="TSP rate (%)")


def _maps(grid: NamedGrid, rows: Sequence[Row]) -> Any:
    """A row of panels per cell: the heat maps, and the families that have a rate only as lines."""
    cells, families = _by_cell(rows), _families(grid)
    flat = {name: points for name, points in families.items() if points[0].y is None}
    maps = {name: points for name, points in families.items() if points[0].y is not None}
    figure, axes = _figure(len(cells) * 3, 4.0)
    for i, (title, found) in enumerate(cells.items()):
        for axis, (name, points) in zip(axes[3 * i :], maps.items(), strict=False):
            of_layers = points[0].x >= 1
            label = "TSP layer (10 % retained)" if of_layers else "KV retention rate (%)"
            _map(axis, _with_default_layer(points, families), found, label, float if of_layers else _percent)
            axis.set_title(f"{title}: {name}", fontsize=9)
        _lines_panel(axes[3 * i + 2], {"FastKV, TSP = retention": _diagonal(maps), **flat}, found, title)
        axes[3 * i + 2].set_xlabel("KV retention rate (%)")
    axes[2].legend(fontsize=7, loc="best")
    return figure


def _diagonal(maps: dict[str, list[Point]]) -> list[Point]:
    """Points of the first map whose two rates are equal."""
    return [point for point in next(iter(maps.values())) if point.x == point.y]


def _with_default_layer(points: list[Point], families: dict[str, list[Point]]) -> list[Point]:
    """A map over layers takes the column of the default one from the map over rates, at the same retention."""
    if points[0].x < 1:
        return points
    retained = {point.body["kv_retention_rate"] for point in points}
    layer = sum(sorted({point.x for point in points})[:2]) / 2
    others = [
        point for mine in families.values() for point in mine if point.y is not None and point.x in retained
    ]
    return points + [Point(p.name, p.body, p.family, layer, p.y) for p in others]


def plot(grid: NamedGrid, rows: Sequence[Row], path: Path, title: str) -> None:
    """Write the figure to `path`."""
    figure = (_maps if grid.picture == "maps" else _lines)(grid, rows)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=90)
