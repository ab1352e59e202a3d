"""`fathom soak`: mixed policies at saturation, clients that leave, prompts far too long; then the accounts."""

from __future__ import annotations

import argparse
import asyncio
import random
import re
import shlex
import statistics
import sys
import time
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import psutil

from fathom.benchmarks import liveness, report, servers, stats, usage
from fathom.benchmarks.args import named_policy, result_file
from fathom.benchmarks.client import BenchError, open_client
from fathom.benchmarks.failures import FAILURES, exit_code
from fathom.benchmarks.fidelity import load_tokenizer
from fathom.benchmarks.progress import progress
from fathom.benchmarks.soak_client import STAGES, Case, Outcome, run_case
from fathom.benchmarks.variants import FATHOM, Place, Variant, filled, with_body, with_flags
from fathom.demo.corpus import eval_samples
from fathom.runtime.config import SPECS
from fathom.server.command.checks import demo_model

CONTEXTS = (150, 300, 600)
CONTEXT = 1088
"""Of the server that is started, in tokens; one prompt in ten is twice as long."""
TASKS = ("single", "multikey", "list", "followup")
PROBES = 6
SAMPLE_SECONDS = 5.0
FEWEST_SAMPLES = 10
"""Of memory, so that a run has a second tenth and a last one."""
MOST_WRONG = 100
"""A run in which more goes wrong ends."""
IDLE_SECONDS = 60.0
ENDLESS = 400
"""Tokens of an answer that its client gives up: the moment comes before their end."""
LEAST_GIVEN_UP = 0.9
"""Of the requests that are to be given up, the share that must have been."""
NEUTRAL = {name: spec.neutral for name, spec in SPECS.items() if spec.mechanism and not spec.tunes}
"""The members of a policy that ask for a mechanism, each with the value that asks for none."""
MIXED: dict[str, dict[str, Any]] = {
    "dense": {"preset": "exact"},
    "speed": {"depth_cutoff": 6},
    "fastkv": {"tsp_rate": 0.2, "kv_retention_rate": 0.2},
    "slow-fast": {"decode": "slow_fast"},
    "kept": {"prefill_keep_rate": 0.3, "min_prompt_tokens": 64},
    "drafted": {"speculative": True},
    "kept and drafted": {"prefill_keep_rate": 0.3, "min_prompt_tokens": 64, "speculative": True},
    "all five": {
        "prefill_keep_rate": 0.5,
        "min_prompt_tokens": 64,
        "depth_cutoff": 6,
        "tsp_rate": 0.3,
        "kv_retention_rate": 0.3,
        "decode": "slow_fast",
        "speculative": True,
    },
}
"""For the demo pair: eight layers with a cutoff at three quarters."""


def parser() -> argparse.ArgumentParser:
    """Every flag with its default."""
    p = argparse.ArgumentParser(
        prog="fathom soak",
        description="Sends requests under mixed policies to a Fathom server, some given up by their clients at "
        "random moments and some far too long, then holds the server against its own accounts: nothing may be "
        "held, memory may not have grown, and dense answers must be those of the idle server.",
    )
    add = p.add_argument_group("what is sent").add_argument
    length = p.add_mutually_exclusive_group()
    length.add_argument("--requests", type=int, help="how many (default: 2000)")
    length.add_argument("--minutes", type=float, help="or for how long")
    add("--in-flight", type=int, default=16, help="at once (default: %(default)s)")
    add("--aborted", type=float, default=0.2, help="share given up by the client (default: %(default)s)")
    add("--too-long", type=float, default=0.1, help="share over the context length (default: %(default)s)")
    add(
        "--policy",
        type=named_policy,
        action="append",
        metavar="NAME=JSON",
        help="instead of the mix; repeatable",
    )
    add("--seed", type=int, default=0, help="of everything random (default: %(default)s)")
    add = p.add_argument_group("to whom").add_argument
    add("--server-flags", default="", metavar="FLAGS", help="further flags for the demo's server")
    add("--cache", type=Path, default=Path(".bench"), help="the server's log (default: %(default)s)")
    add = p.add_argument_group("what is allowed").add_argument
    add(
        "--memory-mib",
        type=float,
        default=64,
        help="growth of memory in the run (default: %(default)s)",
    )
    add("--limit", type=float, default=120, help="seconds for one answer (default: %(default)s)")
    add(
        "--out",
        type=result_file,
        metavar="FILE.json",
        help="default: DATE-soak.json in benchmarks/results, or here",
    )
    return p


def checked(args: argparse.Namespace) -> argparse.Namespace:
    """The arguments with the defaults filled in. ValueError names the flag and its legal range."""
    if args.requests is None and args.minutes is None:
        args.requests = 2000
    for flag in ("requests", "minutes", "in_flight", "limit"):
        if (value := getattr(args, flag)) is not None and value <= 0:
            raise ValueError(f"--{flag.replace('_', '-')} must be above 0, got {value}")
    for flag in ("aborted", "too_long"):
        if not 0 <= getattr(args, flag) <= 1:
            raise ValueError(f"--{flag.replace('_', '-')} must be in [0, 1], got {getattr(args, flag)}")
    if args.aborted + args.too_long > 1:
        raise ValueError(
            f"--aborted and --too-long must be at most 1 together, got {args.aborted + args.too_long:g}"
        )
    args.policy = args.policy or [with_body(name, policy) for name, policy in MIXED.items()]
    return args


@dataclass
class Soak:
    """One run against one server."""

    server: servers.Server
    model: str
    tokenizer: object
    args: argparse.Namespace
    idle: list[Outcome] = field(default_factory=list)
    outcomes: list[tuple[Case, Outcome]] = field(default_factory=list)
    memory: list[tuple[float, int]] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    waits: deque[float] = field(default_factory=lambda: deque(maxlen=50))
    """The last times to a first token, in seconds."""

    def __post_init__(self) -> None:
        asked = {
            (task, length): eval_samples(task, length, 4, self.args.seed, self.tokenizer)
            for task in TASKS
            for length in CONTEXTS
        }
        self.samples = [sample.messages for samples in asked.values() for sample in samples]
        (long,) = eval_samples("single", 2 * CONTEXT, 1, self.args.seed, self.tokenizer)
        self.too_long = long.messages
        step = len(self.samples) // PROBES
        self.probes = self.samples[::step][:PROBES]

    def case(self, number: int) -> Case:
        """The case of this number: the same in every run with this seed, but for the seconds of its patience.

        Who leaves does so at any moment of the usual wait for a first token, in the queue, while the prompt is
        judged or computed; or at one of the first events of the answer.
        """
        rng = random.Random(f"{self.args.seed}/{number}")
        variant: Variant = rng.choice(self.args.policy)
        messages = rng.choice(self.samples)
        case = Case(number, variant.name, variant.policy, messages, rng.randint(2, 60))
        fate = rng.random()
        if fate < self.args.too_long:
            return replace(case, messages=self.too_long, max_tokens=4, too_long=True)
        if fate < self.args.too_long + self.args.aborted:
            case = replace(case, max_tokens=ENDLESS)
            if rng.random() < 0.75:
                return replace(case, patience=rng.random() * statistics.median(self.waits or [1.0]))
            return replace(case, leave_after=rng.randint(1, 24))
        if variant.dense:
            return self.probe(number, rng.randrange(PROBES))
        return replace(case, temperature=rng.choice([0.0, 0.8]))

    def probe(self, number: int, index: int) -> Case:
        """A dense, greedy question whose answer is known."""
        return Case(number, "dense", {"preset": "exact"}, self.probes[index], 32, probe=index)

    def _numbers(self) -> Iterator[int]:
        number, end = 0, time.monotonic() + 60 * (self.args.minutes or 0)
        with progress(total=self.args.requests, unit="request", desc="soaking") as bar:
            while number < self.args.requests if self.args.requests else time.monotonic() < end:
                yield number
                number += 1
                bar.update(1)

    async def run(self) -> None:
        """Idle answers first, then everything, then the idle answers again."""
        async with open_client(self.server.url) as client:
            for index in range(PROBES):
                self.idle.append(await self._send(client, self.probe(-1, index)))
            numbers = self._numbers()

            async def worker() -> None:
                for number in numbers:
                    await self._send(client, self.case(number))

            watcher = asyncio.create_task(self._watch())
            try:
                await asyncio.gather(*(worker() for _ in range(self.args.in_flight)))
            finally:
                watcher.cancel()
            for index in range(PROBES):
                await self._send(client, self.probe(-2, index))

    async def _send(self, client: httpx.AsyncClient, case: Case) -> Outcome:
        outcome = await run_case(client, self.model, case, self.args.limit)
        self.outcomes.append((case, outcome))
        if outcome.ttft is not None:
            self.waits.append(outcome.ttft)
        if outcome.kind == "failed":
            self.wrong.append(f"request {case.number} ({case.policy}): {outcome.detail}")
            self.server.check_alive()
        elif case.probe is not None and case.number != -1 and outcome.text != self.idle[case.probe].text:
            expected = self.idle[case.probe].text
            self.wrong.append(f"request {case.number}: dense answer {outcome.text!r}, idle {expected!r}")
        if len(self.wrong) >= MOST_WRONG:
            raise BenchError("too much went wrong to go on")
        return outcome

    async def _watch(self) -> None:
        assert self.server.process is not None  # the soak has started it
        begin, members = time.monotonic(), usage.tree(self.server.process.pid)
        while True:
            self.memory.append((round(time.monotonic() - begin, 1), usage.rss(members)))
            await asyncio.sleep(SAMPLE_SECONDS)

    def server_aborts(self) -> int:
        """Generations that the server counted as aborted since its start."""
        text = httpx.get(f"{self.server.url}/metrics", timeout=30, trust_env=False).text
        return int(
            sum(map(float, re.findall(r'^fathom:requests_total{.*outcome="abort".*} (\S+)$', text, re.M)))
        )

    def growth(self) -> float:
        """MiB that resident memory grew by, from the median of the run's second tenth to that of its last."""
        sizes = [size for _, size in self.memory]
        tenth = max(1, len(sizes) // 10)
        begin, end = sizes[tenth : 2 * tenth] or sizes[:1], sizes[-tenth:]
        return (statistics.median(end) - statistics.median(begin)) / 2**20


def settled(server: servers.Server) -> dict:
    """The engine's account once nothing runs. BenchError when something stays held."""
    deadline = time.monotonic() + IDLE_SECONDS
    while True:
        engine = httpx.get(f"{server.url}/fathom/info", timeout=30, trust_env=False).json()["engine"][0]
        pool, pages = engine["kv_pool"], engine["kv_pool"]["depth_pages"]
        balanced = (
            pages["held"] == pages["open_rows"] == pool["held"] == engine["open_accounts"] == 0
            and pages["free"] + pages["cached"] == pages["total"]
            and pages["evictable"] == pages["cached"]
            and engine["fastkv"]["buffer_used"] == 0
            and engine["slow_fast"]["buffers_in_use"] == 0
        )
        if balanced:
            return engine
        if time.monotonic() > deadline:
            held = {"kv_pool": pool, "open_accounts": engine["open_accounts"]}
            raise BenchError(f"{IDLE_SECONDS:g} s after the last request the accounts do not balance: {held}")
        time.sleep(0.25)


def asked_for(policy: dict) -> set[str]:
    """The members of a `fathom` object that ask for a mechanism, those that its preset fills in among them."""
    values = {**NEUTRAL, **filled(policy)}
    return {member for member, neutral in NEUTRAL.items() if values[member] != neutral}


def _finished(soak: Soak) -> list[tuple[Case, dict]]:
    """The cases that were answered whole, each with the scheduler's account."""
    return [(case, o.fathom) for case, o in soak.outcomes if o.kind == "finished" and o.fathom is not None]


def _possible(member: str, told: dict) -> bool:
    """Whether an answer could show a member that its preset fills in: the server did, for so short a prompt too."""
    policy = told["policy"]
    if member == "prefill_keep_rate" and told["prompt_tokens"] < policy["min_prompt_tokens"]:
        return False
    return policy[member] != NEUTRAL[member]


def left_out(soak: Soak) -> set[str]:
    """What only presets ask for and was possible in none of their answers: a preset asks as far as it can."""
    given = {name for case, _ in soak.outcomes for name in case.fathom}
    found = [(asked_for(case.fathom) - given, told) for case, told in _finished(soak)]
    shown = {member for asked, told in found for member in asked if _possible(member, told)}
    return {member for asked, _ in found for member in asked} - shown


def proofs(soak: Soak) -> dict[str, int]:
    """What the answers say of the mechanisms, summed. BenchError where one that was asked for never ran."""
    seen: Counter[str] = Counter()
    ended: Counter[str] = Counter()
    for case, told in _finished(soak):
        asked = asked_for(case.fathom)
        ended.update(asked)
        seen["draft_tokens"] += told["draft_tokens"]
        seen["accepted_tokens"] += told["accepted_tokens"]
        seen["fast_steps"] += told["fast_steps"]
        seen["dropped_tokens"] += told["prompt_tokens"] - told["kept_tokens"]
        for member, happened in {
            "prefill_keep_rate": told["kept_tokens"] < told["prompt_tokens"],
            "depth_cutoff": told["deep_tokens"] < told["prompt_tokens"],
            "tsp_rate": bool(told["propagated_tokens"]),
            "kv_retention_rate": told["retained_tokens"] < told["prompt_tokens"],
            "speculative": told["draft_tokens"] > 0,
            "decode": told["fast_steps"] > 0,
        }.items():
            if member in asked:
                seen[member] += happened
    needed = {member for case, _ in soak.outcomes for member in asked_for(case.fathom)} - left_out(soak)
    if idle := [member for member in sorted(needed) if not seen[member]]:
        counts = (
            f"{member}: asked for, but no answer shows that it ran ({ended[member]} ended)" for member in idle
        )
        raise BenchError("; ".join(counts))
    return dict(seen)


def not_judged(soak: Soak) -> list[str]:
    """What the run says nothing about, each with the reason."""
    sent = {case.policy for case, _ in soak.outcomes}
    found = [
        f"{variant.name} (no request drew it)" for variant in soak.args.policy if variant.name not in sent
    ]
    why = "the server left it out of the preset, or no prompt was long enough"
    found += [f"{member} ({why})" for member in sorted(left_out(soak))]
    if len(soak.memory) < FEWEST_SAMPLES:
        found.append(f"growth of memory ({len(soak.memory)} samples; it takes {FEWEST_SAMPLES})")
    return found


def failure(soak: Soak, error: Exception | None = None) -> BenchError:
    """Why there is no result: what ended the run, if something did, and everything that went wrong before."""
    told = [] if error is None else [str(error) or type(error).__name__]
    if isinstance(error, httpx.HTTPError):
        try:
            soak.server.check_alive()
            told = [f"the server did not answer: {told[0]}"]
        except BenchError as ended:
            told = [str(ended)]
    if soak.wrong:
        told += [f"{len(soak.wrong)} things went wrong:", *soak.wrong[:20]]
    return BenchError("\n".join(told))


def given_up(soak: Soak) -> dict[str, Any]:
    """How many clients were to leave and did, after how many seconds, and how many the server saw leave.

    BenchError where too few of those that were to did, or the server was told of too few.
    """
    sent = [(case, outcome) for case, outcome in soak.outcomes if case.number >= 0]
    meant = sum(case.leaves for case, _ in sent)
    left = [outcome for _, outcome in sent if outcome.kind == "aborted"]
    if len(left) < LEAST_GIVEN_UP * meant:
        raise BenchError(f"{meant} requests were to be given up, {len(left)} were: the others ended before")
    if (counted := soak.server_aborts()) < LEAST_GIVEN_UP * len(left):
        raise BenchError(f"{len(left)} requests were given up, the server counted {counted}")
    by_stage = {stage: [outcome.seconds for outcome in left if outcome.detail == stage] for stage in STAGES}
    return {
        "meant": meant,
        "counted_by_server": counted,
        "share": round(len(left) / len(sent), 4),
        "seconds": {stage: stats.summary(times) for stage, times in by_stage.items() if times},
    }


def table(soak: Soak) -> str:
    """Outcomes by policy, in Markdown; the times of whole answers are those of requests that finished."""
    kinds = ("finished", "aborted", "refused", "failed")
    head = ("policy", "requests", *kinds, "TTFT p50, s", "answer p50, s", "longest, s")
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for name in dict.fromkeys(case.policy for case, _ in soak.outcomes):
        found = [outcome for case, outcome in soak.outcomes if case.policy == name]
        counts = Counter(outcome.kind for outcome in found)
        first = [outcome.ttft for outcome in found if outcome.ttft is not None]
        whole = [outcome.seconds for outcome in found if outcome.kind == "finished"]
        times = (statistics.median, first), (statistics.median, whole), (max, whole)
        shown = [f"{of(taken):.2f}" if taken else "–" for of, taken in times]
        cells = [name, str(len(found)), *(str(counts[kind]) for kind in kinds), *shown]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _start(running: list[servers.Server], args: argparse.Namespace) -> servers.Server:
    at = Place(demo_model(), 0, "float32", CONTEXT, args.in_flight * CONTEXT, 0, Path())
    draft = ["--draft-model-path", str(demo_model("draft"))]
    variant = with_flags(FATHOM, [*draft, *shlex.split(args.server_flags)])
    print("starting the server", file=sys.stderr)
    return servers.start(running, variant, at, args.cache.resolve() / "logs", 300)


def run(args: argparse.Namespace, argv: list[str]) -> dict:
    """The whole run. BenchError, with everything that went wrong, unless nothing did."""
    result = {
        **report.provenance("soak", argv),
        "policies": {variant.name: variant.policy for variant in args.policy},
        "in_flight": args.in_flight,
    }
    with servers.stopping() as running:
        server = _start(running, args)
        result["server"] = server.command
        pid = liveness.identify(server)["engine"][0]["pid"]
        soak = Soak(server, str(demo_model()), load_tokenizer(str(demo_model())), args)
        begin = time.monotonic()
        try:
            asyncio.run(soak.run())
            result["seconds"] = round(time.monotonic() - begin, 1)
            engine = settled(server)
            if engine["pid"] != pid or not psutil.pid_exists(pid):
                soak.wrong.append("the engine's process is not the one that the run began with")
            result["memory_growth_mib"] = round(soak.growth(), 1)
            if result["memory_growth_mib"] > args.memory_mib:
                soak.wrong.append(
                    f"memory grew by {result['memory_growth_mib']} MiB, allowed are {args.memory_mib:g}"
                )
            result["proofs"], result["given_up"] = proofs(soak), given_up(soak)
        except (BenchError, httpx.HTTPError) as error:
            raise failure(soak, error) from None
        if soak.wrong:
            raise failure(soak)
    result["not_judged"] = not_judged(soak)
    outcomes = [(case, outcome) for case, outcome in soak.outcomes if case.number >= 0]
    result["requests"] = len(outcomes)
    result["outcomes"] = dict(Counter(outcome.kind for _, outcome in outcomes))
    result["aborts"] = dict(Counter(o.detail for _, o in outcomes if o.kind == "aborted"))
    result["dense_answers_compared"] = sum(c.probe is not None and o.kind == "finished" for c, o in outcomes)
    result["memory_mib"] = [(at, size >> 20) for at, size in soak.memory]
    result["table"] = table(soak)
    return result


def main(argv: list[str]) -> int:
    """Run it. Returns 0; 1 after an error that says what went wrong; 2 for wrong arguments."""
    args = parser().parse_args(argv)
    try:
        result = run(checked(args), argv)
    except FAILURES as error:
        return exit_code("soak", error)
    except KeyboardInterrupt:
        print("fathom soak: interrupted, nothing written", file=sys.stderr)
        return 130
    out = args.out or report.default_out(result, "soak")
    report.write(result, out)
    print("", result["table"], sep="\n")
    counts = ", ".join(f"{n} {kind}" for kind, n in result["outcomes"].items())
    aborts = ", ".join(f"{n} {stage}" for stage, n in result["aborts"].items())
    print(f"\n{result['requests']} requests in {result['seconds']:.0f} s: {counts}.")
    print(f"Given up: {result['given_up']['share']:.1%} ({aborts}).")
    enough = len(result["memory_mib"]) >= FEWEST_SAMPLES
    memory = f"memory grew by {result['memory_growth_mib']} MiB; " if enough else ""
    print(
        f"All accounts balanced; {memory}"
        f"{result['dense_answers_compared']} dense answers under load were those of the idle server. "
        f"Written: {out}"
    )
    if result["not_judged"]:
        print(f"Not judged: {', '.join(result['not_judged'])}.")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
