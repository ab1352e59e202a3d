"""Named grids of `fathom fidelity` as data: policies by family and rate, and what they are asked.

Each makes one committed table and picture. Policies of a family share everything but their rate.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from fathom.benchmarks import settings

NEEDLES = ("single", "multikey")


@dataclass(frozen=True)
class Point:
    """One policy of a grid.

    Attributes:
        name: of the policy, in tables.
        body: its `fathom` object.
        family: what it is a rate of; one line or one heat map of the picture.
        x: its rate as a share, or its place along the first axis of a heat map.
        y: its place along the second axis; None in a line.
        flags: further flags of the server that answers it.
    """

    name: str
    body: dict[str, Any]
    family: str
    x: float
    y: float | None = None
    flags: tuple[str, ...] = ()


@dataclass(frozen=True)
class NamedGrid:
    """What `--grid NAME` stands for.

    Attributes:
        picture: "lines" over the rate, "maps" of two rates, or "lengths" (over the prompt's length).
        axes: name of x, for lines.
        samples: questions per task and length, and per policy.
    """

    points: tuple[Point, ...]
    tasks: tuple[str, ...]
    contexts: tuple[int, ...]
    samples: int
    picture: str
    axes: tuple[str, ...] = ()
    minutes: float = 20.0


def _percent(rate: float) -> str:
    return f"{100 * rate:g}"


# --- SpecPrefill: keep rate, against as many chunks at random ---

KEEP_RATES = (0.05, 0.1, 0.2, 0.3, 0.5)
"""The rate 1 is `exact`, which every grid asks."""


def _specprefill() -> Iterable[Point]:
    for rate in KEEP_RATES:
        body = {"prefill_keep_rate": rate, "min_prompt_tokens": 0}
        yield Point(f"specprefill-{_percent(rate)}", body, "SpecPrefill", rate)
        random = body | {"prefill_selection": "random"}
        yield Point(f"random-chunks-{_percent(rate)}", random, "random chunks", rate)


# --- FastKV: Table 9 (rates), Table 10 (layer), and other policies at the same retention ---

TSP_RATES = (0.1, 0.2, 0.3, 0.4, 0.5)
CONTROL_RATES = (0.1, 0.2, 0.3, 0.5)
CONTROLS = {"SnapKV": "saliency", "StreamingLLM": "streaming", "random": "random"}
TSP_LAYERS = (2, 6)
"""Beside the demo target's default 4: all boundaries between its four spans of two layers."""


def _fastkv() -> Iterable[Point]:
    for rate in TSP_RATES:
        for kept in (each for each in TSP_RATES if each <= rate):
            body = {"tsp_rate": rate, "kv_retention_rate": kept}
            name = f"fastkv-{_percent(rate)}-{_percent(kept)}"
            yield Point(name, body, "FastKV: retention by TSP rate", kept, rate)
    for family, policy in CONTROLS.items():
        for kept in CONTROL_RATES:
            rule = {"kv_retention_rate": kept, "retention_policy": policy}
            yield Point(f"{family.lower()}-{_percent(kept)}", rule, family, kept)
    for layer in TSP_LAYERS:
        for rate in TSP_RATES:
            flags = ("--tsp-layer", str(layer))
            name = f"fastkv-{_percent(rate)}-10-T{layer}"
            body = {"tsp_rate": rate, "kv_retention_rate": 0.1}
            yield Point(name, body, "FastKV: layer by TSP rate", layer, rate, flags)


# --- SFI: what a fast step reads, as a share of the prompt, and who chooses it ---

SFI_CONTEXT = 800
SFI_BUDGETS = (0.02, 0.05, 0.1, 0.15, 0.2)
SFI_RULES = {"SFI": "fused", "frozen": "frozen", "random": "random", "sink + recent": "none"}
SINK = 4
"""The server's default."""
RECENT = 108
"""Enough for the question to stay in sight until the longest answer ends."""
FEWEST = 4
"""Chosen entries of a budget that has no room for as many recent tokens."""


def sfi_reading(budget: float, rule: str) -> dict[str, Any]:
    """A fast step that reads this share of the prompt: the sink, recent tokens, the rest chosen.

    Without a choice all but the sink are recent tokens.
    """
    total = round(budget * SFI_CONTEXT)
    recent = total - SINK if rule == "none" else max(1, min(RECENT, total - SINK - FEWEST))
    chosen = {} if rule == "none" else {"sfi_budget": total - SINK - recent}
    return {"decode": "slow_fast", "sfi_selection": rule, "sfi_window": recent} | chosen


def _sfi() -> Iterable[Point]:
    for family, rule in SFI_RULES.items():
        for budget in SFI_BUDGETS:
            name = f"{family.split()[0].lower()}-{_percent(budget)}"
            yield Point(name, sfi_reading(budget, rule), family, budget)


def _all() -> Iterable[Point]:
    for name, body in settings.COMPARED.items():
        yield Point(name, body, name, 0)


GRIDS = {
    "specprefill": NamedGrid(
        tuple(_specprefill()),
        (*NEEDLES, "twohop", "list"),
        (1024,),
        32,
        "lines",
        ("share of chunks kept (%)",),
    ),
    "fastkv": NamedGrid(tuple(_fastkv()), (*NEEDLES, "list"), (1024,), 16, "maps"),
    "sfi": NamedGrid(
        tuple(_sfi()),
        ("list",),
        (SFI_CONTEXT,),
        48,
        "lines",
        ("share of the prompt that a fast step reads (%)",),
    ),
    "all": NamedGrid(tuple(_all()), (*NEEDLES, "twohop", "list"), (2048,), 20, "lengths"),
}
