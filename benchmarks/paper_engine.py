"""The engines behind the papers' tables: each in a process of its own, its variants in turn, its accounts checked.

What SGLang runs on is decided once per process (``runtime/sglang_host/platform.py``), so Fathom's engine and
SGLang's own are never started in the same one.
"""

import json
import multiprocessing
import os
import random
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fathom.benchmarks import trace
from fathom.benchmarks.client import BenchError
from fathom.benchmarks.model import FIRST_WORD
from fathom.benchmarks.stats import order
from fathom.runtime.config import Policy
from fathom.runtime.sglang_host.engine_args import GPU_DEPTH_PAGES
from fathom.runtime.sglang_host.options import EngineOptions


@dataclass(frozen=True)
class Variant:
    """One way to serve a prompt.

    Attributes:
        policy: what its requests ask for; None for stock SGLang's.
        proof: what the scheduler's account must show; a function of a module.
    """

    name: str
    policy: Policy | None
    proof: Callable[[dict[str, Any]], bool]


@dataclass(frozen=True)
class Work:
    """What is asked of each variant.

    Attributes:
        lengths: of prompts, in tokens; batch: prompts at a time; output: tokens of each answer.
        cached: compute the prompts before the clock starts, so that decoding alone is timed; once a round for all
            policies that leave the same KV.
        documents: different prompts in a batch; 0 for all of them. Requests with the same one share its KV.
        warm_up: tokens of the prompts of the round that does not count; 0 for as many as are measured.
        profile: tokens of an answer that is profiled, after the rounds; 0 for none.
        cells: file to which each cell is added, as a line of JSON, when it is measured: a run that is cut short
            leaves them. "" for none.
    """

    lengths: Sequence[int]
    batch: int
    output: int
    rounds: int
    vocab: int
    seed: int
    cached: bool = False
    documents: int = 0
    warm_up: int = 0
    cells: str = ""
    profile: int = 0


@dataclass(frozen=True)
class Setup:
    """An engine.

    Attributes:
        flags: of ``sglang serve``; stock: SGLang's own scheduler on its own attention.
        options: of Fathom's scheduler.
    """

    flags: Sequence[str]
    stock: bool
    options: EngineOptions = field(default_factory=EngineOptions)


@dataclass
class Cell:
    """Medians over the rounds of one variant at one prompt length.

    Attributes:
        ttft: seconds, mean over the batch.
        tpot: seconds per output token once all requests decode: of the tokens after the first output of the
            request that had it last; mean over the requests that have such tokens.
        rate: output tokens per second of the batch, from that first output to the last output.
        account: the scheduler's account of a request of the last round.
        profile: of one more run, as ``trace.summary`` has it, with its account; empty if none was asked for.
    """

    ttft: float
    tpot: float
    rate: float
    account: dict[str, Any] = field(default_factory=dict)
    profile: dict[str, Any] = field(default_factory=dict)


def ratio(figure: float, other: float) -> float | None:
    """Of two that were measured; None where the latter is 0: all tokens were there at once."""
    return figure / other if other else None


class Processes:
    """One process for Fathom's engines and one for SGLang's own, each started when it is first needed."""

    def __init__(self, gpu: bool) -> None:
        """
        Args:
            gpu: whether there is one; Fathom's engines keep their KV in depth pages there.
        """
        self.gpu = gpu
        self._by_stock: dict[bool, ProcessPoolExecutor] = {}

    def __enter__(self) -> "Processes":
        return self

    def __exit__(self, *_: Any) -> None:
        for process in self._by_stock.values():
            process.shutdown()

    def run(
        self, setup: Setup, ways: Sequence[Variant], work: Work
    ) -> tuple[dict[int, dict[str, Cell]], dict[str, Any]]:
        """Start an engine, measure, and end it.

        Returns:
            By length and variant what was measured, and what the engine said of itself at its start.

        Raises:
            BenchError: when an account does not show what its variant is.
        """
        if setup.stock not in self._by_stock:
            # The process reads it when it first looks at SGLang.
            os.environ[GPU_DEPTH_PAGES] = str(int(self.gpu and not setup.stock))
            spawned = multiprocessing.get_context("spawn")
            self._by_stock[setup.stock] = ProcessPoolExecutor(1, spawned)
        return self._by_stock[setup.stock].submit(_measured, setup, ways, work).result()


def _measured(
    setup: Setup, ways: Sequence[Variant], work: Work
) -> tuple[dict[int, dict[str, Cell]], dict[str, Any]]:
    from fathom.runtime.sglang_host.offline import OfflineEngine

    engine = OfflineEngine(setup.flags, setup.stock, setup.options)
    try:
        return {length: measure(engine, ways, length, work) for length in work.lengths}, engine.report
    finally:
        engine.stop()


def prompts_of(length: int, work: Work, turn: int) -> list[list[int]]:
    """Prompts of random words: the same for each variant of a round; that of turn -1 does not count."""
    length = work.warm_up if turn < 0 and work.warm_up else length
    draw = random.Random(f"{work.seed}/{length}/{turn}")
    different = min(work.documents or work.batch, work.batch)
    prompts = [[draw.randrange(FIRST_WORD, work.vocab) for _ in range(length)] for _ in range(different)]
    return [prompts[i % different] for i in range(work.batch)]


def measure(engine: Any, ways: Sequence[Variant], length: int, work: Work) -> dict[str, Cell]:
    """Each way in turn, forwards and backwards, after one round that does not count.

    Raises:
        BenchError: when an account does not show what its variant is, or that its prompt was cached.
    """
    page = engine.report.get("kv_pool", {}).get("page_size", 1)
    taken: dict[str, list[Cell]] = {way.name: [] for way in ways}
    for turn in range(-1, work.rounds):
        prompts = prompts_of(length, work, turn)
        for place, name in enumerate(order([way.name for way in ways], turn)):
            way = next(way for way in ways if way.name == name)
            if not work.cached or place == 0:
                engine.forget()
            if work.cached:
                engine.run(prompts, 1, way.policy)
            timed = engine.run(prompts, work.output, way.policy)
            check(way, timed)
            if work.cached:
                check_cached(way, timed, page)
            if turn >= 0:
                taken[name].append(cell_of(timed))
                note(work.cells, {"prompt": length, "variant": name, "round": turn + 1}, taken[name][-1])
        print(f"  {length} tokens, round {turn + 1} of {work.rounds}", file=sys.stderr, flush=True)
    found = {name: median_of(cells) for name, cells in taken.items()}
    if work.profile:
        # Where prompts are cached, those of the last round are.
        prompts = prompts_of(length, work, work.rounds - work.cached)
        for way in ways:
            found[way.name].profile = profile(engine, way, prompts, work, page)
    return found


def profile(engine: Any, way: Variant, prompts: Sequence[list[int]], work: Work, page: int) -> dict[str, Any]:
    """What the profiler sees of one more run of a variant; where prompts are cached, of decoding alone.

    What was measured before is not lost where there is no trace: ``error`` says why.

    Raises:
        BenchError: as :func:`measure`.
    """
    if work.cached:
        engine.run(prompts, 1, way.policy)
    else:
        engine.forget()
    with tempfile.TemporaryDirectory(prefix="fathom-profile-") as folder:
        try:
            with engine.profiled(Path(folder)):
                timed = engine.run(prompts, work.profile, way.policy)
            found = trace.summary(trace.read(Path(folder)))
        except (OSError, RuntimeError, ValueError) as error:
            print(f"  {way.name}: no profile: {error}", file=sys.stderr, flush=True)
            return {"error": str(error)}
    check(way, timed)
    if work.cached:
        check_cached(way, timed, page)
    return found | {"account": timed[-1].account}


def note(file: str, where: dict[str, Any], cell: Cell) -> None:
    """Add a line to a file of cells, if there is to be one."""
    if file:
        with open(file, "a") as lines:
            lines.write(json.dumps(where | asdict(cell)) + "\n")


def check(way: Variant, timed: Sequence[Any]) -> None:
    """BenchError unless each request was served as its variant says, by the scheduler's own account."""
    for one in timed:
        if way.policy is None:
            if one.account:
                raise BenchError(f"{way.name}: stock SGLang gave an account of a policy")
        elif not one.account or not way.proof(one.account):
            raise BenchError(f"{way.name}: the request was not served so: {one.account}")


def check_cached(way: Variant, timed: Sequence[Any], page: int) -> None:
    """BenchError where an account shows that more than the last page of a prompt was computed while it was timed.

    Stock SGLang keeps no account.

    Args:
        page: tokens.
    """
    for account in (one.account for one in timed if one.account):
        found, prompt = account["cached_tokens"], account["prompt_tokens"]
        if found < prompt - page:
            raise BenchError(f"{way.name}: {found} of {prompt} tokens of a timed prompt were cached")


def cell_of(timed: Sequence[Any]) -> Cell:
    """One round of one variant.

    Where no request has tokens after the last one's first output, none decoded beside it: TPOT and rate are then
    those of all tokens after each request's own first one, as they are for a batch of one.
    """
    begin = max(one.first for one in timed)
    later = [one.tokens_after(begin) for one in timed]
    if len(timed) > 1 and any(later):
        tpots = [(one.last - begin) / tokens for one, tokens in zip(timed, later, strict=True) if tokens]
    else:
        begin = min(one.first for one in timed)
        later = [one.tokens - 1 for one in timed]
        tpots = [one.tpot for one in timed]
    wall = max(one.last for one in timed) - begin
    return Cell(
        statistics.fmean(one.first for one in timed),
        statistics.fmean(tpots),
        sum(later) / wall if wall > 0 else 0.0,
        timed[-1].account,
    )


def median_of(cells: Sequence[Cell]) -> Cell:
    """Medians of the times; the account of the last."""

    def middle(name: str) -> float:
        return statistics.median(getattr(cell, name) for cell in cells)

    return Cell(middle("ttft"), middle("tpot"), middle("rate"), cells[-1].account)
