"""Rows, tables and files of a fidelity run."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from fathom.benchmarks.fidelity_args import BASELINE, Cell
from fathom.benchmarks.fidelity_client import Answer, Item, is_exact
from fathom.benchmarks.fidelity_stats import paired, wilson

ALL_TASKS = "all"
STEPS = ("cached_tokens", "slow_steps", "fast_steps", "draft_tokens", "accepted_tokens")


@dataclass(frozen=True)
class Scored:
    """One answer under one policy: what was expected, what came, and the server's checked account of it."""

    item: Item
    answer: Answer
    counters: dict

    @property
    def exact(self) -> bool:
        return is_exact(self.answer, self.item.sample.answer)


Results = dict[tuple[Cell, str], list[Scored]]
"""Answers by cell and policy, in the order of the questions."""


@dataclass(frozen=True)
class Row:
    """One policy in one cell. Shares in 0..1; counters are means per answer unless they say share.

    The columns from `difference` on compare with the baseline on the same questions; empty for itself.
    """

    task: str
    context: int | None
    policy: str
    n: int
    exact: int
    share: float
    low: float
    high: float
    output_tokens: float
    seconds: float
    kept_share: float
    kv_share: float
    cached_tokens: float
    slow_steps: float
    fast_steps: float
    draft_tokens: float
    accepted_tokens: float
    difference: float | None = None
    difference_low: float | None = None
    difference_high: float | None = None
    better: int | None = None
    worse: int | None = None
    p: float | None = None


def _mean(values: Sequence[float]) -> float:
    return round(sum(values) / len(values), 4)


def _share(part: int, whole: int) -> float:
    return round(part / whole, 6) if whole else 1.0


def _row(task: str, context: int | None, policy: str, mine: list[Scored], base: list[Scored]) -> Row:
    right = [s.exact for s in mine]
    low, high = wilson(sum(right), len(right))
    total = {key: sum(s.counters[key] for s in mine) for key in mine[0].counters}
    compared: dict[str, Any] = {}
    if policy != BASELINE:
        d = paired(right, [s.exact for s in base])
        compared = {
            "difference": d.difference,
            "difference_low": d.low,
            "difference_high": d.high,
            "better": d.better,
            "worse": d.worse,
            "p": d.p,
        }
    steps = {key: _mean([s.counters[key] for s in mine]) for key in STEPS}
    values: dict[str, Any] = {
        "task": task,
        "context": context,
        "policy": policy,
        "n": len(right),
        "exact": sum(right),
        "share": sum(right) / len(right),
        "low": low,
        "high": high,
        "output_tokens": _mean([s.answer.output_tokens for s in mine]),
        "seconds": _mean([s.answer.seconds for s in mine]),
        "kept_share": _share(total["kept_tokens"], total["prompt_tokens"]),
        "kv_share": _share(total["kv_bytes"], total["kv_bytes_dense"]),
    }
    return Row(**(values | steps | compared))


def rows(results: Results) -> list[Row]:
    """One row per cell and policy, then one per policy over everything."""
    cells = list(dict.fromkeys(cell for cell, _ in results))
    policies = list(dict.fromkeys(policy for _, policy in results))
    found = [
        _row(cell.task, cell.context, name, results[cell, name], results[cell, BASELINE])
        for cell in cells
        for name in policies
    ]
    pooled = {name: [s for cell in cells for s in results[cell, name]] for name in policies}
    return found + [_row(ALL_TASKS, None, name, pooled[name], pooled[BASELINE]) for name in policies]


def _percent(share: float, low: float, high: float, sign: str = "") -> str:
    return f"{100 * share:{sign}.1f} [{100 * low:{sign}.1f}, {100 * high:{sign}.1f}]"


def _cells(row: Row) -> list[str]:
    against = ["", ""]
    if row.difference is not None and row.difference_low is not None and row.difference_high is not None:
        split = f"+{row.better} −{row.worse}, p {row.p:.2g}"
        against = [_percent(row.difference, row.difference_low, row.difference_high, "+"), split]
    at = [row.task, str(row.context or ""), row.policy, str(row.n)]
    means = [f"{row.output_tokens:.1f}", f"{row.seconds:.2f}", f"{row.kept_share:.1%}", f"{row.kv_share:.1%}"]
    steps = [
        f"{row.slow_steps:.1f}/{row.fast_steps:.1f}",
        f"{row.accepted_tokens:.1f}/{row.draft_tokens:.1f}",
    ]
    return [*at, _percent(row.share, row.low, row.high), *against, *means, *steps]


HEAD = (
    *("task", "prompt", "policy", "n", "exact match (%)", f"minus {BASELINE} (points)", "only one right"),
    *("tokens", "s", "kept", "KV", "slow/fast", "accepted/drafted"),
)


def table(found: list[Row]) -> str:
    """Markdown: policies of a cell under each other, each with its difference to the baseline."""
    lines = [list(HEAD), ["---"] * len(HEAD), *map(_cells, found)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def summary(found: list[Row]) -> dict[str, dict]:
    """Each policy over everything, short enough for one line of JSON."""
    keys = ("n", "share", "low", "high", "difference", "difference_low", "difference_high", "kv_share")
    return {
        row.policy: {k: round(v, 4) for k in keys if (v := getattr(row, k)) is not None}
        for row in found
        if row.task == ALL_TASKS
    }


def write_csv(found: list[Row], path: Path) -> None:
    """One line per row; empty where a column does not apply."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=[field.name for field in fields(Row)])
        writer.writeheader()
        writer.writerows(asdict(row) for row in found)
