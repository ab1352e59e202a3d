"""A streaming client for `/v1/completions` with token-id prompts: a route that every server here speaks."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass

import httpx

ROUTE = "/v1/completions"
MODEL_NAME = "bench"


class BenchError(RuntimeError):
    """A measurement that cannot be trusted: it ends the run with one line."""


@dataclass(frozen=True)
class Reply:
    """What one request gave. Times in seconds on this process's clock, from just before the request was sent.

    ttft: arrival of the first event that carries a choice. latency: arrival of the last one. events: how many
    did; fewer than output_tokens means that some tokens came together.
    """

    prompt_tokens: int
    output_tokens: int
    ttft: float
    latency: float
    events: int
    text: str
    fathom: dict | None

    @property
    def tpot(self) -> float:
        """Seconds per output token after the first: (latency − ttft) / (n − 1)."""
        return (self.latency - self.ttft) / (self.output_tokens - 1)


def request_body(prompt: list[int], output_tokens: int, extra: dict, ends: bool = False) -> bytes:
    """JSON of a greedy request that yields exactly `output_tokens` tokens, or at most, if it `ends` itself."""
    body = {
        "model": MODEL_NAME,
        "prompt": prompt,
        "max_tokens": output_tokens,
        "temperature": 0,
        "ignore_eos": not ends,
        "stream": True,
        "stream_options": {"include_usage": True},
        **extra,
    }
    return json.dumps(body).encode()


async def _events(client: httpx.AsyncClient, body: bytes):
    headers = {"Content-Type": "application/json"}
    async with client.stream("POST", ROUTE, content=body, headers=headers) as response:
        if response.status_code != 200:
            text = (await response.aread()).decode(errors="replace")
            raise BenchError(f"{client.base_url} answered {response.status_code}: {text[:500]}")
        async for line in response.aiter_lines():
            if line.startswith("data:") and (data := line[5:].strip()) != "[DONE]":
                yield time.perf_counter(), json.loads(data)


async def _stream(client: httpx.AsyncClient, body: bytes) -> Reply:
    usage = fathom = None
    times: list[float] = []
    text: list[str] = []
    start = time.perf_counter()
    async for at, event in _events(client, body):
        if "error" in event:
            raise BenchError(f"{client.base_url} failed in mid-stream: {event['error']}")
        fathom = event.get("fathom") or fathom
        usage = event.get("usage") or usage
        if event["choices"]:
            times.append(at - start)
            text.append(event["choices"][0]["text"])
    if not times or usage is None:
        raise BenchError(f"{client.base_url} ended a stream without tokens or usage")
    counts = usage["prompt_tokens"], usage["completion_tokens"]
    return Reply(*counts, times[0], times[-1], len(times), "".join(text), fathom)


async def complete(
    client: httpx.AsyncClient,
    prompt: list[int],
    output_tokens: int,
    extra: dict,
    limit: float,
    ends: bool = False,
) -> Reply:
    """One request. BenchError on any failure, another token count than asked, or after `limit` seconds.

    A request that `ends` itself may yield fewer tokens, but two at least.
    """
    body = request_body(prompt, output_tokens, extra, ends)
    try:
        reply = await asyncio.wait_for(_stream(client, body), limit)
    except TimeoutError:
        raise BenchError(
            f"{client.base_url} took over {limit:g} s for a prompt of {len(prompt)} tokens"
        ) from None
    except httpx.HTTPError as error:
        raise BenchError(f"{client.base_url}: {type(error).__name__} {error}") from error
    least = 2 if ends else output_tokens
    if reply.prompt_tokens != len(prompt) or not least <= reply.output_tokens <= output_tokens:
        raise BenchError(
            f"{client.base_url} counted {reply.prompt_tokens} + {reply.output_tokens} tokens, "
            f"asked were {len(prompt)} + {output_tokens}"
        )
    return reply


async def complete_batch(
    client: httpx.AsyncClient,
    prompts: list[list[int]],
    output_tokens: int,
    extra: dict,
    limit: float,
    ends: bool = False,
) -> list[Reply]:
    """All prompts at once, each on its own connection; replies in the order of the prompts."""
    return await asyncio.gather(
        *(complete(client, prompt, output_tokens, extra, limit, ends) for prompt in prompts)
    )


def open_client(url: str, headers: dict[str, str] | None = None) -> httpx.AsyncClient:
    """A client that waits for a reply as long as `complete` lets it and never goes through a proxy."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
    return httpx.AsyncClient(
        base_url=url,
        headers=headers,
        timeout=httpx.Timeout(None, connect=10),
        limits=limits,
        trust_env=False,
    )
