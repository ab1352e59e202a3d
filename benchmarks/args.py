"""The command line of `fathom bench`."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Collection
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path

from fathom.benchmarks import vllm_env
from fathom.benchmarks.model import BENCH, TINY, Shape, shape_of
from fathom.benchmarks.prompts import TAIL, Cell, Settings
from fathom.benchmarks.studies import STUDIES
from fathom.benchmarks.variants import KNOWN, Variant, with_body
from fathom.demo.corpus import TASKS
from fathom.server.units import token_count

STARTED = "sglang", "fathom"
"""Variants by default."""
SLACK = 64
"""Tokens of context and KV beside prompt and output, per request."""


def _counts(text: str) -> list[int]:
    """Numbers with commas between them, each once."""
    return list(dict.fromkeys(token_count(part) for part in text.split(",")))


def result_file(text: str) -> Path:
    """A file to write results to: what keeps it from being written is said before anything is measured."""
    path = Path(text)
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a folder; give a file")
    if not folder.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text} cannot be written")
    if path.suffix.lower() in (".csv", ".md", ".png"):
        raise argparse.ArgumentTypeError(
            f"{text} is to hold JSON; {path.suffix} is of what is written beside it"
        )
    return path


def _share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text}: not in [0, 1)")
    return value


def _assignment(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise argparse.ArgumentTypeError(f"{text!r}: expected NAME=VALUE")
    return name, value


def _url(text: str) -> tuple[str, str]:
    """`[NAME=]URL` as name and address."""
    name, equals, url = text.partition("=")
    name, url = (name, url) if equals and name in KNOWN else ("fathom", text)
    if not url.startswith(("http://", "https://")):
        raise argparse.ArgumentTypeError(
            f"{text!r}: expected URL or NAME=URL, NAME of {', '.join(KNOWN)}, URL with http:// or https://"
        )
    return name, url


def _shape(text: str) -> dict[str, int]:
    """`layers=8,heads=8` as fields of a shape."""
    legal = [field.name for field in fields(Shape) if isinstance(field.default, int)]
    found = dict(_assignment(part) for part in text.split(","))
    if unknown := [name for name in found if name not in legal]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is no size of the model; legal: {', '.join(legal)}")
    return {name: token_count(value) for name, value in found.items()}


SAMPLING = ("temperature", "top_p", "top_k", "min_p", "seed")
"""What ``--sampling`` takes: all servers here know it."""


def _sampling(text: str) -> dict[str, float]:
    """`{"temperature": 0.7}` as members of a request."""
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {error}") from None
    numbers = isinstance(found, dict) and all(type(value) in (int, float) for value in found.values())
    if not numbers or not set(found) <= set(SAMPLING):
        raise argparse.ArgumentTypeError(
            f"{text!r}: expected a JSON object of numbers, of {', '.join(SAMPLING)}"
        )
    return found


def named_policy(text: str, taken: Collection[str] = ()) -> Variant:
    """NAME=JSON as a Fathom server's variant whose name is not `taken`. argparse's error says what is wrong."""
    name, value = _assignment(text)
    try:
        policy = json.loads(value)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"{value!r} is not JSON: {error}") from None
    if name in taken or not isinstance(policy, dict):
        reserved = f" (not {', '.join(taken)})" if taken else ""
        raise argparse.ArgumentTypeError(f"{text!r}: expected a new name{reserved} and a JSON object")
    return with_body(name, policy)


def _add_studies(p: argparse.ArgumentParser) -> None:
    """For the help: `studies.expand` and the command take these words out before the others are parsed."""
    add = p.add_argument_group("named measurements").add_argument
    add("--study", choices=list(STUDIES), help="stands for flags of its own; flags beside it go on top")
    add("--all", action="store_true", help="the same as --study all")
    add(
        "--kernels",
        action="store_true",
        help="SFI's attention kernel alone, without a server; its flags: fathom bench --kernels --help",
    )


def _add_compared(p: argparse.ArgumentParser) -> None:
    group = p.add_argument_group("what is compared")
    known = ", ".join(KNOWN)
    group.add_argument(
        "--variants",
        metavar="NAME,NAME",
        help=f"of {known} (default: {','.join(STARTED)}, with --url those that it names)",
    )
    group.add_argument(
        "--peer", choices=["vllm"], help="compare with this too; its environment is made at the first use"
    )
    group.add_argument(
        "--policy",
        type=partial(named_policy, taken=KNOWN),
        action="append",
        default=[],
        metavar="NAME=JSON",
        help="a further Fathom server, called NAME, whose requests carry this `fathom` object; repeatable",
    )
    group.add_argument(
        "--server-flags",
        type=_assignment,
        action="append",
        default=[],
        metavar="NAME=FLAGS",
        help="further flags for the server called NAME; repeatable",
    )
    group.add_argument(
        "--one-server",
        action="store_true",
        help="Fathom variants that differ in their policy only share one server, whose prefix cache is emptied "
        "before each turn; all of them then have the draft model, if one has",
    )
    group.add_argument(
        "--fidelity",
        metavar="FILE",
        help="JSON of `fathom fidelity` for the same policies, shown beside the ratios to dense; `run` asks first "
        "(--grid all)",
    )


def _add_attached(p: argparse.ArgumentParser) -> None:
    add = p.add_argument_group("servers that run already").add_argument
    add(
        "--url",
        type=_url,
        action="append",
        default=[],
        metavar="[NAME=]URL",
        help="a Fathom server that somebody else has started, on any machine: policies alternate on it, nothing "
        "is started or emptied; sglang=URL and vllm=URL for others beside it; repeatable. Prompts are random "
        "tokens, with --model, which then only names the tokenizer, questions",
    )
    add("--api-key", metavar="KEY", help="that these servers ask for")


def _add_model(p: argparse.ArgumentParser) -> None:
    add = p.add_argument_group("on which model").add_argument
    add(
        "--model-shape",
        type=_shape,
        default={},
        metavar="NAME=N,…",
        help="sizes of the generated model that differ from the standard one, such as layers=8,heads=8",
    )
    add(
        "--model",
        metavar="PATH",
        help="a trained checkpoint; it is asked questions about documents, and its answers end by themselves",
    )
    add(
        "--draft",
        metavar="PATH",
        help="its draft, for policies that need one (default: the generated model's)",
    )
    add(
        "--poor-draft",
        metavar="NAME=JSON",
        type=partial(named_policy, taken=KNOWN),
        help="a further variant as with --policy, with a copy of --draft that has random weights",
    )
    add("--task", choices=TASKS, default="list", help="of the questions for --model (default: %(default)s)")


def _add_grid(p: argparse.ArgumentParser) -> None:
    group, own = p.add_argument_group("what is measured"), Settings()
    add = group.add_argument
    add(
        "--prompts",
        type=_counts,
        default="1k,2k,4k,8k",
        metavar="N,N",
        help="in tokens (default: %(default)s)",
    )
    add(
        "--batches",
        type=_counts,
        default="1,4",
        metavar="N,N",
        help="requests at once (default: %(default)s)",
    )
    add("--output", type=int, default=own.output, help="output tokens per request (default: %(default)s)")
    add("--rounds", type=int, default=own.rounds, help="counted turns of each server (default: %(default)s)")
    add("--warmups", type=int, default=own.warmups, help="uncounted turns before (default: %(default)s)")
    add(
        "--warmup-prompt",
        type=token_count,
        default=0,
        metavar="N",
        help="tokens per prompt of the uncounted turns (default: as in the cell)",
    )
    add("--shared-prefix", type=_share, default=0.0, help="share of a prompt already cached (default: 0)")
    add(
        "--documents",
        type=token_count,
        default=own.documents,
        metavar="N",
        help="the prompts of a batch begin, in turns, like one of N documents that each variant reads once, and "
        f"end in {TAIL} tokens of their own: for figures of decoding",
    )
    add(
        "--sampling",
        type=_sampling,
        default={},
        metavar="JSON",
        help=f"parameters of the requests, of {', '.join(SAMPLING)} (default: the most likely tokens)",
    )
    add("--dtype", choices=["bfloat16", "float32"], help=f"default: {BENCH.dtype}, with --model its own")
    add(
        "--seed",
        type=int,
        help=f"of weights and prompts (default: {own.seed}; with --url at random: a server may know an earlier "
        "run's prompts)",
    )
    add("--quick", action="store_true", help="tiny model, 64-token prompts: a check, not a measurement")


def _add_run(p: argparse.ArgumentParser) -> None:
    add = p.add_argument_group("how it runs").add_argument
    own = Settings()
    add("--limit", type=float, default=own.limit, help="seconds a request may take (default: %(default)g)")
    add("--start-limit", type=float, default=300.0, help="seconds a start may take (default: %(default)g)")
    add("--cache", type=Path, default=Path(".bench"), help="generated models and logs (default: %(default)s)")
    add("--vllm-env", type=Path, default=vllm_env.DEFAULT_FOLDER, help="default: %(default)s")
    add("--name", help="in the result's file name (default: the variants)")
    add(
        "--out",
        type=result_file,
        help="JSON to write (default: DATE-NAME.json in benchmarks/results, or here)",
    )


def parser() -> argparse.ArgumentParser:
    """Every flag with its default."""
    p = argparse.ArgumentParser(
        prog="fathom bench",
        description="Measures Fathom, stock SGLang and optionally vLLM on one generated model, over HTTP, in "
        "alternation; prints medians, spread and ratios and writes every sample as JSON.",
        allow_abbrev=False,
    )
    _add_studies(p)
    _add_compared(p)
    _add_attached(p)
    _add_model(p)
    _add_grid(p)
    _add_run(p)
    return p


def _model_shape(args: argparse.Namespace) -> Shape:
    if args.model:
        if args.poor_draft and not args.draft:
            raise ValueError("--poor-draft goes with --draft")
        found = shape_of(Path(args.model))
        return replace(found, dtype=args.dtype or found.dtype)
    if args.draft or args.poor_draft:
        raise ValueError("--draft and --poor-draft go with --model")
    dtype = args.dtype or BENCH.dtype
    return replace(TINY if args.quick else BENCH, dtype=dtype, seed=args.seed, **args.model_shape)


def check_attached(args: argparse.Namespace) -> None:
    """ValueError for what would have to be said to servers that run already when they are started."""
    alone = (
        *("peer", "server_flags", "one_server", "draft", "poor_draft"),
        *("model_shape", "dtype", "quick", "fidelity"),
    )
    given = [f"--{name.replace('_', '-')}" for name in alone if getattr(args, name)]
    if given:
        raise ValueError(f"{given[0]} is for servers that the bench starts; it goes without --url")
    if len({name for name, _ in args.url}) < len(args.url):
        raise ValueError("--url: give each name once")


def plan(args: argparse.Namespace, shape: Shape | None = None) -> tuple[Shape, list[Cell], Settings]:
    """Model, grid and settings that the arguments ask for. ValueError for what cannot be measured.

    Args:
        shape: the model's, where it is not the arguments that say it.
    """
    names = ("output", "rounds", "warmups", "warmup_prompt", "shared_prefix", "documents", "sampling", "seed")
    if args.model and (args.model_shape or args.shared_prefix or args.documents or args.quick):
        raise ValueError("--model goes without --model-shape, --shared-prefix, --documents and --quick")
    task = args.task if args.model else ""
    values = {name: getattr(args, name) for name in (*names, "limit")}
    settings = Settings(**values, task=task)
    shape, prompts, batches = shape or _model_shape(args), args.prompts, args.batches
    if args.quick:
        settings, prompts, batches = replace(settings, output=8, rounds=2), [64], [1, 2]
    if settings.output < 2 or settings.rounds < 1:
        raise ValueError("--output must be at least 2 (TPOT needs a second token), --rounds at least 1")
    if settings.documents and settings.shared_prefix:
        raise ValueError("--documents and --shared-prefix exclude each other")
    if settings.documents and min(prompts) <= 2 * TAIL:
        raise ValueError(f"--documents needs prompts of more than {2 * TAIL} tokens")
    if (longest := max(prompts) + settings.output + SLACK) > shape.max_position:
        raise ValueError(f"{longest} tokens are more than the model's {shape.max_position} positions")
    return shape, [Cell(prompt, batch) for prompt in prompts for batch in batches], settings


@dataclass(frozen=True)
class Room:
    """Tokens that every server is started with: per request, and in its KV pool."""

    context: int
    kv_tokens: int


def room(cells: list[Cell], settings: Settings, variants: int = 1) -> Room:
    """Twice the largest cell: its own tokens and as many cached ones.

    With documents, one copy of each for each of the variants that share a server and one that is being read, and
    beside them what each request has of its own, which may be a copy of half of its prompt.
    """
    each = max(cell.prompt for cell in cells) + settings.output + SLACK
    batch = max(cell.batch for cell in cells)
    if settings.documents:
        own = each // 2 + settings.output + SLACK
        return Room(each, (variants * settings.documents + 1) * each + batch * own)
    return Room(each, 2 * each * batch)


def least_tokens(cells: list[Cell], settings: Settings) -> int:
    """Tokens that a dense server's KV pool has to hold so that no document has to be read again."""
    longest, batch = max(cell.prompt for cell in cells), max(cell.batch for cell in cells)
    return settings.documents * longest + batch * (TAIL + settings.output)
