"""The measuring loop: each cell warmed up, then rounds in alternating order, one busy server at a time."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AsyncExitStack, nullcontext
from dataclasses import asdict, dataclass, field

import httpx

from fathom.benchmarks import client, liveness, stats
from fathom.benchmarks.client import BenchError, Reply
from fathom.benchmarks.prompts import TAIL, Cell, Prompts, Settings
from fathom.benchmarks.servers import Server, wait_quiet
from fathom.benchmarks.usage import Sampler, Usage

METRICS = ("ttft", "tpot", "e2e")
"""Seconds of one turn: mean time to first token and mean time per output token over the batch's requests, and
the time until the last of them has ended."""

_WARMUP_OUTPUT = 4
_PATIENCE = 3.0
"""Seconds in which a server that has broken off an answer may turn out to have ended."""


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


class Bench:
    """Measures started servers against each other; variants may share a process.

    Args:
        servers: one for each variant, in table order.
        prompts: what is asked.
        advance: called after each turn with what it was.
    """

    def __init__(
        self, servers: list[Server], settings: Settings, prompts: Prompts, advance: Callable[[str], None]
    ):
        self.servers = {server.variant.name: server for server in servers}
        self.settings, self.prompts, self.advance = settings, prompts, advance
        self.sent = dict.fromkeys(self.servers, 0)
        self.clients: dict[str, httpx.AsyncClient] = {}
        urls = [server.url for server in servers]
        self.shared = {server.variant.name for server in servers if urls.count(server.url) > 1}

    async def _send(self, name: str, prompts: list[list[int]], output: int) -> list[Reply]:
        server = self.servers[name]
        server.check_alive()
        limit, ends = self.settings.limit, bool(self.settings.task)
        # Policies that leave the same KV would find each other's prompts.
        salt = {"cache_salt": f"bench/{name}"} if name in self.shared else {}
        body = {"model": server.model, **self.settings.sampling, **salt, **server.variant.body}
        try:
            replies = await client.complete_batch(self.clients[name], prompts, output, body, limit, ends)
        except BenchError:
            server.check_alive(_PATIENCE)
            raise
        self.sent[name] += len(replies)
        return replies

    async def _forget(self, name: str) -> None:
        """Empty the prefix cache of a server that several variants use: each turn finds the same pool."""
        try:
            answer = await self.clients[name].post("/flush_cache", params={"timeout": 30})
        except httpx.HTTPError as error:
            self.servers[name].check_alive(_PATIENCE)
            raise BenchError(f"{name}: {type(error).__name__} {error}") from error
        if answer.status_code != 200:
            raise BenchError(f"{name}: the prefix cache was not emptied: {answer.text[:200]}")

    async def _turn(self, name: str, cell: Cell, round_index: int, output: int) -> Turn:
        counted, (prefixes, prompts) = round_index >= 0, self.prompts(cell, round_index)
        wait_quiet(list(self.servers.values()))
        process = self.servers[name].process
        if not self.settings.documents:
            if process is not None and name in self.shared:
                await self._forget(name)
            if prefixes:
                await self._send(name, prefixes, 2)
                wait_quiet(list(self.servers.values()))
        sampler = None if process is None else Sampler(process.pid)
        with sampler or nullcontext():
            replies = await self._send(name, prompts, output)
        for reply in replies:
            if counted or not self.settings.warmup_prompt:  # a shorter prompt may be left whole
                liveness.check_reply(self.servers[name], reply)
            if counted:
                liveness.check_fresh(self.servers[name], reply, self.settings.known(reply.prompt_tokens))
            if self.settings.documents:
                liveness.check_cached(self.servers[name], reply, cell.prompt - 2 * TAIL)
        self.advance(f"{cell.prompt} x{cell.batch} {name}")
        return Turn(name, round_index, replies, sampler.usage if sampler else Usage())

    async def _read_documents(self, longest: Cell) -> None:
        """Each variant's server reads each document once, at the length of the longest cell."""
        documents, _ = self.prompts(longest, 0)
        for name in self.servers:
            for document in documents:
                self.advance(f"{longest.prompt} document {name}")
                await self._send(name, [document], 2)

    async def cell(self, cell: Cell) -> list[Turn]:
        """All counted turns of one cell, in the order they were taken."""
        shortest = min(self.settings.warmup_prompt or cell.prompt, cell.prompt)
        warm, output = Cell(shortest, cell.batch), min(_WARMUP_OUTPUT, self.settings.output)
        for warmup in range(self.settings.warmups):
            # Cells whose warm-ups are of the same length do not share their prompts.
            number = -1 - warmup - self.settings.warmups * cell.prompt
            for name in self.servers:
                await self._turn(name, warm, number, output)
        turns = []
        for round_index in range(self.settings.rounds):
            for name in stats.order(list(self.servers), round_index):
                turns.append(await self._turn(name, cell, round_index, self.settings.output))
        return turns

    async def run(self, cells: list[Cell], record: Callable[[Cell, list[Turn]], None]) -> None:
        """Measure cell by cell; `record` gets each as soon as it is complete."""
        async with AsyncExitStack() as stack:
            for name, server in self.servers.items():
                self.clients[name] = await stack.enter_async_context(
                    client.open_client(server.url, server.headers)
                )
            if self.settings.documents:
                await self._read_documents(max(cells, key=lambda cell: cell.prompt))
            for cell in cells:
                record(cell, await self.cell(cell))


def steps(cells: list[Cell], variants: int, settings: Settings) -> int:
    """Turns that `run` will take."""
    return variants * (len(cells) * (settings.rounds + settings.warmups) + settings.documents)
