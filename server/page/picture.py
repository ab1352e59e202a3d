"""The staircase of one prompt as a picture: how many of its tokens each span of layers computed, and keeps.

The same drawing as SVG text, for the live page, and as a PNG (which needs matplotlib): one bar per span, the first
layers at the bottom, three widths in it: the whole prompt, what was computed, what is kept.
"""

from dataclasses import dataclass
from html import escape
from importlib.util import find_spec
from pathlib import Path

BAR, GAP, LABEL = 14, 3, 52
"""Heights of a bar and of the space between two, and the width of its label, in pixels of the SVG."""


@dataclass(frozen=True)
class Stair:
    """One span of layers, counted from 1; ``computed`` and ``kept`` are prompt tokens (kept ones per KV head)."""

    first: int
    last: int
    computed: int
    kept: int

    @property
    def layers(self) -> str:
        """The span's layers in words."""
        return str(self.first) if self.first == self.last else f"{self.first}-{self.last}"


@dataclass(frozen=True)
class Staircase:
    """A prompt of ``prompt`` tokens on its way up; the spans from the bottom."""

    prompt: int
    stairs: tuple[Stair, ...]

    @classmethod
    def of_spans(cls, prompt: int, span: int, computed: list[int], kept: list[int]) -> "Staircase":
        """From token counts per span of ``span`` layers."""
        pairs = zip(computed, kept, strict=True)
        return cls(prompt, tuple(Stair(i * span + 1, (i + 1) * span, c, k) for i, (c, k) in enumerate(pairs)))

    @property
    def summary(self) -> str:
        """The picture in words."""
        rows = (f"layers {s.layers}: {s.computed:,} computed, {s.kept:,} kept" for s in self.stairs)
        return f"{self.prompt:,} prompt tokens; " + "; ".join(rows)


def svg(staircase: Staircase, width: int = 320) -> str:
    """An ``<svg>`` element, coloured by the page: classes ``whole``, ``computed``, ``kept`` and ``label``."""
    height = len(staircase.stairs) * (BAR + GAP) - GAP
    scale = (width - LABEL) / max(staircase.prompt, 1)
    parts = []
    for row, stair in enumerate(reversed(staircase.stairs)):
        top = row * (BAR + GAP)
        parts.append(f'<text class="label" x="{LABEL - 6}" y="{top + BAR - 3}">{stair.layers}</text>')
        widths = {"whole": staircase.prompt, "computed": stair.computed, "kept": stair.kept}
        for name, tokens in widths.items():
            shown = max(tokens * scale, 1.0) if tokens else 0.0
            inset = 3 if name == "kept" else 0
            parts.append(
                f'<rect class="{name}" x="{LABEL}" y="{top + inset}" width="{shown:.1f}" '
                f'height="{BAR - 2 * inset}"/>'
            )
    summary = escape(staircase.summary, quote=True)
    head = f'<svg class="staircase" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    return f'{head} role="img" aria-label="{summary}"><title>{summary}</title>{"".join(parts)}</svg>'


def can_draw_png() -> bool:
    """Whether matplotlib is installed; it is no requirement of the server."""
    return find_spec("matplotlib") is not None


def png(staircase: Staircase, title: str, path: Path) -> None:
    """Write the picture to ``path``.

    Raises:
        OSError: when the file cannot be written.
    """
    from matplotlib.figure import Figure

    stairs = staircase.stairs
    figure = Figure(figsize=(7, max(2.2, 0.36 * len(stairs) + 1.4)), layout="constrained")
    axis = figure.subplots()
    rows = range(len(stairs))
    axis.barh(rows, [staircase.prompt] * len(stairs), 0.82, color="#e4e7eb", label="prompt")
    axis.barh(rows, [s.computed for s in stairs], 0.82, color="#7fb0e6", label="computed")
    axis.barh(rows, [s.kept for s in stairs], 0.46, color="#14508f", label="KV kept")
    for row, stair in enumerate(stairs):
        text = f"{stair.computed:,} / {stair.kept:,}"
        axis.annotate(
            text, (staircase.prompt, row), (4, 0), textcoords="offset points", va="center", fontsize=8
        )
    axis.set_yticks(list(rows), [stair.layers for stair in stairs])
    axis.set(xlabel="prompt tokens (computed / kept per KV head)", ylabel="layers")
    axis.set_title(title, fontsize=10, wrap=True)
    axis.set_xlim(0, staircase.prompt * 1.2)
    axis.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    figure.savefig(path, dpi=150)
