"""The papers' efficiency tables with ours beside them: `python -m fathom.benchmarks.paper_tables [options]`.

Random weights of the papers' shapes, no download, the engine without HTTP. The dense baseline is the same engine
with everything off; SGLang's own path is a second engine, started before it. Before a number is printed, the
scheduler's own account of each request has shown that its mechanism ran. Sizes, lengths and tables are options:
`--target tiny --draft tiny-draft --sfi-target tiny-qwen3 --lengths 512` runs on two CPU cores.
"""

import argparse
import json
import platform
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fathom.runtime.sglang_host import torchvision_ops

torchvision_ops.declare()  # spawned processes import this module first

from fathom.benchmarks import paper_figures as papers  # noqa: E402
from fathom.benchmarks import paper_kernels, paper_shapes  # noqa: E402
from fathom.benchmarks.args import result_file  # noqa: E402
from fathom.benchmarks.client import BenchError  # noqa: E402
from fathom.benchmarks.model import FIRST_WORD  # noqa: E402
from fathom.benchmarks.stats import order  # noqa: E402
from fathom.runtime import cost  # noqa: E402
from fathom.runtime.config import Policy  # noqa: E402
from fathom.runtime.plan import choose_span, choose_tsp_layer  # noqa: E402
from fathom.runtime.sfi import options as sfi_options  # noqa: E402

TABLES = ("speed", "fastkv", "specprefill", "combination", "sfi", "kernels")
STOCK, DENSE = "sglang", "dense"
Run = Callable[[Sequence[list[int]], int, Policy | None], list[Any]]


@dataclass(frozen=True)
class Variant:
    """One way to serve a prompt.

    Attributes:
        policy: what its requests ask for; None for stock SGLang's.
        proof: what the scheduler's account must show.
    """

    name: str
    policy: Policy | None
    proof: Callable[[dict[str, Any]], bool]


@dataclass
class Cell:
    """Medians over the rounds of one variant at one prompt length.

    Attributes:
        ttft, tpot: seconds, mean over the batch.
        rate: output tokens per second of the batch, from the first output to the last.
        account: the scheduler's account of a request of the last round.
    """

    ttft: float
    tpot: float
    rate: float
    account: dict[str, Any] = field(default_factory=dict)


def variants(layers: int, span: int, output: int, wanted: Sequence[str]) -> list[Variant]:
    """What the tables on the target compare; the first is the dense baseline.

    Args:
        span: layers per depth page; the paper's cutoffs of 32 layers are scaled and rounded to it.
    """
    found = [Variant(DENSE, Policy(), lambda a: a["kept_tokens"] == a["prompt_tokens"])]
    if "speed" in wanted:
        for cutoff in dict.fromkeys(scaled(k, layers, span) for k in papers.SPEED_CUTOFFS):
            policy = Policy(depth_cutoff=cutoff)
            found.append(Variant(f"speed-{cutoff}", policy, lambda a: a["deep_tokens"] <= 2))
    if "fastkv" in wanted:
        policy = Policy(tsp_rate=0.2, kv_retention_rate=0.1)
        found.append(Variant("fastkv", policy, lambda a: a["propagated_tokens"] < a["prompt_tokens"]))
    if "specprefill" in wanted:
        for rate in (0.1, 0.3, 0.5):
            policy = Policy(prefill_keep_rate=rate, min_prompt_tokens=0)
            found.append(
                Variant(f"specprefill-{rate}", policy, lambda a: a["kept_tokens"] < a["prompt_tokens"])
            )
    if "combination" in wanted:
        policy = Policy(
            prefill_keep_rate=0.3,
            min_prompt_tokens=0,
            depth_cutoff=scaled(24, layers, span),
            tsp_rate=0.5,
            kv_retention_rate=0.2,
            speculative=True,
        )
        proof = lambda a: a["kept_tokens"] < a["prompt_tokens"] and a["draft_tokens"] > 0  # noqa: E731
        found.append(Variant("combination", policy, proof))
    return found


def scaled(layer: int, layers: int, span: int) -> int:
    """A layer of 32 as a span boundary of this model."""
    return max(span, min(layers - span, round(layer * layers / 32 / span) * span))


def prompts_of(length: int, batch: int, vocab: int, seed: str) -> list[list[int]]:
    """Prompts of random words: the same for each variant of a round."""
    draw = random.Random(seed)
    return [[draw.randrange(FIRST_WORD, vocab) for _ in range(length)] for _ in range(batch)]


def measure(
    engine: Any,
    ways: Sequence[Variant],
    length: int,
    args: argparse.Namespace,
    vocab: int,
    cached: bool = False,
) -> dict[str, Cell]:
    """Each way in turn, forwards and backwards, after one round that does not count.

    Args:
        cached: compute the prompts before the clock starts, so that decoding alone is timed.

    Raises:
        BenchError: when an account does not show what its variant is.
    """
    batch, output = (args.sfi_batch, args.sfi_output) if cached else (args.batch, args.output)
    taken: dict[str, list[Cell]] = {way.name: [] for way in ways}
    for turn in range(-1, args.rounds):
        for name in order([way.name for way in ways], turn):
            way = next(way for way in ways if way.name == name)
            prompts = prompts_of(length, batch, vocab, f"{args.seed}/{length}/{turn}")
            engine.forget()
            if cached:
                engine.run(prompts, 1, way.policy)
            timed = engine.run(prompts, output, way.policy)
            check(way, timed)
            if turn >= 0:
                taken[name].append(cell_of(timed))
        print(f"  {length} tokens, round {turn + 1} of {args.rounds}", file=sys.stderr, flush=True)
    return {name: median_of(cells) for name, cells in taken.items()}


def check(way: Variant, timed: Sequence[Any]) -> None:
    """BenchError unless each request was served as its variant says, by the scheduler's own account."""
    for one in timed:
        if way.policy is None:
            if one.account:
                raise BenchError(f"{way.name}: stock SGLang gave an account of a policy")
        elif not one.account or not way.proof(one.account):
            raise BenchError(f"{way.name}: the request was not served so: {one.account}")


def cell_of(timed: Sequence[Any]) -> Cell:
    """One round of one variant."""
    wall = max(one.last for one in timed) - min(one.first for one in timed)
    tokens = sum(one.tokens - 1 for one in timed)
    return Cell(
        statistics.fmean(one.first for one in timed),
        statistics.fmean(one.tpot for one in timed),
        tokens / wall if wall > 0 else 0.0,
        timed[-1].account,
    )


def median_of(cells: Sequence[Cell]) -> Cell:
    """Medians of the times; the account of the last."""

    def middle(name: str) -> float:
        return statistics.median(getattr(cell, name) for cell in cells)

    return Cell(middle("ttft"), middle("tpot"), middle("rate"), cells[-1].account)


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
    cutoffs = [(k, f"speed-{scaled(k, layers, span)}") for k in papers.SPEED_CUTOFFS]
    ms = (("15: TTFT, ms", "ttft", papers.SPEED_TTFT_MS), ("16: TPOT, ms", "tpot", papers.SPEED_TPOT_MS))
    if "speed" in args.tables:
        for title, part, paper in ms:
            rows = [speed_row(length, cells, cutoffs, part, paper) for length, cells in found.items()]
            report.table(f"SPEED, Table {title}", rows)
        report.table("SPEED, Table 17: KV, GiB", [kv_row(n, cells, cutoffs) for n, cells in found.items()])
    pairs = {"fastkv": "FastKV, Figure 4: prefill and decode", "combination": "All but SFI together"}
    for name, title in pairs.items():
        if name in args.tables:
            report.table(title, [gain_row(n, cells, name) for n, cells in found.items()])
    if "specprefill" in args.tables:
        rows = [row for n, cells in found.items() for row in formula_rows(n, cells, shapes)]
        report.table("SpecPrefill: TTFT against appendix E", rows)


def speed_row(length: int, cells: dict[str, Cell], cutoffs: Any, part: str, paper: Any) -> dict[str, Any]:
    """One row of Tables 15 and 16: ours, and how much faster than dense, with the paper's figure behind it."""
    dense, theirs = getattr(cells[DENSE], part), paper_row(paper, length)
    row: dict[str, Any] = {"prompt": length, "dense": dense * 1e3}
    if STOCK in cells:
        row[STOCK] = getattr(cells[STOCK], part) * 1e3
    for column, (k, name) in enumerate(cutoffs, 1):
        ours = getattr(cells[name], part)
        row |= {f"{name} (K = {k} of 32)": ours * 1e3, f"x {k}": dense / ours}
        row[f"paper x {k}"] = theirs[0] / theirs[column] if theirs else None
    return row


def kv_row(length: int, cells: dict[str, Cell], cutoffs: Any) -> dict[str, Any]:
    """One row of Table 17: KV held, by the scheduler's account."""
    theirs = paper_row(papers.SPEED_KV_GIB, length)
    row: dict[str, Any] = {"prompt": length, "dense": cells[DENSE].account["kv_bytes"] / 2**30}
    for column, (k, name) in enumerate(cutoffs, 1):
        account = cells[name].account
        row |= {
            name: account["kv_bytes"] / 2**30,
            f"saved {k}": 1 - account["kv_bytes"] / account["kv_bytes_dense"],
        }
        row[f"paper saved {k}"] = 1 - theirs[column] / theirs[0] if theirs else None
    return row


def gain_row(length: int, cells: dict[str, Cell], name: str) -> dict[str, Any]:
    """Prefill and decode of one variant against dense, and against stock SGLang."""
    ours, dense = cells[name], cells[DENSE]
    theirs = papers.FASTKV_SPEEDUP.get(length // 1024) if name == "fastkv" else None
    row: dict[str, Any] = {"prompt": length, "dense TTFT s": dense.ttft, "TTFT s": ours.ttft}
    row |= {"x TTFT": dense.ttft / ours.ttft, "paper x TTFT": theirs and theirs[0]}
    row |= {"dense TPOT ms": dense.tpot * 1e3, "TPOT ms": ours.tpot * 1e3, "x TPOT": dense.tpot / ours.tpot}
    row["paper x TPOT"] = theirs and theirs[1]
    if STOCK in cells:
        row |= {
            "x TTFT of SGLang": cells[STOCK].ttft / ours.ttft,
            "x TPOT of SGLang": cells[STOCK].tpot / ours.tpot,
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


def sfi_rows(found: dict[int, dict[str, Cell]]) -> list[dict[str, Any]]:
    """Slow-Fast Inference, Figure 4: decode throughput of the batch in tokens per second."""
    rows = []
    for length, cells in found.items():
        theirs = papers.SFI_TOKENS_PER_SECOND.get(length // 1024, (None, None))
        fast, dense = cells["slow_fast"], cells[DENSE]
        steps = {name: fast.account[f"{name}_steps"] for name in ("slow", "fast")}
        row = {
            "prompt": length,
            "full KV": dense.rate,
            "SFI": fast.rate,
            "x": fast.rate / dense.rate,
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
    result.add_argument("--tables", nargs="+", choices=TABLES, default=list(TABLES))
    result.add_argument(
        "--target", default="llama-3.1-8b", help="size of SPEED, FastKV and SpecPrefill's target"
    )
    result.add_argument(
        "--draft", default="llama-1b", help="size of the draft; it takes the target's vocabulary"
    )
    result.add_argument(
        "--sfi-target", default="qwen3-4b", help="size of the model that SFI's Figure 4 decodes with"
    )
    result.add_argument("--lengths", type=int, nargs="+", default=[8192, 16384, 32768, 65536, 131072])
    result.add_argument("--batch", type=int, default=1)
    result.add_argument("--output", type=int, default=256, help="output tokens of the prefill tables")
    result.add_argument("--sfi-batch", type=int, default=16)
    result.add_argument("--sfi-output", type=int, default=2048)
    result.add_argument("--kernel-length", type=int, default=16384, help="KV length of SFI's Table 1")
    result.add_argument("--rounds", type=int, default=3)
    result.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    result.add_argument("--depth-span", type=int, help="layers per depth page (default: as fathom serve)")
    result.add_argument("--no-stock", action="store_true", help="leave SGLang's own path out")
    result.add_argument("--seed", type=int, default=0)
    sfi_options.add_arguments(result)
    result.add_argument("--out", type=result_file, help="write all figures there as JSON")
    result.add_argument(
        "--engine-flags", nargs=argparse.REMAINDER, default=[], help="further flags of sglang serve"
    )
    return result


def engines(
    size: paper_shapes.Size,
    draft: paper_shapes.Size | None,
    span: int,
    folder: Path,
    args: argparse.Namespace,
) -> list[tuple[bool, Callable[[], Any]]]:
    """Whether it is stock, and how it is started, for each engine to measure, the stock one first."""
    from fathom.runtime.sglang_host.offline import OfflineEngine

    output = max(args.output, args.sfi_output)
    position = max(args.lengths) + output + 64
    flags = ["--model-path", str(paper_shapes.write(size, folder / "target", position, args.dtype))]
    flags += ["--load-format", "dummy", "--dtype", args.dtype, "--log-level", "error", *args.engine_flags]
    drafted = list(flags)
    if draft is not None:
        path = paper_shapes.write(draft, folder / "draft", position, args.dtype)
        drafted += ["--speculative-draft-model-path", str(path)]
    tsp, sfi = choose_tsp_layer(size.layers, span, None), sfi_options.from_arguments(args)
    ours = lambda: OfflineEngine(  # noqa: E731
        drafted, depth_span=span, tsp_layer=tsp, propagation_buffer=max(args.lengths) + output, sfi=sfi
    )
    stock = [] if args.no_stock else [(True, lambda: OfflineEngine(flags, stock=True))]
    return [*stock, (False, ours)]


def run_group(
    starts: Any, ways: list[Variant], vocab: int, args: argparse.Namespace, cached: bool = False
) -> dict[int, dict[str, Cell]]:
    """Every engine in turn over all lengths: one at a time is in memory."""
    found: dict[int, dict[str, Cell]] = {length: {} for length in args.lengths}
    for is_stock, start in starts:
        mine = [Variant(STOCK, None, lambda a: True)] if is_stock else ways
        engine = start()
        try:
            for length in args.lengths:
                found[length] |= measure(engine, mine, length, args, vocab, cached)
        finally:
            engine.stop()
    return found


def main(argv: Sequence[str]) -> int:
    """Measure what was asked for and print it; the exit status."""
    args = parser().parse_args(argv)
    report, begin = Report(), time.time()
    target = paper_shapes.sized(args.target)
    draft = paper_shapes.sized(args.draft, target.vocab)
    sfi_target = paper_shapes.sized(args.sfi_target)
    span = choose_span(target.layers, args.depth_span)
    costs = {
        f"{name}_cost": cost.ModelShape.from_config(size.config(1, args.dtype))
        for name, size in (("target", target), ("draft", draft))
    }
    with tempfile.TemporaryDirectory(prefix="fathom-paper-tables-") as folder:
        if set(args.tables) & {"speed", "fastkv", "specprefill", "combination"}:
            ways = variants(target.layers, span, args.output, args.tables)
            starts = engines(target, draft, span, Path(folder) / "main", args)
            found = run_group(starts, ways, target.vocab, args)
            target_tables(report, found, {"target": target, "span": span, **costs}, args)
        if "sfi" in args.tables:
            proof = lambda a: a["fast_steps"] > 0  # noqa: E731
            ways = [
                Variant(DENSE, Policy(), lambda a: a["fast_steps"] == 0),
                Variant("slow_fast", Policy(decode="slow_fast"), proof),
            ]
            sfi_span = choose_span(sfi_target.layers, args.depth_span)
            starts = engines(sfi_target, None, sfi_span, Path(folder) / "sfi", args)
            rows = sfi_rows(run_group(starts, ways, sfi_target.vocab, args, cached=True))
            report.table("Slow-Fast Inference, Figure 4: decode, tokens/s", rows)
    if "kernels" in args.tables:
        paper_kernels.tables(report, target, sfi_target, args)
    if args.out is not None:
        facts = {"machine": machine(), "command": list(argv), "seconds": round(time.time() - begin, 1)}
        args.out.write_text(json.dumps({**facts, "tables": report.tables}, indent=1) + "\n")
    return 0


def machine() -> dict[str, Any]:
    """What it ran on."""
    import torch

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {"gpu": gpu, "cpu": platform.processor() or platform.machine(), "threads": torch.get_num_threads()}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
