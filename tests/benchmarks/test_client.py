"""The client's clock and its refusals, against a server whose delays are known."""

import asyncio
import json
import time

import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route
from waiting import one_of_three

from fathom.benchmarks import client
from fathom.benchmarks.client import BenchError
from fathom.benchmarks.servers import free_port

FIRST, EACH, USAGE = 0.30, 0.05, 0.40
"""Seconds before the first token, between tokens, and before the event that only counts them."""

TOLERANCE = 0.15
"""Seconds that an event may take from the server's clock to the client's on a busy machine."""

together = [0, 0]
"""Requests that are being answered now, and the most that were."""

sent: list[float] = []
"""When each token of the last single request left the server, with the request's arrival before them."""


def event(data) -> bytes:
    return f"data: {json.dumps(data)}\n\n".encode()


async def tokens(body):
    """The stream that was asked for; `say` in the request changes how it goes wrong."""
    say, count = body.get("say"), body["max_tokens"]
    sent[:] = [time.perf_counter()]
    together[:] = together[0] + 1, max(together[0] + 1, together[1])
    await asyncio.sleep(FIRST)
    together[0] -= 1
    for i in range(count):
        if i:
            await asyncio.sleep(EACH)
        if say == "error" and i == 1:
            yield event({"error": {"message": "out of memory"}})
            return
        last = {"fathom": {"kept_tokens": 3}} if i == count - 1 else {}
        sent.append(time.perf_counter())
        yield event({"choices": [{"index": 0, "text": f" w{i}"}], **last})
    if say != "no usage":
        await asyncio.sleep(USAGE)  # neither this event nor [DONE] is a token: the clock must have stopped
        counted = count - 1 if say == "fewer" else count
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": counted}
        yield event({"choices": [], "usage": usage})
    yield b"data: [DONE]\n\n"


async def completions(request):
    body = await request.json()
    if body.get("say") == "refuse":
        return JSONResponse({"message": "no such field"}, status_code=400)
    return StreamingResponse(tokens(body), media_type="text/event-stream")


@pytest.fixture(scope="module")
def url(run_app):
    return run_app(Starlette(routes=[Route("/v1/completions", completions, methods=["POST"])]))


def ask(url, prompts, extra=None, limit=10.0, output=5):
    async def go():
        async with client.open_client(url) as connection:
            return await client.complete_batch(connection, prompts, output, extra or {}, limit)

    return asyncio.run(go())


@one_of_three
def test_times_are_the_servers_delays(url):
    ask(url, [[1]])  # the first request pays for imports and the connection
    (reply,) = ask(url, [[5, 6, 7]])
    received, first, *_, last = sent
    assert reply.ttft == pytest.approx(first - received, abs=TOLERANCE)
    assert reply.latency == pytest.approx(last - received, abs=TOLERANCE)
    assert reply.tpot == pytest.approx((last - first) / 4, abs=TOLERANCE / 4)
    assert reply.tpot == (reply.latency - reply.ttft) / 4
    assert (reply.prompt_tokens, reply.output_tokens, reply.events) == (3, 5, 5)
    assert reply.text == " w0 w1 w2 w3 w4"
    assert reply.fathom == {"kept_tokens": 3}


def test_a_batch_runs_at_once(url):
    together[:] = 0, 0
    replies = ask(url, [[1], [2, 3], [4, 5, 6]])
    assert [reply.prompt_tokens for reply in replies] == [1, 2, 3]
    assert together == [0, 3]


def test_the_request_is_greedy_and_carries_the_extra_members():
    body = json.loads(client.request_body([1, 2], 7, {"fathom": {"preset": "exact"}}))
    assert body["prompt"] == [1, 2] and body["max_tokens"] == 7
    assert body["temperature"] == 0 and body["ignore_eos"] is True
    assert body["fathom"] == {"preset": "exact"}


@pytest.mark.parametrize(
    ("say", "message"),
    [
        ("refuse", "answered 400.*no such field"),
        ("error", "out of memory"),
        ("no usage", "without tokens or usage"),
        ("fewer", r"counted 1 \+ 4 tokens, asked were 1 \+ 5"),
    ],
)
def test_what_is_not_the_answer_asked_for_is_an_error(url, say, message):
    with pytest.raises(BenchError, match=message):
        ask(url, [[1]], {"say": say})


def test_a_request_is_bounded(url):
    with pytest.raises(BenchError, match=r"took over 0\.1 s"):
        ask(url, [[1]], limit=0.1)


def test_a_dead_server_is_an_error():
    with pytest.raises(BenchError, match="ConnectError"):
        ask(f"http://127.0.0.1:{free_port()}", [[1]])
