"""The files of a fidelity run: JSON with one line per answer, the rows as CSV, and a picture."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fathom.benchmarks import fidelity_report, plot_fidelity, plot_grids, report
from fathom.benchmarks.fidelity_args import Cell
from fathom.benchmarks.fidelity_grids import GRIDS
from fathom.benchmarks.fidelity_report import Results, Row, Scored
from fathom.server.page.picture import can_draw_png

COLUMNS = (
    *(
        "exact",
        "ended",
        "seconds",
        "output_tokens",
        "kept_tokens",
        "cached_tokens",
        "slow_steps",
        "fast_steps",
    ),
    *("draft_tokens", "accepted_tokens", "kv_bytes"),
)
"""Of one answer; behind them the text where it was wrong."""


def _answer(scored: Scored) -> list[Any]:
    answer = scored.answer
    found = [int(scored.exact), int(answer.finish == "stop"), round(answer.seconds, 2), answer.output_tokens]
    found += [scored.counters[name] for name in COLUMNS[4:]]
    return found if scored.exact else [*found, answer.text]


def _questions(results: Results) -> list[dict]:
    """By cell what is the same for all policies: prompt tokens, dense KV bytes and expected answers."""
    found: dict[Cell, list[Scored]] = {}
    for (cell, _), scored in results.items():
        found.setdefault(cell, scored)
    return [
        {
            **asdict(cell),
            "prompt_tokens": [s.item.sample.prompt_tokens for s in scored],
            "expected": [s.item.sample.answer for s in scored],
        }
        for cell, scored in found.items()
    ]


def _row(row: Row) -> dict:
    """Without what does not apply, numbers to four digits behind the point."""
    values = {key: round(v, 4) if isinstance(v, float) else v for key, v in asdict(row).items()}
    return {key: value for key, value in values.items() if value is not None or key == "context"}


def _lines(items: list[Any], indent: str) -> str:
    """A list with one line of JSON per item."""
    body = ",\n".join(indent + " " + json.dumps(item, ensure_ascii=False) for item in items)
    return f"[\n{body}\n{indent}]"


def to_text(result: dict) -> str:
    """The whole report as JSON, the long parts with a line for each row, question list and answer."""
    results: Results = result["results"]
    head = {key: value for key, value in result.items() if key not in ("results", "rows")}
    parts = [f" {json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}" for key, value in head.items()]
    parts.append(f' "rows": {_lines([_row(row) for row in result["rows"]], " ")}')
    parts.append(f' "questions": {_lines(_questions(results), " ")}')
    parts.append(f' "columns": {json.dumps([*COLUMNS, "text"])}')
    cells = [
        "  {"
        + json.dumps({**asdict(cell), "policy": name}, ensure_ascii=False)[1:-1]
        + f', "answers": {_lines([_answer(s) for s in scored], "  ")}}}'
        for (cell, name), scored in results.items()
    ]
    parts.append(' "results": [\n' + ",\n".join(cells) + "\n ]")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def write(result: dict, out: Path) -> list[Path]:
    """JSON at `out`, CSV and (with matplotlib) PNG beside it."""
    out.parent.mkdir(parents=True, exist_ok=True)
    found = result["rows"]
    out.write_text(report.portable(to_text(result), Path.cwd()))
    paths = [out, out.with_suffix(".csv")]
    fidelity_report.write_csv(found, paths[1])
    if not can_draw_png():
        print("no PNG: matplotlib is not installed", file=sys.stderr)
        return paths
    paths.append(out.with_suffix(".png"))
    title = f"{Path(result['model']).name}, {result['date'][:10]}"
    if result["grid"] and GRIDS[result["grid"]].picture != "lengths":
        plot_grids.plot(GRIDS[result["grid"]], found, paths[-1], title)
    else:
        plot_fidelity.plot(found, paths[-1], title)
    return paths


def default_out(result: dict) -> Path:
    """Where the result goes; without a named grid it has the names of the policies."""
    return report.default_out(result, f"fidelity-{result['grid'] or '-'.join(result['policies'])[:80]}")
