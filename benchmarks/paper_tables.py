"""The papers' efficiency tables with ours beside them: `python -m fathom.benchmarks.paper_tables [options]`.

Random weights of the papers' shapes, no download, the engine without HTTP. The dense baseline is the same engine
with everything off; SGLang's own path is a second engine, started before it, on a GPU with FlashInfer. Before a
number is printed, the scheduler's own account of each request has shown that its mechanism ran. Sizes, lengths and
tables are options: `--target tiny --draft tiny-draft --sfi-target tiny-qwen3 --lengths 512` runs on two CPU cores.
"""

import argparse
import json
import math
import platform
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from fathom.runtime.sglang_host import options
from fathom.runtime.sglang_host.machine import torchvision_ops

torchvision_ops.declare()  # spawned processes import this module first

from fathom.benchmarks import paper_figures as papers  # noqa: E402
from fathom.benchmarks import paper_kernels, paper_shapes  # noqa: E402
from fathom.benchmarks.args import result_file  # noqa: E402
from fathom.benchmarks.paper_engine import Cell, Processes, Setup, Variant, Work, ratio  # noqa: E402
from fathom.runtime import cost  # noqa: E402
from fathom.runtime.config import Policy  # noqa: E402
from fathom.runtime.plan import choose_span, choose_tsp_layer  # noqa: E402
from fathom.runtime.sfi import options as sfi_options  # noqa: E402
from fathom.server.units import token_count  # noqa: E402

KEEP_RATES = (0.1, 0.3, 0.5)
DRAFTED = {"specprefill", "combination"}
"""Tables that need a draft."""
ON_TARGET = ("speed", "fastkv", "specprefill", "combination")
TABLES = (*ON_TARGET, "sfi", "kernels")
STOCK, DENSE = "sglang", "dense"
FEWEST_PROFILED = 4
"""Output tokens of a profile: among them those of a slow step and a fast one."""


def fewer(account: dict[str, Any], name: str) -> bool:
    """Whether a count of tokens is below those of the prompt."""
    return account[name] < account["prompt_tokens"]


def whole(account: dict[str, Any]) -> bool:
    """Served dense."""
    return not fewer(account, "kept_tokens") and account["fast_steps"] == 0


def shallow(account: dict[str, Any]) -> bool:
    """Only an anchor and the last token of the prompt above the cutoff."""
    return account["deep_tokens"] <= 2


def chosen_and_drafted(account: dict[str, Any]) -> bool:
    """Not all of the prompt, and drafted tokens verified."""
    return fewer(account, "kept_tokens") and account["draft_tokens"] > 0


def fast(account: dict[str, Any]) -> bool:
    """Some steps read a selection."""
    return account["fast_steps"] > 0


def anything(account: dict[str, Any]) -> bool:
    """Stock SGLang keeps no account."""
    return True


def variants(
    layers: int, span: int, wanted: Sequence[str], cutoffs: Sequence[int], rates: Sequence[float]
) -> list[Variant]:
    """What the tables on the target compare; the first is the dense baseline.

    Args:
        span: layers per depth page; SPEED's cutoffs, of 32 layers, are scaled and rounded to it.
        rates: parts of the prompt that SpecPrefill keeps.
    """
    found = [Variant(DENSE, Policy(), whole)]
    if "speed" in wanted:
        for cutoff in dict.fromkeys(scaled(k, layers, span) for k in cutoffs):
            policy = Policy(depth_cutoff=cutoff)
            found.append(Variant(f"speed-{cutoff}", policy, shallow))
    if "fastkv" in wanted:
        policy = Policy(tsp_rate=0.2, kv_retention_rate=0.1)
        found.append(Variant("fastkv", policy, partial(fewer, name="propagated_tokens")))
    if "specprefill" in wanted:
        for rate in rates:
            policy = Policy(prefill_keep_rate=rate, min_prompt_tokens=0)
            found.append(Variant(f"specprefill-{rate}", policy, partial(fewer, name="kept_tokens")))
    if "combination" in wanted:
        policy = Policy(
            prefill_keep_rate=0.3,
            min_prompt_tokens=0,
            depth_cutoff=scaled(24, layers, span),
            tsp_rate=0.5,
            kv_retention_rate=0.2,
            speculative=True,
        )
        found.append(Variant("combination", policy, chosen_and_drafted))
    return found


def papers_span(layers: int) -> int | None:
    """The largest span on whose boundaries SPEED's cutoffs lie, in proportion; None where that is no span."""
    cutoffs = [k * layers / 32 for k in papers.SPEED_CUTOFFS]
    return math.gcd(layers, *map(int, cutoffs)) if all(map(float.is_integer, cutoffs)) else None


def scaled(layer: int, layers: int, span: int) -> int:
    """A layer of 32 as a span boundary of this model."""
    return max(span, min(layers - span, round(layer * layers / 32 / span) * span))


def limits_of(
    ways: Sequence[Variant], shape: cost.ModelShape, work: Work, **options: Any
) -> dict[tuple[int, str], cost.Prediction]:
    """What FLOPs and bytes allow, by prompt length and name of a variant that drafts nothing.

    Args:
        options: of ``cost.policy_plan``.
    """
    found = {}
    for length in work.lengths:
        for way in ways:
            if way.policy is not None and not way.policy.speculative:
                plan = cost.policy_plan(way.policy, shape.layers, length, **options)
                found[length, way.name] = cost.predict(shape, plan, work.output, work.batch)
    return found


class Report:
    """Prints tables and keeps what they show."""

    def __init__(self) -> None:
        self.tables: dict[str, list[dict[str, Any]]] = {}

    def table(self, title: str, rows: list[dict[str, Any]]) -> None:
        """Print rows of one shape as a Markdown table."""
        self.tables[title] = rows
        if not rows:
            return
        heads = list(dict.fromkeys(name for row in rows for name in row))
        print(f"\n### {title}\n\n| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
        for row in rows:
            print(f"| {' | '.join(shown(row.get(name)) for name in heads)} |")


def shown(value: Any) -> str:
    """A cell of a table."""
    if value is None:
        return "–"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def paper_row(table: Mapping[int, Sequence[float]], length: int) -> Sequence[float] | None:
    """The row of a paper's table for a prompt length, if it has one."""
    return table.get(length // 1024) if length % 1024 == 0 else None


def target_tables(
    report: Report, found: dict[int, dict[str, Cell]], shapes: dict[str, Any], args: argparse.Namespace
) -> None:
    """SPEED's Tables 15 to 17, FastKV's prefill and decode, SpecPrefill against its formula, the combination."""
    layers, span = shapes["target"].layers, shapes["span"]
    cutoffs = [
        (column, k, f"speed-{scaled(k, layers, span)}")
        for column, k in enumerate(papers.SPEED_CUTOFFS, 1)
        if k in args.speed_cutoffs
    ]
    ms = (("15: TTFT, ms", "ttft", papers.SPEED_TTFT_MS), ("16: TPOT, ms", "tpot", papers.SPEED_TPOT_MS))
    if "speed" in args.tables:
        for title, part, paper in ms:
            rows = [
                speed_row(length, cells, cutoffs, part, paper, shapes["limits"])
                for length, cells in found.items()
            ]
            report.table(f"SPEED, Table {title}", rows)
        report.table("SPEED, Table 17: KV, GiB", [kv_row(n, cells, cutoffs) for n, cells in found.items()])
    pairs = {"fastkv": "FastKV, Figure 4: prefill and decode", "combination": "All but SFI together"}
    for name, title in pairs.items():
        if name in args.tables:
            report.table(title, [gain_row(n, cells, name, shapes["limits"]) for n, cells in found.items()])
    if "specprefill" in args.tables:
        rows = [row for n, cells in found.items() for row in formula_rows(n, cells, shapes)]
        report.table("SpecPrefill: TTFT against appendix E", rows)


def speed_row(
    length: int, cells: dict[str, Cell], cutoffs: Any, part: str, paper: Any, limits: Any
) -> dict[str, Any]:
    """One row of Tables 15 and 16: ours, and how much faster than dense, with its limit and the paper's figure."""
    dense, theirs = getattr(cells[DENSE], part), paper_row(paper, length)
    row: dict[str, Any] = {"prompt": length, "dense": dense * 1e3}
    if STOCK in cells:
        row[STOCK] = getattr(cells[STOCK], part) * 1e3
    for column, k, name in cutoffs:
        ours = getattr(cells[name], part)
        row |= {f"{name} (K = {k} of 32)": ours * 1e3, f"x {k}": ratio(dense, ours)}
        row[f"limit x {k}"] = getattr(limits[length, name], part)
        row[f"paper x {k}"] = theirs[0] / theirs[column] if theirs else None
    return row


def kv_row(length: int, cells: dict[str, Cell], cutoffs: Any) -> dict[str, Any]:
    """One row of Table 17: KV held, by the scheduler's account."""
    theirs = paper_row(papers.SPEED_KV_GIB, length)
    row: dict[str, Any] = {"prompt": length, "dense": cells[DENSE].account["kv_bytes"] / 2**30}
    for column, k, name in cutoffs:
        account = cells[name].account
        row |= {
            name: account["kv_bytes"] / 2**30,
            f"saved {k}": 1 - account["kv_bytes"] / account["kv_bytes_dense"],
        }
        row[f"paper saved {k}"] = 1 - theirs[column] / theirs[0] if theirs else None
    return row


def gain_row(length: int, cells: dict[str, Cell], name: str, limits: Any) -> dict[str, Any]:
    """Prefill and decode of one variant against dense, and against stock SGLang."""
    ours, dense = cells[name], cells[DENSE]
    theirs = papers.FASTKV_SPEEDUP.get(length // 1024) if name == "fastkv" else None
    limit = limits.get((length, name))
    row: dict[str, Any] = {"prompt": length, "dense TTFT s": dense.ttft, "TTFT s": ours.ttft}
    row |= {"x TTFT": dense.ttft / ours.ttft, "limit x TTFT": limit and limit.ttft}
    row["paper x TTFT"] = theirs and theirs[0]
    row |= {"dense TPOT ms": dense.tpot * 1e3, "TPOT ms": ours.tpot * 1e3}
    row |= {"x TPOT": ratio(dense.tpot, ours.tpot), "limit x TPOT": limit and limit.tpot}
    row["paper x TPOT"] = theirs and theirs[1]
    if STOCK in cells:
        row |= {
            "x TTFT of SGLang": cells[STOCK].ttft / ours.ttft,
            "x TPOT of SGLang": ratio(cells[STOCK].tpot, ours.tpot),
        }
    return row


def formula_rows(length: int, cells: dict[str, Cell], shapes: dict[str, Any]) -> list[dict[str, Any]]:
    """TTFT gained by SpecPrefill, and the bound that the FLOPs of Table 5 set for what was kept."""
    target, draft = (shapes[name + "_cost"] for name in ("target", "draft"))
    counting = cost.SPECPREFILL_TABLE_5
    whole = cost.prefill_flops(target, cost.make_plan(target.layers, length), counting)
    spent = cost.prefill_flops(draft, cost.make_plan(draft.layers, length), counting)
    rows = []
    for name, cell in cells.items():
        if not name.startswith("specprefill-"):
            continue
        kept = round(cell.account["kept_tokens"])
        rest = cost.prefill_flops(target, cost.make_plan(target.layers, kept), counting)
        bound, gained = whole / (rest + spent), cells[DENSE].ttft / cell.ttft
        row = {
            "prompt": length,
            "keep rate": float(name.split("-")[1]),
            "kept": kept,
            "draft/target FLOPs": spent / whole,
        }
        rows.append({**row, "x TTFT": gained, "x by formula": bound, "share of formula": gained / bound})
    return rows


def sfi_rows(found: dict[int, dict[str, Cell]], limits: Any) -> list[dict[str, Any]]:
    """Slow-Fast Inference, Figure 4: throughput in tokens per second once the whole batch decodes."""
    rows = []
    for length, cells in found.items():
        theirs = papers.SFI_TOKENS_PER_SECOND.get(length // 1024, (None, None))
        fast, dense = cells["slow_fast"], cells[DENSE]
        steps = {name: fast.account[f"{name}_steps"] for name in ("slow", "fast")}
        row = {
            "prompt": length,
            "full KV": dense.rate,
            "SFI": fast.rate,
            "x": ratio(fast.rate, dense.rate),
            "limit x": limits[length, "slow_fast"].tpot,
            **steps,
        }
        if STOCK in cells:
            row["SGLang"] = cells[STOCK].rate
        rows.append(row | {"paper full KV": theirs[0], "paper SFI": theirs[1]})
        rows[-1]["paper x"] = papers.SFI_SPEEDUP.get(length // 1024)
    return rows


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = argparse.ArgumentParser(prog="python -m fathom.benchmarks.paper_tables", description=__doc__)
    add = result.add_argument
    add("--tables", nargs="+", choices=TABLES, default=list(TABLES))
    add(
        "--target",
        default="llama-3.1-8b",
        help="size of SPEED, FastKV and SpecPrefill's target; NAME:N for its first N layers alone",
    )
    add("--draft", default="llama-1b", help="size of the draft; it takes the target's vocabulary")
    add("--sfi-target", default="qwen3-4b", help="size of the model that SFI's Figure 4 decodes with")
    add("--lengths", type=token_count, nargs="+", default=[8192, 16384, 32768, 65536, 131072])
    add("--batch", type=token_count, default=1)
    add("--output", type=token_count, default=256, help="output tokens of the prefill tables")
    add("--sfi-batch", type=token_count, default=16)
    add("--sfi-output", type=token_count, default=2048)
    add(
        "--sfi-documents",
        type=int,
        default=0,
        help="different prompts in SFI's batch (default: all); where not all fit, requests share them",
    )
    add("--kernel-length", type=token_count, default=16384, help="KV length of SFI's Table 1")
    add("--rounds", type=token_count, default=3)
    add(
        "--warm-up",
        type=int,
        default=0,
        help="tokens per prompt of the uncounted round (default: as measured)",
    )
    add(
        "--speed-cutoffs",
        type=int,
        nargs="+",
        choices=papers.SPEED_CUTOFFS,
        default=list(papers.SPEED_CUTOFFS),
        help="SPEED's layers, of 32 (default: %(default)s)",
    )
    add("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    add(
        "--depth-span",
        type=int,
        help="layers per depth page (default: SPEED's cutoffs are boundaries of the target)",
    )
    add(
        "--keep-rates",
        type=float,
        nargs="+",
        default=list(KEEP_RATES),
        metavar="RATE",
        help="parts of the prompt that SpecPrefill keeps, above 0 and below 1 (default: %(default)s)",
    )
    add("--no-stock", action="store_true", help="leave SGLang's own path out")
    add(
        "--gpu-prefill-attention",
        choices=options.PREFILL_ATTENTION,
        default=options.AUTO,
        help="as of fathom serve (default: %(default)s)",
    )
    add(
        "--profile",
        type=int,
        default=0,
        metavar="TOKENS",
        help="after the rounds, profile an answer of so many tokens of each variant, into --out",
    )
    add("--seed", type=int, default=0)
    sfi_options.add_arguments(result)
    add("--out", type=result_file, help="write all figures there as JSON")
    add("--engine-flags", nargs=argparse.REMAINDER, default=[], help="further flags of sglang serve")
    return result


def setups(
    size: paper_shapes.Size,
    draft: paper_shapes.Size | None,
    span: int,
    folder: Path,
    args: argparse.Namespace,
    gpu: bool,
) -> list[Setup]:
    """The engines to measure, the stock one first. They prefill and decode apart, as it is timed."""
    output = max(args.output, args.sfi_output)
    position = max(args.lengths) + output + 64
    flags = ["--model-path", str(paper_shapes.write(size, folder / "target", position, args.dtype))]
    flags += f"--load-format dummy --dtype {args.dtype} --log-level error --prefill-decode-interval 0".split()
    ours = list(flags)
    if draft is not None:
        path = paper_shapes.write(draft, folder / "draft", position, args.dtype)
        ours += ["--speculative-draft-model-path", str(path)]
    engine = options.EngineOptions(
        depth_span=span,
        tsp_layer=choose_tsp_layer(size.layers, span, None),
        propagation_buffer=max(args.lengths) + output,
        sfi=sfi_options.from_arguments(args),
        gpu_prefill=args.gpu_prefill_attention,
    )
    theirs = [*flags, *(("--attention-backend", "flashinfer") if gpu else ()), *args.engine_flags]
    found = [Setup([*ours, *args.engine_flags], False, engine)]
    return found if args.no_stock else [Setup(theirs, True), *found]


def run_group(
    engines: Sequence[Setup],
    ways: Sequence[Variant],
    work: Work,
    started: Processes,
    reports: list[dict[str, Any]],
) -> dict[int, dict[str, Cell]]:
    """Every engine in turn over all lengths: one at a time is in memory. ``reports`` gets what they say."""
    found: dict[int, dict[str, Cell]] = {length: {} for length in work.lengths}
    for setup in engines:
        mine = [Variant(STOCK, None, anything)] if setup.stock else ways
        cells, report = started.run(setup, mine, work)
        reports.append({"flags": list(setup.flags), "stock": setup.stock, "report": report})
        if work.profile:
            reports[-1]["profiles"] = {
                f"{name}, {length}": cell.profile
                for length, own in cells.items()
                for name, cell in own.items()
            }
        for length in work.lengths:
            found[length] |= cells[length]
    return found


def main(argv: Sequence[str]) -> int:
    """Measure what was asked for and print it; the exit status."""
    command = parser()
    args = command.parse_args(argv)
    if not all(0 < rate < 1 for rate in args.keep_rates):
        command.error(f"--keep-rates: above 0 and below 1, not {args.keep_rates}")
    if args.profile and (args.profile < FEWEST_PROFILED or args.out is None):
        command.error(f"--profile: at least {FEWEST_PROFILED} tokens, and --out for what is found")
    if min(args.output, args.sfi_output) < 2 or min(args.warm_up, args.sfi_documents) < 0:
        command.error("--output and --sfi-output: at least 2; --warm-up and --sfi-documents: at least 0")
    report, begin = Report(), time.time()
    try:
        target = paper_shapes.sized(args.target)
        draft = paper_shapes.sized(args.draft, target.vocab)
        sfi_target = paper_shapes.sized(args.sfi_target)
        numbers = sfi_options.from_arguments(args).config
        asked, span, sfi_span = args.depth_span, 0, 0
        if set(args.tables) & set(ON_TARGET):
            span = choose_span(target.layers, papers_span(target.layers) if asked is None else asked)
        if "sfi" in args.tables:
            sfi_span = choose_span(sfi_target.layers, asked)
    except ValueError as error:
        command.error(str(error))
    print(f"Target {args.target}, draft {args.draft}, SFI's target {args.sfi_target}; layers after a colon.")
    costs = {
        f"{name}_cost": cost.ModelShape.from_config(size.config(1, args.dtype))
        for name, size in (("target", target), ("draft", draft))
    }
    cells = "" if args.out is None else str(args.out.with_suffix(".cells.jsonl"))
    if cells:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        Path(cells).unlink(missing_ok=True)
    gpu, reports = machine()["gpu"] is not None, list[dict[str, Any]]()

    def leave(complete: bool = False) -> None:
        """What has been measured so far: a run that is cut short leaves it too.

        Within a group of engines, their cells are what there is.
        """
        if args.out is not None:
            facts = {"machine": machine(), "command": list(argv), "seconds": round(time.time() - begin, 1)}
            facts |= {"complete": complete, "engines": reports, "tables": report.tables}
            args.out.write_text(json.dumps(facts, indent=1) + "\n")

    with tempfile.TemporaryDirectory(prefix="fathom-paper-tables-") as folder, Processes(gpu) as started:
        if span:
            ways = variants(target.layers, span, args.tables, args.speed_cutoffs, args.keep_rates)
            drafts = draft if DRAFTED & set(args.tables) else None
            engines = setups(target, drafts, span, Path(folder) / "main", args, gpu)
            size = args.batch, args.output, args.rounds, target.vocab, args.seed
            work = Work(args.lengths, *size, warm_up=args.warm_up, cells=cells, profile=args.profile)
            layer = choose_tsp_layer(target.layers, span, None)
            limits = limits_of(ways, costs["target_cost"], work, draft=costs["draft_cost"], tsp_layer=layer)
            found = run_group(engines, ways, work, started, reports)
            target_tables(report, found, {"target": target, "span": span, "limits": limits, **costs}, args)
            leave()
        if sfi_span:
            ways = [Variant(DENSE, Policy(), whole), Variant("slow_fast", Policy(decode="slow_fast"), fast)]
            engines = setups(sfi_target, None, sfi_span, Path(folder) / "sfi", args, gpu)
            size = args.sfi_batch, args.sfi_output, args.rounds, sfi_target.vocab, args.seed
            work = Work(args.lengths, *size, True, args.sfi_documents, args.warm_up, cells, args.profile)
            reads = cost.SlowFast(
                1 / (1 + numbers.refresh_budget), numbers.sink, numbers.recent, numbers.selected
            )
            shape = cost.ModelShape.from_config(sfi_target.config(1, args.dtype))
            limits = limits_of(ways, shape, work, slow_fast=reads)
            rows = sfi_rows(run_group(engines, ways, work, started, reports), limits)
            report.table("Slow-Fast Inference, Figure 4: decode, tokens/s", rows)
            leave()
    if "kernels" in args.tables:
        paper_kernels.tables(report, target, sfi_target, args)
    leave(complete=True)
    return 0


def machine() -> dict[str, Any]:
    """What it ran on."""
    import torch

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {"gpu": gpu, "cpu": platform.processor() or platform.machine(), "threads": torch.get_num_threads()}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
