"""One request of `fathom soak`: a streamed chat completion that may be given up at any moment of its life."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass

import httpx

from fathom.benchmarks.fidelity_client import ROUTE, server_message

STAGES = ("before the first token", "while decoding")


@dataclass(frozen=True)
class Case:
    """What is asked, and when the client leaves.

    Attributes:
        number: which case of the run this is.
        policy: name of the policy.
        fathom: its `fathom` object.
        messages: the conversation.
        max_tokens: most tokens of the answer.
        temperature: 0 for a greedy answer.
        patience: seconds after which the client leaves, whatever has come by then; None to wait.
        leave_after: events with text after which the client leaves; None to read all.
        too_long: whether the prompt exceeds the context, so that status 400 is the right answer.
        probe: index of the idle answer that this one must equal; None for none.
    """

    number: int
    policy: str
    fathom: dict
    messages: list[dict[str, str]]
    max_tokens: int
    temperature: float = 0.0
    patience: float | None = None
    leave_after: int | None = None
    too_long: bool = False
    probe: int | None = None

    @property
    def leaves(self) -> bool:
        """Whether the client is to give the request up."""
        return self.patience is not None or self.leave_after is not None


@dataclass(frozen=True)
class Outcome:
    """How a case ended.

    Attributes:
        kind: "finished", "aborted", "refused" (rightly) or "failed".
        detail: of a failure, what was wrong; of an abort, one of `STAGES`.
        seconds: from sending to the end.
        ttft: seconds to the first token, or None where none came.
        text: what the answer said.
        fathom: the scheduler's account of it.
    """

    kind: str
    detail: str = ""
    seconds: float = 0.0
    ttft: float | None = None
    text: str = ""
    fathom: dict | None = None


def body(model: str, case: Case) -> dict:
    """The JSON of a case. One that is to be given up must not end by itself, and each of its tokens has a text:
    one that is skipped is no event.
    """
    endless = {"ignore_eos": True, "skip_special_tokens": False} if case.leaves else {}
    return {
        "model": model,
        "messages": case.messages,
        "max_tokens": case.max_tokens,
        "temperature": case.temperature,
        "stream": True,
        "fathom": case.fathom,
        **endless,
    }


class _Left(Exception):
    """The client has hung up."""


@dataclass
class _Reader:
    """Reads one stream."""

    case: Case
    begin: float
    first: float | None = None
    events: int = 0
    text: str = ""
    fathom: dict | None = None
    done: bool = False

    async def read(self, response: httpx.Response) -> None:
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                self.done = True
            elif line.startswith("data: "):
                self._take(json.loads(line[6:]))

    def _take(self, event: dict) -> None:
        if "error" in event:
            raise ValueError(f"failed in mid-stream: {event['error']}")
        self.fathom = event.get("fathom") or self.fathom
        said = "".join(choice["delta"].get("content") or "" for choice in event.get("choices", []))
        if said:
            self.first = self.first or time.perf_counter() - self.begin
            self.events += 1
            self.text += said
            if self.case.leave_after is not None and self.events >= self.case.leave_after:
                raise _Left


async def _exchange(client: httpx.AsyncClient, model: str, case: Case, reader: _Reader) -> str:
    """Send and read. Returns what was wrong; "" for nothing."""
    async with client.stream("POST", ROUTE, json=body(model, case)) as response:
        if response.status_code != 200:
            await response.aread()
            return f"status {response.status_code}: {server_message(response)}"
        await reader.read(response)
    if not reader.done:
        return "the stream ended without [DONE]"
    if reader.fathom is None:
        return "the answer came without the fathom object that says what was done"
    return ""


async def run_case(client: httpx.AsyncClient, model: str, case: Case, limit: float) -> Outcome:
    """Send one case. Never raises for what the server does: that is an outcome."""
    reader = _Reader(case, time.perf_counter())

    def outcome(kind: str, detail: str = "") -> Outcome:
        seconds = time.perf_counter() - reader.begin
        return Outcome(kind, detail, seconds, reader.first, reader.text, reader.fathom)

    try:
        async with asyncio.timeout(limit) as deadline:
            if case.patience is not None:
                deadline.reschedule(asyncio.get_running_loop().time() + case.patience)
            wrong = await _exchange(client, model, case, reader)
    except _Left:
        return outcome("aborted", STAGES[1])
    except TimeoutError:
        if case.patience is None:
            return outcome("failed", f"no whole answer in {limit:g} s")
        return outcome("aborted", STAGES[reader.first is not None])
    except (httpx.HTTPError, ValueError) as error:
        return outcome("failed", f"{type(error).__name__} {error}")
    if case.too_long:
        refused = wrong.startswith("status 400") and "longer than" in wrong
        return outcome("refused" if refused else "failed", wrong or "a prompt over the context was answered")
    return outcome("failed", wrong) if wrong else outcome("finished")
