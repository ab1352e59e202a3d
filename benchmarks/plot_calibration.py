"""Distance of the final hidden states against the layer of FastKV's selection, as one PNG."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def plot(distances: Mapping[int, float], chosen: int, max_layer: int, path: Path) -> None:
    """Write the figure to `path`."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.5, 3.4), layout="constrained")
    axis = figure.subplots()
    layers = sorted(distances)
    axis.plot(layers, [distances[layer] for layer in layers], marker="o", lw=1.2)
    axis.plot(chosen, distances[chosen], marker="o", ms=11, mfc="none", color="C1", label=f"T = {chosen}")
    axis.axvline(max_layer, color="0.6", ls=":", label=f"L_max = {max_layer}")
    axis.set(xlabel="layers that see the whole prompt (T)", ylabel="normalised L2 distance", ylim=(0, None))
    axis.legend()
    axis.grid(alpha=0.3)
    figure.savefig(path, dpi=150)
