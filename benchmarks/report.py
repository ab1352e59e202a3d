"""What a run leaves behind: JSON with every raw sample, and a table in Markdown."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
from dataclasses import asdict
from itertools import combinations
from pathlib import Path

import psutil

from fathom.benchmarks import stats
from fathom.benchmarks.measure import METRICS, Turn
from fathom.benchmarks.model import Shape
from fathom.benchmarks.prompts import Cell, Settings

SCHEMA = 1
BUSY = 0.05
"""Share of the machine used by others from which a run says so."""

_UNITS = {"ttft": (1.0, "s", 2), "tpot": (1e3, "ms", 1), "e2e": (1.0, "s", 2)}


def cpu_model(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The CPU as Linux gives it, with family and model: cloud machines of several generations share a name."""
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    fields = [line.partition(":") for line in reversed(lines)]
    first = {key.strip(): value.strip() for key, _, value in fields}
    name = first.get("model name") or platform.processor()
    numbers = [f"{key.removeprefix('cpu ')} {first[key]}" for key in ("cpu family", "model") if key in first]
    return ", ".join([name, *numbers])


def hardware() -> dict:
    """The machine; memory in bytes."""
    return {
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory": psutil.virtual_memory().total,
        "system": platform.platform(),
        "load_average": list(psutil.getloadavg()),
    }


def versions() -> dict:
    """Installed versions of what was measured, None where absent."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name, distribution in {
        "fathom": "fathom-serve",
        **{n: n for n in ("sglang", "torch", "transformers")},
    }.items():
        try:
            found[name] = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def git_state() -> dict | None:
    """Commit of the source this runs from and whether files differ from it; None outside a checkout."""
    at = Path(__file__).resolve().parent

    def git(*args: str) -> str:
        return subprocess.run(
            ["git", "-C", str(at), *args], check=True, capture_output=True, text=True
        ).stdout.strip()

    try:
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain", "--", ":/"))}
    except (OSError, subprocess.CalledProcessError):
        return None


def command_line(name: str, argv: list[str]) -> str:
    """A command as it was given, without the key that servers ask for."""
    words = [
        "…" if before == "--api-key" else "--api-key=…" if word.startswith("--api-key=") else word
        for before, word in zip(["", *argv], argv, strict=False)
    ]
    return shlex.join(["fathom", name, *words])


def provenance(name: str, argv: list[str]) -> dict:
    """When, by which command and on what a result was made."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": command_line(name, argv),
        "hardware": hardware(),
        "versions": versions(),
        "git": git_state(),
    }


def header(argv: list[str], shape: Shape, settings: Settings) -> dict:
    """Everything that is known before the first measurement."""
    return {
        "schema": SCHEMA,
        **provenance("bench", argv),
        "model": {**asdict(shape), "key": shape.key, "kv_bytes_per_token": shape.kv_bytes_per_token},
        "settings": asdict(settings),
    }


def _values(turns: list[Turn], variant: str, metric: str) -> list[float]:
    return [turn.metrics[metric] for turn in sorted(turns, key=lambda t: t.round) if turn.variant == variant]


def _same_text(turns: list[Turn], first: str, second: str) -> dict[str, int]:
    texts = {(turn.variant, turn.round): [reply.text for reply in turn.replies] for turn in turns}
    pairs = [
        pair
        for (name, round_index), mine in texts.items()
        if name == first
        for pair in zip(mine, texts[second, round_index], strict=True)
    ]
    return {"requests": len(pairs), "equal": sum(a == b for a, b in pairs)}


def cell_json(cell: Cell, output: int, turns: list[Turn], names: list[str], bases: set[str]) -> dict:
    """One cell: summaries per variant, ratios and equal texts per pair of a base and another, and the raw turns."""
    summary = {
        name: {
            **{metric: stats.summary(_values(turns, name, metric)) for metric in METRICS},
            **{
                key: max(getattr(turn.usage, key) for turn in turns if turn.variant == name)
                for key in ("rss_peak", "pss_peak")
            },
        }
        for name in names
    }
    ratios, same_text = {}, {}
    for first, second in combinations(names, 2):
        if first not in bases:
            continue
        pair = f"{first}/{second}"
        same_text[pair] = _same_text(turns, first, second)
        ratios[pair] = {
            metric: stats.summary(
                stats.pair_ratios(_values(turns, first, metric), _values(turns, second, metric))
            )
            for metric in METRICS
        }
    return {
        "prompt_tokens": cell.prompt,
        "batch": cell.batch,
        "output_tokens": output,
        "summary": summary,
        "ratios": ratios,
        "same_text": same_text,
        "turns": [turn.to_json() for turn in turns],
    }


def foreign_cpu(cells: list[dict]) -> dict[str, float]:
    """How much of the machine others used during the turns, as a share of all cores."""
    return stats.summary([turn["foreign_cpu"] for cell in cells for turn in cell["turns"]])


def _spread(values: dict[str, float], scale: float, digits: int) -> str:
    median, low, high = (f"{values[key] * scale:.{digits}f}" for key in ("median", "min", "max"))
    return f"{median} [{low}–{high}]"


def _row(items: list[str]) -> str:
    return "| " + " | ".join(items) + " |"


def _table(head: list[str], rows: list[list[str]]) -> list[str]:
    align = ["--:" if name in ("prompt", "batch") else ":--" for name in head]
    return [_row(head), _row(align), *map(_row, rows)]


def table(report: dict) -> str:
    """Times and ratios as Markdown: median [min–max] over the rounds."""
    times, ratios = [], []
    for cell in report["cells"]:
        at = [str(cell["prompt_tokens"]), str(cell["batch"])]
        for name, values in cell["summary"].items():
            shown = [_spread(values[m], scale, digits) for m, (scale, _, digits) in _UNITS.items()]
            memory = f"{values['pss_peak'] / 2**30:.2f}" if values["pss_peak"] else "–"
            times.append([*at, name, *shown, memory])
        for pair, values in cell["ratios"].items():
            same = cell["same_text"][pair]
            shown = [_spread(values[m], 1.0, 2) for m in METRICS]
            ratios.append([*at, pair, *shown, f"{same['equal']}/{same['requests']}"])
    units = [f"{m.upper()} ({unit})" for m, (_, unit, _) in _UNITS.items()]
    lines = _table(["prompt", "batch", "server", *units, "memory (GiB)"], times)
    if ratios:
        lines += [
            "",
            *_table(["prompt", "batch", "ratio", *(m.upper() for m in METRICS), "same text"], ratios),
        ]
    return "\n".join([*lines, *_predictions(report)])


def _number(value: float | None, form: str = ".2f") -> str:
    return "–" if value is None else format(value, form)


def _reached(measured: dict[str, float], expected: float | None) -> str:
    """The median as a share of what was predicted."""
    return "–" if expected is None else f"{measured['median'] / expected:.0%}"


_SAVED = (
    *("prompt", "batch", "ratio", "TTFT", "by FLOPs", "reached", "Appendix E", "reached"),
    *("TPOT", "by bytes", "reached", "by KV bytes", "KV held", "by plan"),
    *("scoring", "slow steps", "accepted", "fast (ms)", "slow (ms)"),
)


def _predictions(report: dict) -> list[str]:
    """Lines of the third table: what a policy saves against dense Fathom, measured and predicted."""
    rows = []
    for cell in report["cells"]:
        for pair, expected in cell.get("predictions", {}).items():
            ttft, tpot = (cell["ratios"][pair][m] for m in ("ttft", "tpot"))
            shown = [_spread(ttft, 1.0, 2)]
            for name in ("ttft", "appendix_e"):
                shown += [_number(expected[name]), _reached(ttft, expected[name])]
            shown += [_spread(tpot, 1.0, 2), _number(expected["tpot"]), _reached(tpot, expected["tpot"])]
            shown += [_number(expected[name]) for name in ("tpot_kv", "kv_reported", "kv")]
            shown += [_number(expected[name], ".1%") for name in ("scoring", "slow_share", "accepted")]
            steps = [expected["fast_seconds"], expected["slow_seconds"]]
            shown += [_number(1e3 * value if value else None, ".1f") for value in steps]
            rows.append([str(cell["prompt_tokens"]), str(cell["batch"]), pair, *shown])
    return ["", *_table(list(_SAVED), rows)] if rows else []


def _growth(cells: list[dict]) -> list[str]:
    """How the time of a fast step grows with the prompt."""
    found: dict[tuple[str, int], list[tuple[int, float]]] = {}
    for cell in cells:
        for pair, values in cell.get("predictions", {}).items():
            if took := values["fast_seconds"]:
                found.setdefault((pair, cell["batch"]), []).append((cell["prompt_tokens"], took))
    return [
        f"Fast steps of {pair.split('/')[1]}, batch {batch}: "
        + ", ".join(f"{1e3 * took:.1f} ms at {prompt} (x {took / times[0][1]:.2f})" for prompt, took in times)
        for (pair, batch), times in found.items()
        if len(times) > 1
    ]


def _places(report: dict) -> str:
    """Where servers ran that the bench has not started, and that it asked them from here."""
    devices: dict[str, str] = {}
    for variant in report["variants"]:
        if url := variant.get("url"):
            engines = variant["identity"].get("engine") or [{}]
            devices[url] = ", ".join(dict.fromkeys(engine.get("device") or "?" for engine in engines))
    return "".join(f"{url} on {device}; " for url, device in devices.items()) + (
        "asked from " if devices else ""
    )


def notes(report: dict) -> list[str]:
    """Lines under the table: what it was measured on, and a warning if the machine was not quiet."""
    machine, foreign = report["hardware"], report["foreign_cpu"]
    there, asked = _places(report), report["settings"].get("sampling")
    sampled = f", sampled with {json.dumps(asked)}" if asked else ""
    lines = [
        f"{there}{machine['cpu']}, {machine['cores']} cores, {machine['memory'] / 2**30:.0f} GiB; "
        f"{report['model']['dtype']}; {report['settings']['output']} output tokens{sampled}; "
        f"median [min–max] of {report['settings']['rounds']} rounds. Ratio a/b above 1: b is faster."
    ]
    lines += _growth(report["cells"])
    for prompt, shares in (report.get("draft_shares") or {}).items():
        lines.append(
            f"FLOPs of the target's prefill at {prompt} tokens: {shares['computed']:.1f} times the draft's; "
            f"{shares['table_5']:.1f} times as SpecPrefill's Table 5 counts (LM head on every token)."
        )
    if foreign["median"] > BUSY:
        lines.append(
            f"NOT A QUIET MACHINE: other processes used {foreign['median']:.0%} of it (median; at most "
            f"{foreign['max']:.0%}). Do not quote these figures."
        )
    return lines


def default_out(result: dict, name: str) -> Path:
    """`DATE-NAME.json` in the repository's results folder when run from its root, else in the current one."""
    folder = Path("benchmarks/results") if Path("benchmarks/report.py").is_file() else Path()
    stamp = datetime.datetime.fromisoformat(result["date"]).strftime("%Y-%m-%d-%H%M")
    return folder / f"{stamp}-{name}.json"


def write(result: dict, out: Path) -> None:
    """The result as JSON."""
    out.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(result, indent=1, ensure_ascii=False) + "\n"
    out.write_text(portable(text, Path.cwd()))


def portable(text: str, folder: Path) -> str:
    """The text with paths below ``folder`` relative to it: a kept result names no machine's folders."""
    return text.replace(f"{folder}/", "")
