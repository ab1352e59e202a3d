"""The measuring loop: each cell warmed up, then rounds in alternating order, one busy server at a time."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field

import httpx

from fathom.benchmarks import client, liveness, stats
from fathom.benchmarks.client import BenchError, Reply
from fathom.benchmarks.model import FIRST_WORD
from fathom.benchmarks.servers import Server, wait_quiet
from fathom.benchmarks.usage import Sampler, Usage

METRICS = ("ttft", "tpot", "e2e")
"""Seconds of one turn: mean time to first token and mean time per output token over the batch's requests, and
the time until the last of them has ended."""

_WARMUP_OUTPUT = 4


@dataclass(frozen=True)
class Cell:
    """One point of the grid: tokens per prompt, requests at once."""

    prompt: int
    batch: int


@dataclass(frozen=True)
class Settings:
    """How every cell is measured.

    Attributes:
        output: tokens generated per request.
        rounds: counted turns per variant and cell.
        warmups: uncounted turns per variant and cell.
        shared_prefix: share of each prompt that the server has seen before the turn, 0 ≤ share < 1.
        seed: of the prompts.
        limit: seconds that a request may take.
    """

    output: int = 32
    rounds: int = 4
    warmups: int = 1
    shared_prefix: float = 0.0
    seed: int = 0
    limit: float = 600.0


@dataclass
class Turn:
    """One variant's measurement in one round of a cell. Times in seconds, memory in bytes."""

    variant: str
    round: int
    replies: list[Reply]
    usage: Usage
    metrics: dict[str, float] = field(init=False)

    def __post_init__(self) -> None:
        n = len(self.replies)
        self.metrics = {
            "ttft": sum(reply.ttft for reply in self.replies) / n,
            "tpot": sum(reply.tpot for reply in self.replies) / n,
            "e2e": max(reply.latency for reply in self.replies),
        }

    def to_json(self) -> dict:
        requests = [{**asdict(reply), "tpot": reply.tpot} for reply in self.replies]
        return {
            "variant": self.variant,
            "round": self.round,
            **self.metrics,
            **asdict(self.usage),
            "requests": requests,
        }


def make_prompts(
    cell: Cell, settings: Settings, vocab: int, round_index: int
) -> tuple[list[int], list[list[int]]]:
    """The shared prefix and the prompts of one round: the same for each variant, new in each round."""
    source = random.Random(f"{settings.seed}/{cell.prompt}/{cell.batch}/{round_index}")
    prefix = [source.randrange(FIRST_WORD, vocab) for _ in range(int(cell.prompt * settings.shared_prefix))]
    rest = cell.prompt - len(prefix)
    return prefix, [
        prefix + [source.randrange(FIRST_WORD, vocab) for _ in range(rest)] for _ in range(cell.batch)
    ]


class Bench:
    """Measures started servers against each other; `clients` are entered by the caller."""

    def __init__(self, servers: list[Server], settings: Settings, vocab: int, advance: Callable[[str], None]):
        self.servers = {server.variant.name: server for server in servers}
        self.settings, self.vocab, self.advance = settings, vocab, advance
        self.sent = dict.fromkeys(self.servers, 0)
        self.clients: dict[str, httpx.AsyncClient] = {}

    async def _send(self, name: str, prompts: list[list[int]], output: int) -> list[Reply]:
        server = self.servers[name]
        if server.process.poll() is not None:
            raise BenchError(f"{name} ended in mid-run:\n{server.log_tail()}")
        body, limit = server.variant.body, self.settings.limit
        replies = await client.complete_batch(self.clients[name], prompts, output, body, limit)
        self.sent[name] += len(replies)
        return replies

    async def _turn(self, name: str, cell: Cell, round_index: int, output: int) -> Turn:
        prefix, prompts = make_prompts(cell, self.settings, self.vocab, round_index)
        if prefix:
            await self._send(name, [prefix], 2)
        wait_quiet(list(self.servers.values()))
        with Sampler(self.servers[name].process.pid) as sampler:
            replies = await self._send(name, prompts, output)
        for reply in replies:
            liveness.check_reply(self.servers[name], reply)
        self.advance(f"{cell.prompt} x{cell.batch} {name}")
        return Turn(name, round_index, replies, sampler.usage)

    async def cell(self, cell: Cell) -> list[Turn]:
        """All counted turns of one cell, in the order they were taken."""
        for warmup in range(self.settings.warmups):
            for name in self.servers:
                await self._turn(name, cell, -1 - warmup, min(_WARMUP_OUTPUT, self.settings.output))
        turns = []
        for round_index in range(self.settings.rounds):
            for name in stats.order(list(self.servers), round_index):
                turns.append(await self._turn(name, cell, round_index, self.settings.output))
        return turns

    async def run(self, cells: list[Cell], record: Callable[[Cell, list[Turn]], None]) -> None:
        """Measure cell by cell; `record` gets each as soon as it is complete."""
        async with AsyncExitStack() as stack:
            for name, server in self.servers.items():
                self.clients[name] = await stack.enter_async_context(client.open_client(server.url))
            for cell in cells:
                record(cell, await self.cell(cell))


def steps(cells: list[Cell], variants: int, settings: Settings) -> int:
    """Turns that `run` will take."""
    return len(cells) * variants * (settings.rounds + settings.warmups)
