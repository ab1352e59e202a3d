"""The command line of `fathom fidelity`."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from fathom.benchmarks.args import named_policy, result_file
from fathom.benchmarks.fidelity_grids import GRIDS, NamedGrid
from fathom.benchmarks.variants import Variant, with_body, with_flags
from fathom.demo.corpus import TASKS
from fathom.server.units import token_count

BASELINE = "exact"
STARTS = "draft_model", "server_flags", "dtype"
"""What only a server that is started can be told."""

QUICK_TASKS, QUICK_CONTEXTS, QUICK_SAMPLES = ["single", "list"], [256], 4


@dataclass(frozen=True)
class Cell:
    """A task at a prompt length in tokens."""

    task: str
    context: int


@dataclass(frozen=True)
class Grid:
    """What is asked: `samples` questions in each cell under each policy, the baseline first.

    `name` is that of a named grid, or "".
    """

    cells: list[Cell]
    policies: list[Variant]
    samples: int
    seed: int
    name: str = ""

    @property
    def by_server(self) -> list[list[Variant]]:
        """The policies by how their server is started, the baseline's server first."""
        found: dict[tuple[str, ...], list[Variant]] = {}
        for policy in self.policies:
            found.setdefault(policy.command, []).append(policy)
        return list(found.values())


def _names(text: str) -> list[str]:
    return text.split(",")


def _counts(text: str) -> list[int]:
    return [token_count(part) for part in text.split(",")]


def _add_grid(p: argparse.ArgumentParser) -> None:
    add = p.add_argument_group("what is asked").add_argument
    add(
        "--policy",
        type=partial(named_policy, taken=(BASELINE,)),
        action="append",
        default=[],
        metavar="NAME=JSON",
        help="a policy, called NAME, whose requests carry this `fathom` object; repeatable; `exact` is always "
        "asked, and each other policy is compared with it on the same questions",
    )
    add(
        "--grid",
        choices=list(GRIDS),
        help="a committed table's policies, tasks, lengths, samples and picture; flags given beside it win over it",
    )
    add("--tasks", type=_names, default=list(TASKS), metavar="T,T", help=f"of {', '.join(TASKS)}")
    add("--contexts", type=_counts, default="512,1k,2k,4k", metavar="N,N", help="default: %(default)s")
    add("--samples", type=int, default=40, help="questions per task and length (default: %(default)s)")
    add("--seed", type=int, default=0, help="of the questions (default: %(default)s)")
    add("--system", default="", metavar="TEXT", help="a system message before each question")
    quick = f"{'+'.join(QUICK_TASKS)}, {QUICK_CONTEXTS[0]} tokens, {QUICK_SAMPLES} samples: a check"
    add("--quick", action="store_true", help=quick)


def _add_server(p: argparse.ArgumentParser) -> None:
    add = p.add_argument_group("who answers").add_argument
    add("--model", metavar="PATH", help="a Hugging Face checkpoint with a chat template (default: the demo)")
    add("--draft-model", metavar="PATH", help="its draft model (default: the demo's, with the demo)")
    add("--url", help="a Fathom server that runs already; --model then only names its tokenizer")
    add("--api-key", metavar="KEY", help="that this server asks for")
    add("--server-flags", default="", metavar="FLAGS", help="further flags for the server that is started")
    add("--dtype", help="of that server (default: the checkpoint's)")
    add("--start-limit", type=float, default=300.0, help="seconds its start may take (default: %(default)g)")


def _add_run(p: argparse.ArgumentParser) -> None:
    add = p.add_argument_group("how it runs").add_argument
    add("--in-flight", type=int, default=4, help="requests at once (default: %(default)s)")
    add(
        "--minutes",
        type=float,
        default=18.0,
        help=f"no new requests after these (default: 18; with --grid {NamedGrid.minutes:g})",
    )
    add("--limit", type=float, default=300.0, help="seconds a request may take (default: %(default)g)")
    add("--cache", type=Path, default=Path(".bench"), help="the server's log (default: %(default)s)")
    add("--out", type=result_file, metavar="FILE.json", help="CSV and PNG are written beside it")
    add("--export", type=Path, metavar="FILE.jsonl", help="only write the questions, ask nobody")


def parser() -> argparse.ArgumentParser:
    """Every flag with its default."""
    p = argparse.ArgumentParser(
        prog="fathom fidelity",
        description="Asks a Fathom server generated questions about generated documents, under each policy, "
        "and reports exact match with 95 % intervals, and what the server says it did. A policy that was not "
        "carried out ends the run.",
    )
    _add_grid(p)
    _add_server(p)
    _add_run(p)
    return p


def parse(argv: list[str]) -> argparse.Namespace:
    """The arguments; what a named grid says takes the place of the defaults."""
    p = parser()
    name = p.parse_known_args(argv)[0].grid
    if name:
        known = GRIDS[name]
        p.set_defaults(
            tasks=list(known.tasks),
            contexts=list(known.contexts),
            samples=known.samples,
            minutes=known.minutes,
        )
    return p.parse_args(argv)


def _named(name: str | None) -> list[Variant]:
    if not name:
        return []
    return [with_flags(with_body(p.name, p.body), list(p.flags)) for p in GRIDS[name].points]


def grid(args: argparse.Namespace) -> Grid:
    """What the arguments ask for. ValueError for what cannot be asked."""
    tasks, contexts, samples = args.tasks, args.contexts, args.samples
    if args.quick:
        tasks, contexts, samples = QUICK_TASKS, QUICK_CONTEXTS, QUICK_SAMPLES
    if unknown := [task for task in tasks if task not in TASKS]:
        raise ValueError(f"unknown task {unknown[0]!r}; known: {', '.join(TASKS)}")
    if samples < 1 or args.in_flight < 1 or args.minutes <= 0:
        raise ValueError("--samples and --in-flight must be at least 1, --minutes more than 0")
    if min(contexts) < 128:
        raise ValueError("a document needs --contexts of at least 128 tokens")
    policies = [with_body(BASELINE, {"preset": "exact"}), *_named(args.grid), *args.policy]
    names = [policy.name for policy in policies]
    if len(set(names)) < len(names):
        raise ValueError(f"each policy needs a name of its own, got {', '.join(names)}")
    cells = [Cell(task, context) for task in dict.fromkeys(tasks) for context in sorted(set(contexts))]
    found = Grid(cells, policies, samples, args.seed, args.grid or "")
    if args.url and (given := [name for name in STARTS if getattr(args, name)]):
        flag = f"--{given[0].replace('_', '-')}"
        raise ValueError(f"{flag} is for the server that is started; it goes without --url")
    if args.url and len(found.by_server) > 1:
        raise ValueError(f"--grid {args.grid} needs servers with flags of their own; it goes without --url")
    return found
