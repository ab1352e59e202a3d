"""`fathom bench`: starts the servers, measures them in alternation, prints the table, writes the JSON."""

from __future__ import annotations

import argparse
import asyncio
import random
import re
import shlex
import sys
from dataclasses import replace
from pathlib import Path

from fathom.benchmarks import (
    attached,
    combined,
    liveness,
    predict,
    report,
    servers,
    sfi_kernels,
    studies,
    vllm_env,
)
from fathom.benchmarks.args import STARTED, check_attached, least_tokens, parser, plan, room
from fathom.benchmarks.failures import FAILURES, exit_code
from fathom.benchmarks.measure import Bench, Turn, steps
from fathom.benchmarks.model import Shape, draft_of, ensure, scrambled
from fathom.benchmarks.progress import progress
from fathom.benchmarks.prompts import Cell, Prompts, Settings, question_prompts, random_prompts
from fathom.benchmarks.variants import KNOWN, VLLM, Place, Variant, asked_exact, with_flags


def chosen_variants(args: argparse.Namespace) -> list[Variant]:
    """The variants in table order: stock, peer, Fathom, further policies."""
    urls = dict(args.url)
    asked = args.variants.split(",") if args.variants else [*(urls or STARTED)]
    names = [*asked, *([args.peer] if args.peer else [])]
    if unknown := [name for name in names if name not in KNOWN]:
        raise ValueError(f"unknown variant {unknown[0]!r}; known: {', '.join(KNOWN)}")
    needed = [*names, *(variant.engine for variant in args.policy)]
    if urls and (unnamed := [name for name in needed if name not in urls]):
        raise ValueError(f"--url names no {unnamed[0]} server; it names {', '.join(urls)}")
    variants = {name: variant for name, variant in KNOWN.items() if name in names}
    for variant in [*args.policy, *([args.poor_draft] if args.poor_draft else [])]:
        if variant.name in variants:
            raise ValueError(f"two variants are called {variant.name!r}; give each policy a name of its own")
        variants[variant.name] = variant
    for name, flags in args.server_flags:
        if name not in variants:
            raise ValueError(f"--server-flags {name}=…: the servers of this run are {', '.join(variants)}")
        variants[name] = with_flags(variants[name], shlex.split(flags))
    return list(variants.values())


def with_drafts(variants: list[Variant], shape: Shape, args: argparse.Namespace) -> list[Variant]:
    """The variants, those that need a draft with one; on one server all of them have it."""
    cache, found = args.cache.resolve(), []
    if args.poor_draft:
        flags = ["--draft-model-path", str(scrambled(Path(args.draft or ""), cache))]
        variants = [with_flags(v, flags) if v.name == args.poor_draft.name else v for v in variants]
    if not any(variant.drafted for variant in variants):
        return variants
    draft = str(Path(args.draft).resolve() if args.draft else ensure(draft_of(shape), cache))
    for variant in variants:
        own = variant.engine == "fathom" and variant.option("--draft-model-path") is None
        needs = variant.drafted or (args.one_server and own)
        found.append(with_flags(variant, ["--draft-model-path", draft]) if needs else variant)
    return found


def start_all(
    running: list[servers.Server], variants: list[Variant], at: Place, logs: Path, limit: float, share: bool
) -> list[dict]:
    """Start the servers, each after the one before is ready. Returns what each is, for the report.

    Engines also pick ports by themselves, and two that start together can pick the same one. With `share`, variants
    that are started in the same way have one process.
    """
    described = []
    started: dict[tuple[str, ...], servers.Server] = {}
    for variant in progress(variants, desc="starting", unit="server"):
        server = started.get(variant.command) if share else None
        if server is None:
            server = started[variant.command] = servers.start(running, variant, at, logs, limit)
        else:
            server = replace(server, variant=variant)
            running.append(server)
        described.append(
            {
                "name": variant.name,
                "command": server.command,
                "env": server.env,
                "body": variant.body,
                "startup_seconds": server.started,
                "identity": liveness.identify(server),
            }
        )
    return described


def attach_all(variants: list[Variant], args: argparse.Namespace) -> list[servers.Server]:
    """The servers that `--url` names, one for each variant."""
    urls = dict(args.url)
    return [attached.attach(asked_exact(variant), urls[variant.engine], args.api_key) for variant in variants]


def measure(
    running: list[servers.Server],
    shape: Shape,
    cells: list[Cell],
    settings: Settings,
    prompts: Prompts,
    predicted: bool = True,
) -> tuple[list[dict], dict[str, int]]:
    """All cells as JSON, and the requests sent to each process by its address, with a progress bar.

    Args:
        predicted: whether the cost model knows such a model.
    """
    names = [server.variant.name for server in running]
    bases = {server.variant.name for server in running if server.variant.dense}
    done: list[dict] = []
    with progress(total=steps(cells, len(names), settings), unit="turn", desc="measuring") as bar:

        def advance(label: str) -> None:
            bar.set_postfix_str(label, refresh=False)
            bar.update()

        def record(cell: Cell, turns: list[Turn]) -> None:
            known = [server.variant for server in running] if predicted else []
            expected = predict.predictions(known, shape, cell, settings, turns)
            found = report.cell_json(cell, settings.output, turns, names, bases)
            done.append({**found, "predictions": expected})

        bench = Bench(running, settings, prompts, advance)
        asyncio.run(bench.run(cells, record))
    sent = dict.fromkeys((server.url for server in running), 0)
    for server in running:
        sent[server.url] += bench.sent[server.variant.name]
    return done, sent


def prompt_source(args: argparse.Namespace, shape: Shape, settings: Settings) -> Prompts:
    """Questions for a trained model, random words for a generated one."""
    if args.model:
        return question_prompts(args.model, settings)
    return lambda cell, round_index: random_prompts(cell, settings, shape.vocab, round_index)


def run_attached(args: argparse.Namespace, argv: list[str]) -> dict:
    """The whole measurement on servers that run already. Returns the report."""
    check_attached(args)
    running = attach_all(chosen_variants(args), args)
    asked = {server.url: server for server in running}
    shape, experts = attached.shape_at(running)
    shape, cells, settings = plan(args, shape)
    predict.check([server.variant for server in running], shape)
    result = report.header(argv, shape, settings)
    result["draft_shares"] = {} if experts else predict.shares_of([s.variant for s in running], shape, cells)
    identities = {url: liveness.identify(server) for url, server in asked.items()}
    result["variants"] = [
        {
            "name": server.variant.name,
            "url": server.url,
            "served_model": server.model,
            "body": server.variant.body,
            "identity": identities[server.url],
        }
        for server in running
    ]
    prompts = prompt_source(args, shape, settings)
    result["cells"], sent = measure(running, shape, cells, settings, prompts, not experts)
    for url, server in asked.items():
        ours = server.variant.engine == "fathom"
        liveness.check_served(server, sent[url] + (liveness.requests_of(identities[url]) if ours else 0))
    result["foreign_cpu"] = report.foreign_cpu(result["cells"])
    return result


def run(args: argparse.Namespace, argv: list[str]) -> dict:
    """The whole measurement. Returns the report."""
    if args.seed is None:
        args.seed = random.SystemRandom().randrange(1 << 31) if args.url else Settings().seed
    if args.url:
        return run_attached(args, argv)
    variants = chosen_variants(args)
    shape, cells, settings = plan(args)
    predict.check(variants, shape)
    vllm_folder = args.vllm_env.absolute()
    if VLLM.name in {variant.name for variant in variants}:
        vllm_env.make(vllm_folder)
    variants = with_drafts(variants, shape, args)
    space = room(cells, settings, len(variants) if args.one_server else 1)
    kv_bytes = space.kv_tokens * shape.kv_bytes_per_token
    model = Path(args.model).resolve() if args.model else ensure(shape, args.cache.resolve())
    vllm = vllm_env.executable(vllm_folder)
    at = Place(model, 0, shape.dtype, space.context, space.kv_tokens, kv_bytes, vllm)
    result = report.header(argv, shape, settings)
    result["draft_shares"] = predict.shares_of(variants, shape, cells)
    logs, prompts = args.cache.resolve() / "logs", prompt_source(args, shape, settings)
    with servers.stopping() as running:
        result["variants"] = start_all(running, variants, at, logs, args.start_limit, args.one_server)
        if settings.documents:
            for server, described in zip(running, result["variants"], strict=True):
                liveness.check_room(server, described["identity"], least_tokens(cells, settings))
        result["cells"], sent = measure(running, shape, cells, settings, prompts)
        for server in running:
            liveness.check_served(server, sent[server.url])
    result["foreign_cpu"] = report.foreign_cpu(result["cells"])
    return result


def default_out(result: dict, name: str | None) -> Path:
    """Where the result goes; without a name of its own it has those of the variants."""
    name = name or "-".join(variant["name"] for variant in result["variants"])
    return report.default_out(result, re.sub(r"[^A-Za-z0-9_.+-]+", "_", name)[:80])


def write(result: dict, out: Path) -> list[Path]:
    """The JSON at `out`; with fidelity in it also the comparison of all policies as Markdown, and its picture."""
    report.write(result, out)
    paths = [out]
    if "fidelity" in result:
        rows = combined.rows(result)
        paths.append(out.with_suffix(".md"))
        paths[-1].write_text(combined.page(result, rows) + "\n")
        paths += combined.plot(rows, out.with_suffix(".png"))
    return paths


def known_fidelity(args: argparse.Namespace) -> dict | None:
    """What `--fidelity` names, for a run that can be compared with it."""
    if not args.fidelity:
        return None
    if args.url:
        check_attached(args)
    if not any(variant.engine == "fathom" and variant.dense for variant in chosen_variants(args)):
        raise ValueError("--fidelity compares with dense Fathom; add fathom to --variants")
    return combined.fidelity_of(args.fidelity, args.cache)


def main(argv: list[str]) -> int:
    """Run the bench. Returns 0; 1 after one line that says why there is no result; 2 for wrong arguments."""
    try:
        if "--kernels" in argv:
            return sfi_kernels.main([word for word in argv if word != "--kernels"])
        args = parser().parse_args(studies.expand(argv))
        fidelity = known_fidelity(args)
        result = run(args, argv)
    except FAILURES as error:
        return exit_code("bench", error)
    except KeyboardInterrupt:
        print("fathom bench: interrupted, nothing written", file=sys.stderr)
        return 130
    if fidelity:
        result["fidelity"] = fidelity
    shown = ["", report.table(result), *report.notes(result)]
    if fidelity:
        shown.append(combined.page(result, combined.rows(result)))
    print(*shown, sep="\n\n", flush=True)
    try:
        paths = write(result, args.out or default_out(result, args.name))
    except OSError as error:
        print(f"fathom bench: error: the results could not be written: {error}", file=sys.stderr)
        return 1
    print(f"\nWritten: {', '.join(map(str, paths))}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
