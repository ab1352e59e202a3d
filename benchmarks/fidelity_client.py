"""Chat completions for `fathom fidelity`: greedy, complete answers, several in flight."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass

import httpx

from fathom.benchmarks.client import BenchError
from fathom.demo.corpus import Sample

ROUTE = "/v1/chat/completions"


@dataclass(frozen=True)
class Item:
    """One question of the grid. `max_tokens` leaves room for the right answer and its end, and little more."""

    sample: Sample
    max_tokens: int


@dataclass(frozen=True)
class Answer:
    """What came back. `seconds` from sending the request to the whole answer."""

    text: str
    finish: str
    prompt_tokens: int
    output_tokens: int
    seconds: float
    fathom: dict | None


def is_exact(answer: Answer, expected: str) -> bool:
    """The whole answer and nothing else, ended by the model itself; only space around it is forgiven."""
    return answer.finish == "stop" and answer.text.strip() == expected


def server_message(response: httpx.Response) -> str:
    """The message inside an error body of the chat route, or the body's beginning."""
    try:
        body = response.json()
        return str(body.get("message") or body["error"]["message"])
    except (ValueError, KeyError, TypeError, AttributeError):
        return response.text[:500]


async def ask(client: httpx.AsyncClient, model: str, item: Item, extra: dict, limit: float) -> Answer:
    """One request. BenchError, with the server's message, for anything but a complete answer."""
    body = {
        "model": model,
        "messages": item.sample.messages,
        "max_tokens": item.max_tokens,
        "temperature": 0,
        **extra,
    }
    start = time.perf_counter()
    try:
        response = await asyncio.wait_for(client.post(ROUTE, json=body), limit)
    except TimeoutError:
        raise BenchError(f"{client.base_url} took over {limit:g} s for one answer") from None
    except httpx.HTTPError as error:
        raise BenchError(f"{client.base_url}: {type(error).__name__} {error}") from error
    seconds = time.perf_counter() - start
    if response.status_code != 200:
        refused = json.dumps(extra.get("fathom", {}))
        raise BenchError(f"status {response.status_code} for policy {refused}: {server_message(response)}")
    reply = response.json()
    choice, usage = reply["choices"][0], reply["usage"]
    counts = usage["prompt_tokens"], usage["completion_tokens"]
    text = choice["message"]["content"] or ""
    return Answer(text, str(choice["finish_reason"]), *counts, seconds, reply.get("fathom"))


async def ask_all(
    client: httpx.AsyncClient, model: str, items: Sequence[Item], extra: dict, limit: float
) -> list[Answer]:
    """All at once; answers in the order of the items. The first failure ends the others."""
    tasks = [asyncio.ensure_future(ask(client, model, item, extra, limit)) for item in items]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
