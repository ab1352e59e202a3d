"""`fathom fidelity`: what each policy costs in exact answers, asked through the real server."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import shlex
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import httpx

from fathom.benchmarks import fidelity_files, fidelity_report, liveness, report, servers, stats
from fathom.benchmarks.attached import attach
from fathom.benchmarks.client import BenchError, open_client
from fathom.benchmarks.failures import FAILURES, exit_code
from fathom.benchmarks.fidelity_args import BASELINE, Cell, Grid, grid, parse
from fathom.benchmarks.fidelity_checks import check
from fathom.benchmarks.fidelity_client import Item, ask_all
from fathom.benchmarks.fidelity_report import Results, Scored
from fathom.benchmarks.progress import progress
from fathom.benchmarks.usage import Sampler
from fathom.benchmarks.variants import FATHOM, Place, Variant, with_flags
from fathom.demo.corpus import Sample, eval_samples, prompt_ids
from fathom.server.command.checks import demo_model, one_line

SCHEMA = 2
ANSWER_SLACK = 8
"""Tokens that an answer may be longer than the right one before it is cut: it is wrong by then."""

CONTEXT_SLACK = 64
PATIENT = {"OMP_WAIT_POLICY": "PASSIVE"}
"""For the server that is started: waiting threads sleep. On a busy machine spinning ones slow it down manyfold."""

Questions = dict[Cell, list[Item]]


def load_tokenizer(model: str):
    """The checkpoint's own tokenizer. ValueError when it has no chat template."""
    from fathom.runtime.sglang_host.machine import torchvision_ops

    torchvision_ops.declare()
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError) as error:
        raise ValueError(f"no tokenizer at {model}: {one_line(error)}") from None
    if not tokenizer.chat_template:
        raise ValueError(f"the tokenizer of {model} has no chat template")
    return tokenizer


def _with_system(sample: Sample, system: str, tokenizer) -> Sample:
    if not system:
        return sample
    messages = [{"role": "system", "content": system}, *sample.messages]
    used = len(prompt_ids(tokenizer, messages))
    return Sample(sample.task, messages, sample.answer, sample.context_tokens, used, sample.evidence)


def questions(todo: Grid, tokenizer, system: str = "") -> Questions:
    """All questions by cell: the same for every policy."""
    found: Questions = {}
    for cell in progress(todo.cells, desc="writing documents", unit="cell", leave=False):
        samples = eval_samples(cell.task, cell.context, todo.samples, todo.seed, tokenizer)
        lengths = [len(tokenizer(s.answer, add_special_tokens=False)["input_ids"]) for s in samples]
        found[cell] = [
            Item(_with_system(sample, system, tokenizer), length + ANSWER_SLACK)
            for sample, length in zip(samples, lengths, strict=True)
        ]
    return found


def export(asked: Questions, path: Path) -> int:
    """One JSON line per question; `prompt` is the text of a conversation that has one message only."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = []
    for cell, items in asked.items():
        for i, item in enumerate(items):
            sample = {"id": f"{cell.task}-{cell.context}-{i}", **asdict(item.sample)}
            if len(item.sample.messages) == 1:
                sample["prompt"] = item.sample.messages[0]["content"]
            lines.append(json.dumps({**sample, "max_tokens": item.max_tokens}, ensure_ascii=False) + "\n")
    path.write_text("".join(lines))
    return len(lines)


@dataclass
class Asker:
    """Asks one server under some policies, block by block; `sent` counts the requests that were answered.

    No new block begins after `minutes`.
    """

    server: servers.Server
    model: str
    todo: Grid
    policies: list[Variant]
    minutes: float
    asked: Questions
    args: argparse.Namespace
    sent: int = 0

    async def turn(self, client: httpx.AsyncClient, policy: Variant, items: list[Item]) -> list[Scored]:
        """A few questions at once under one policy, each answer checked against what was asked."""
        answers = await ask_all(client, self.model, items, policy.body, self.args.limit)
        self.sent += len(answers)
        scored = []
        for item, answer in zip(items, answers, strict=True):
            if answer.prompt_tokens != item.sample.prompt_tokens:
                raise BenchError(
                    f"the server counts {answer.prompt_tokens} prompt tokens, the tokenizer "
                    f"{item.sample.prompt_tokens}: is --model the checkpoint that is served?"
                )
            counters = check(policy.name, policy.body["fathom"], answer.fathom, answer.output_tokens)
            scored.append(Scored(item, answer, counters))
        return scored

    async def run(self) -> Results:
        """All blocks until time is up."""
        todo, block = self.todo, self.args.in_flight
        policies = {policy.name: policy for policy in self.policies}
        results: Results = {(cell, name): [] for cell in todo.cells for name in policies}
        total = len(todo.cells) * len(policies) * todo.samples
        async with open_client(self.server.url, self.server.headers) as client:
            for policy in self.policies:  # not counted: refusals come before the long wait, kernels get warm
                await self.turn(client, policy, self.asked[todo.cells[0]][:1])
            deadline = time.monotonic() + 60 * self.minutes
            with progress(total=total, unit="answer", desc="asking") as bar:
                for number, cell, start in self._turns(block):
                    for name in stats.order(list(policies), number):
                        if time.monotonic() > deadline:
                            return results
                        bar.set_postfix_str(f"{cell.task} {cell.context} {name}", refresh=False)
                        items = self.asked[cell][start : start + block]
                        results[cell, name] += await self.turn(client, policies[name], items)
                        bar.update(len(items))
        return results

    def _turns(self, block: int) -> Iterator[tuple[int, Cell, int]]:
        for number, start in enumerate(range(0, self.todo.samples, block)):
            for cell in self.todo.cells:
                yield number, cell, start


def complete(results: Results) -> Results:
    """The same questions for all policies of a cell. BenchError when a cell has none."""
    counts: dict[Cell, int] = {}
    for (cell, _), scored in results.items():
        counts[cell] = min(counts.get(cell, len(scored)), len(scored))
    if empty := [f"{cell.task} at {cell.context}" for cell, n in counts.items() if not n]:
        raise BenchError(
            f"time was up before every policy had answers in every cell ({empty[0]}): "
            "take fewer policies, tasks or contexts, or more --minutes"
        )
    return {(cell, name): scored[: counts[cell]] for (cell, name), scored in results.items()}


def check_auto(todo: Grid, results: Results) -> None:
    """BenchError if a policy with the rate "auto" never dropped anything: one prompt may be kept, not all."""
    for policy in todo.policies:
        if policy.body["fathom"].get("prefill_keep_rate") != "auto":
            continue
        counters = [
            s.counters for (_, name), scored in results.items() if name == policy.name for s in scored
        ]
        if all(c["kept_tokens"] == c["prompt_tokens"] for c in counters):
            raise BenchError(f'{policy.name}: prefill_keep_rate "auto" kept every token of every prompt')


def _start(
    running: list[servers.Server], like: Variant, model: str, asked: Questions, args: argparse.Namespace
) -> servers.Server:
    """Start a policy's server with room for the longest conversation, `in_flight` times over."""
    items = [item for items in asked.values() for item in items]
    context = max(item.sample.prompt_tokens + item.max_tokens for item in items) + CONTEXT_SLACK
    path = Path(model).resolve() if Path(model).exists() else Path(model)
    at = Place(path, 0, args.dtype or "auto", context, (args.in_flight + 1) * context, 0, Path())
    draft = args.draft_model or (str(demo_model("draft")) if args.model is None else None)
    drafted = [] if draft is None else ["--draft-model-path", draft]
    variant = with_flags(like, [*drafted, *shlex.split(args.server_flags)])
    variant = replace(variant, env={**PATIENT, **variant.env})
    print("starting the server", file=sys.stderr)
    return servers.start(running, variant, at, args.cache.resolve() / "logs", args.start_limit)


def ask_server(
    server: servers.Server,
    todo: Grid,
    policies: list[Variant],
    asked: Questions,
    args: argparse.Namespace,
) -> tuple[dict, Results]:
    """Ask everything under some policies of the grid, in their share of the time."""
    identity, name = liveness.identify(server), server.model
    minutes = args.minutes * len(policies) / len(todo.policies)
    asker = Asker(server, name, todo, policies, minutes, asked, args)
    sampler = Sampler(server.process.pid) if server.process else None
    start = time.monotonic()
    with sampler or contextlib.nullcontext():
        results = asyncio.run(asker.run())
    seconds = time.monotonic() - start
    liveness.check_served(server, liveness.requests_of(identity) + asker.sent)
    found = {"identity": identity, "served_model": name, "seconds": round(seconds, 2)}
    if sampler:
        found["foreign_cpu"] = sampler.usage.foreign_cpu
    return found, results


def ask_servers(
    todo: Grid, asked: Questions, model: str, args: argparse.Namespace
) -> tuple[list[dict], Results]:
    """Ask one server after the other; what each was, and all answers."""
    described: list[dict] = []
    results: Results = {}
    for policies in todo.by_server:
        with servers.stopping() as running:
            about: dict = {"policies": [policy.name for policy in policies]}
            if args.url:
                server = attach(FATHOM, args.url, args.api_key)
                about["url"] = server.url
            else:
                server = _start(running, policies[0], model, asked, args)
                about["command"] = server.command
                about["startup_seconds"] = round(server.started, 2)
            found, answers = ask_server(server, todo, policies, asked, args)
        described.append(about | found)
        results |= answers
    check_auto(todo, results)
    return described, complete(results)


def run(todo: Grid, asked: Questions, model: str, args: argparse.Namespace, argv: list[str]) -> dict:
    """The whole run. Returns the report; `results` and `rows` hold objects, the rest is JSON."""
    result = {
        "schema": SCHEMA,
        **report.provenance("fidelity", argv),
        "model": model,
        "seed": todo.seed,
        "grid": todo.name,
        "policies": {policy.name: policy.body["fathom"] for policy in todo.policies},
        "samples_asked": todo.samples,
        "in_flight": args.in_flight,
        "system": args.system,
    }
    result["servers"], results = ask_servers(todo, asked, model, args)
    result["seconds"] = round(sum(server["seconds"] for server in result["servers"]), 2)
    shares = [server["foreign_cpu"] for server in result["servers"] if "foreign_cpu" in server]
    if shares:
        result["foreign_cpu"] = max(shares)
    return result | {"results": results, "rows": fidelity_report.rows(results)}


def notes(result: dict, todo: Grid) -> list[str]:
    """Lines under the table: how to read it, and what to mistrust."""
    lines = [
        f"Exact match with 95 % Wilson interval; difference to {BASELINE} on the same questions with 95 % "
        "interval (Bonett–Price) and exact McNemar test. Everything else is a mean per answer; seconds with "
        f"{result['in_flight']} requests in flight. {result['seconds']:.0f} s in all."
    ]
    if min(row.n for row in result["rows"]) < todo.samples:
        lines.append(f"TIME WAS UP: fewer than the {todo.samples} questions asked for in some cells (see n).")
    if (foreign := result.get("foreign_cpu", 0.0)) > report.BUSY:
        lines.append(f"NOT A QUIET MACHINE: others used {foreign:.0%} of it. Do not quote the seconds.")
    return lines


def main(argv: list[str]) -> int:
    """Run it. Returns 0; 1 after one line that says why there is no result; 2 for wrong arguments."""
    args = parse(argv)
    try:
        todo = grid(args)
        model = args.model or str(demo_model())
        asked = questions(todo, load_tokenizer(model), args.system)
        if args.export:
            print(f"Written: {export(asked, args.export)} questions to {args.export}")
            return 0
        result = run(todo, asked, model, args, argv)
    except FAILURES as error:
        return exit_code("fidelity", error)
    except KeyboardInterrupt:
        print("fathom fidelity: interrupted, nothing written", file=sys.stderr)
        return 130
    paths = fidelity_files.write(result, args.out or fidelity_files.default_out(result))
    written = f"Written: {', '.join(map(str, paths))}"
    print("", fidelity_report.table(result["rows"]), *notes(result, todo), written, sep="\n\n")
    line = {"policies": fidelity_report.summary(result["rows"]), "seconds": result["seconds"]}
    print("\n" + json.dumps({**line, "files": [str(path) for path in paths]}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
