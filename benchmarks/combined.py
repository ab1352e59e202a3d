"""Mechanisms beside their combination: times against dense, KV bytes, and the fidelity of the same policies."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

from fathom.benchmarks import fidelity, fidelity_args, plot_combined
from fathom.benchmarks.client import BenchError
from fathom.benchmarks.fidelity_report import ALL_TASKS
from fathom.benchmarks.stats import percentile
from fathom.benchmarks.variants import DENSE
from fathom.server.page.picture import can_draw_png

RATIOS = ("ttft", "tpot", "e2e")


@dataclass(frozen=True)
class Row:
    """One variant in one cell. Seconds and bytes are medians; ratios are dense over variant, round by round.

    Attributes:
        ratios: by metric; of another engine than Fathom its ratio to dense Fathom too. Empty for dense.
        product: by metric, the product of the ratios of its parts, where it has some.
        parts: policies of the run whose fields this one's are made of.
        exact, low, high: exact match with this policy and its interval, in 0..1; None where it was not asked.
    """

    prompt: int
    batch: int
    variant: str
    ttft: float
    tpot: float
    e2e: float
    kv_bytes: float | None
    ratios: dict[str, float]
    product: dict[str, float]
    parts: tuple[str, ...]
    exact: float | None
    low: float | None
    high: float | None


def fidelity_of(source: str, cache: Path) -> dict:
    """What is known of the policies' answers: from a file of `fathom fidelity`, or asked now with `run`.

    Raises:
        BenchError: when asking failed.
        ValueError: for a file that is not one.
    """
    path = Path(source)
    if source == "run":
        path = cache.resolve() / "fidelity-all.json"
        if fidelity.main(["--grid", "all", "--cache", str(cache), "--out", str(path)]) != 0:
            raise BenchError("the fidelity of the policies was not found out")
    try:
        content = json.loads(path.read_text())
        rows = {row["policy"]: row for row in content["rows"] if row["task"] == ALL_TASKS}
        asked = {name: {**rows[name], "body": body} for name, body in content["policies"].items()}
        named = {key: content[key] for key in ("date", "command", "model", "git")}
        cells = [
            [row["task"], row["context"]]
            for row in content["rows"]
            if row["policy"] == fidelity_args.BASELINE and row["task"] != ALL_TASKS
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no file of fathom fidelity: {type(error).__name__} {error}") from None
    return named | {"cells": cells, "policies": asked}


def _parts(bodies: dict[str, dict], name: str) -> tuple[str, ...]:
    """Policies whose fields all are fields of this one, with the same values, and that together are all of it."""
    whole = bodies[name]
    found = [
        other
        for other, body in bodies.items()
        if other != name and body and body != whole and body.items() <= whole.items()
    ]
    smallest = [
        part for part in found if not any(bodies[other].items() < bodies[part].items() for other in found)
    ]
    covered = {field for part in smallest for field in bodies[part]}
    return tuple(smallest) if covered == set(whole) else ()


def _score(known: dict, body: dict) -> dict:
    """The fidelity row of a policy with exactly these fields."""
    wanted = body or {"preset": fidelity_args.BASELINE}
    return next((row for row in known["policies"].values() if row["body"] == wanted), {})


def _kv_bytes(cell: dict, name: str) -> float | None:
    held = [
        request["fathom"]["kv_bytes"]
        for turn in cell["turns"]
        if turn["variant"] == name
        for request in turn["requests"]
        if request["fathom"]
    ]
    return sum(held) / len(held) if held else None


def _medians(cell: dict, name: str) -> tuple[float, float, float]:
    """Seconds: time to first token, per output token, end to end."""
    ttft, tpot, e2e = (cell["summary"][name][metric]["median"] for metric in RATIOS)
    return ttft, tpot, e2e


def _ratio(cell: dict, dense: str, name: str, metric: str) -> float:
    """Median over the rounds of dense over variant."""
    times = {(turn["variant"], turn["round"]): turn[metric] for turn in cell["turns"]}
    rounds = sorted({number for _, number in times})
    return percentile([times[dense, number] / times[name, number] for number in rounds], 50)


def rows(result: dict) -> list[Row]:
    """Every variant of every cell, in table order.

    Raises:
        ValueError: for a run without a dense Fathom.
    """
    known = result.get("fidelity", {"policies": {}})
    bodies = {variant["name"]: variant["body"].get("fathom", {}) for variant in result["variants"]}
    policies = {name: body for name, body in bodies.items() if body}
    ours = [variant["name"] for variant in result["variants"] if "engine" in variant["identity"]]
    dense = next((name for name in ours if bodies[name] in DENSE), None)
    if dense is None:
        raise ValueError("nothing to compare with: the run has no dense Fathom")
    found = []
    for cell in result["cells"]:
        ratios = {
            name: {metric: _ratio(cell, dense, name, metric) for metric in RATIOS}
            for name in bodies
            if name != dense
        }
        for variant in result["variants"]:
            name = variant["name"]
            parts = _parts(policies, name) if name in policies else ()
            score = _score(known, bodies[name]) if name in ours else {}
            found.append(
                Row(
                    cell["prompt_tokens"],
                    cell["batch"],
                    name,
                    *_medians(cell, name),
                    _kv_bytes(cell, name),
                    ratios.get(name, {}),
                    {m: math.prod(ratios[part][m] for part in parts) for m in RATIOS} if parts else {},
                    parts,
                    score.get("share"),
                    score.get("low"),
                    score.get("high"),
                )
            )
    return found


def _against(row: Row, metric: str) -> str:
    if metric not in row.ratios:
        return ""
    product = f" ({row.product[metric]:.2f})" if row.product else ""
    return f"{row.ratios[metric]:.2f}{product}"


def _line(row: Row) -> str:
    exact = "–"
    if row.exact is not None and row.low is not None and row.high is not None:
        exact = f"{100 * row.exact:.1f} [{100 * row.low:.0f}, {100 * row.high:.0f}]"
    held = "–" if row.kv_bytes is None else f"{row.kv_bytes / 2**20:.1f}"
    times = [f"{row.ttft:.2f}", f"{1e3 * row.tpot:.1f}", f"{row.e2e:.2f}", held]
    shown = [str(row.prompt), row.variant, *times, *(_against(row, metric) for metric in RATIOS), exact]
    return "| " + " | ".join(shown) + " |"


HEAD = (
    *("prompt", "policy", "TTFT (s)", "TPOT (ms)", "E2E (s)", "KV (MiB)"),
    *("TTFT ×", "TPOT ×", "E2E ×", "exact match (%)"),
)


def page(result: dict, found: list[Row]) -> str:
    """The comparison as Markdown, with what it was measured on."""
    lines = [list(HEAD), ["--:", ":--", *["--:"] * (len(HEAD) - 2)]]
    table = ["| " + " | ".join(line) + " |" for line in lines] + [_line(row) for row in found]
    text = [
        f"`{result['command']}`, {result['date'][:10]}, {result['hardware']['cpu']}, "
        f"{result['hardware']['cores']} cores. × is dense time over this policy's, median over the rounds; in "
        "brackets the product of the ratios of its parts."
    ]
    if known := result.get("fidelity"):
        cells = ", ".join(f"{task} at {context}" for task, context in known["cells"])
        text.append(
            f"Exact match of the same policies on {known['model']} ({cells}), with 95 % intervals: "
            f"`{known['command']}`, {known['date'][:10]}. Speed was measured on a model with random weights."
        )
    policies = [
        f"- `{v['name']}`: `{json.dumps(v['body']['fathom'])}`" for v in result["variants"] if v["body"]
    ]
    return "\n\n".join(["\n".join(table), *text, "\n".join(policies)])


def plot(found: list[Row], path: Path) -> list[Path]:
    """The picture, where matplotlib is installed."""
    if not can_draw_png():
        return []
    plot_combined.plot(found, path)
    return [path]
