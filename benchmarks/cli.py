"""`fathom bench`: starts the servers, measures them in alternation, prints the table, writes the JSON."""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import shlex
import sys
from dataclasses import replace
from pathlib import Path

from tqdm import tqdm

from fathom.benchmarks import liveness, predict, report, servers, vllm_env
from fathom.benchmarks.args import parser, plan, room
from fathom.benchmarks.client import BenchError
from fathom.benchmarks.measure import Bench, Cell, Settings, Turn, steps
from fathom.benchmarks.model import Shape, draft_of, ensure
from fathom.benchmarks.variants import KNOWN, VLLM, Place, Variant, with_flags


def chosen_variants(args: argparse.Namespace) -> list[Variant]:
    """The variants in table order: stock, peer, Fathom, further policies."""
    names = [*args.variants.split(","), *([args.peer] if args.peer else [])]
    if unknown := [name for name in names if name not in KNOWN]:
        raise ValueError(f"unknown variant {unknown[0]!r}; known: {', '.join(KNOWN)}")
    variants = {name: variant for name, variant in KNOWN.items() if name in names}
    variants |= {variant.name: variant for variant in args.policy}
    for name, flags in args.server_flags:
        if name not in variants:
            raise ValueError(f"--server-flags {name}=…: the servers of this run are {', '.join(variants)}")
        variants[name] = with_flags(variants[name], shlex.split(flags))
    return list(variants.values())


def start_all(
    running: list[servers.Server], variants: list[Variant], at: Place, logs: Path, limit: float
) -> list[dict]:
    """Start the servers, each after the one before is ready. Returns what each is, for the report.

    Engines also pick ports by themselves, and two that start together can pick the same one.
    """
    described = []
    for variant in tqdm(variants, desc="starting", unit="server"):
        here = replace(at, port=servers.free_port())
        command = [here.fill(part) for part in variant.command]
        env = {key: here.fill(value) for key, value in variant.env.items()}
        server = servers.start(variant, command, env, here.port, logs)
        running.append(server)
        server.wait_ready(limit)
        described.append(
            {
                "name": variant.name,
                "command": report.portable(command, Path.cwd()),
                "env": env,
                "body": variant.body,
                "startup_seconds": server.started,
                "identity": liveness.identify(server),
            }
        )
    return described


def measure(
    running: list[servers.Server], shape: Shape, cells: list[Cell], settings: Settings
) -> tuple[list[dict], dict[str, int]]:
    """All cells as JSON, and the requests sent to each server, with a progress bar."""
    names = [server.variant.name for server in running]
    done: list[dict] = []
    with tqdm(total=steps(cells, len(names), settings), unit="turn", desc="measuring") as bar:

        def advance(label: str) -> None:
            bar.set_postfix_str(label, refresh=False)
            bar.update()

        def record(cell: Cell, turns: list[Turn]) -> None:
            expected = predict.predictions(
                [server.variant for server in running], shape, cell, settings, turns
            )
            done.append({**report.cell_json(cell, settings.output, turns, names), "predictions": expected})

        bench = Bench(running, settings, shape.vocab, advance)
        asyncio.run(bench.run(cells, record))
    return done, bench.sent


def run(args: argparse.Namespace, argv: list[str]) -> dict:
    """The whole measurement. Returns the report."""
    variants = chosen_variants(args)
    shape, cells, settings = plan(args)
    predict.check(variants, shape)
    vllm_folder = args.vllm_env.absolute()
    if VLLM.name in {variant.name for variant in variants}:
        vllm_env.make(vllm_folder)
    space = room(cells, settings)
    kv_bytes = space.kv_tokens * shape.kv_bytes_per_token
    model = ensure(shape, args.cache.resolve())
    if any(variant.drafted for variant in variants):
        draft = str(ensure(draft_of(shape), args.cache.resolve()))
        variants = [with_flags(v, ["--draft-model-path", draft]) if v.drafted else v for v in variants]
    vllm = vllm_env.executable(vllm_folder)
    at = Place(model, 0, shape.dtype, space.context, space.kv_tokens, kv_bytes, vllm)
    result = report.header(argv, shape, settings)
    with servers.stopping() as running:
        result["variants"] = start_all(running, variants, at, args.cache.resolve() / "logs", args.start_limit)
        result["cells"], sent = measure(running, shape, cells, settings)
        for server in running:
            liveness.check_served(server, sent[server.variant.name])
    result["foreign_cpu"] = report.foreign_cpu(result["cells"])
    return result


def default_out(result: dict, name: str | None) -> Path:
    """`DATE-NAME.json` in the repository's results folder when run from its root, else in the current one."""
    folder = Path("benchmarks/results") if Path("benchmarks/cli.py").is_file() else Path()
    stamp = datetime.datetime.fromisoformat(result["date"]).strftime("%Y-%m-%d-%H%M")
    return folder / f"{stamp}-{name or '-'.join(variant['name'] for variant in result['variants'])}.json"


def main(argv: list[str]) -> int:
    """Run the bench. Returns 0; 1 after one line that says why there is no result; 2 for wrong arguments."""
    args = parser().parse_args(argv)
    try:
        result = run(args, argv)
    except (BenchError, ValueError) as error:
        print(f"fathom bench: error: {error}", file=sys.stderr)
        return 1 if isinstance(error, BenchError) else 2
    except KeyboardInterrupt:
        print("fathom bench: interrupted, nothing written", file=sys.stderr)
        return 130
    out = args.out or default_out(result, args.name)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    print("", report.table(result), *report.notes(result), f"Written: {out}", sep="\n\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
