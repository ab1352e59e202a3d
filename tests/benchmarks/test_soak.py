"""What counts as which outcome, against a server that misbehaves as told; and a small soak of the demo pair."""

import asyncio
import json
import re
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

from fathom.benchmarks import soak
from fathom.benchmarks.client import BenchError, open_client
from fathom.benchmarks.servers import free_port
from fathom.benchmarks.soak_client import STAGES, Case, Outcome, run_case

FATHOM = {
    "prompt_tokens": 10,
    "kept_tokens": 10,
    "deep_tokens": 10,
    "retained_tokens": 10,
    "propagated_tokens": None,
    "draft_tokens": 0,
    "accepted_tokens": 0,
    "fast_steps": 0,
}
CASE = Case(1, "dense", {}, [{"role": "user", "content": "fine"}], 4)


def event(data) -> bytes:
    return f"data: {json.dumps(data)}\n\n".encode()


async def words(say):
    if say == "silent":
        await asyncio.sleep(5)
    for word in ("one", " two", " three"):
        yield event({"choices": [{"index": 0, "delta": {"content": word}}]})
    if say == "stalls":
        await asyncio.sleep(5)
    if say == "error":
        yield event({"error": {"message": "out of memory"}})
        return
    account = {} if say == "no account" else {"fathom": FATHOM}
    yield event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}], **account})
    if say != "no end":
        yield b"data: [DONE]\n\n"


async def chat(request):
    say = (await request.json())["messages"][0]["content"]
    if say.startswith("status"):
        _, status, message = say.split(" ", 2)
        return JSONResponse({"message": message}, status_code=int(status))
    return StreamingResponse(words(say), media_type="text/event-stream")


@pytest.fixture(scope="module")
def url():
    port = free_port()
    app = Starlette(routes=[Route("/v1/chat/completions", chat, methods=["POST"])])
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="error"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        assert thread.is_alive()
    yield f"http://127.0.0.1:{port}"
    server.should_exit = True
    server.force_exit = True
    thread.join()


def run(url, say, limit=4.0, **members):
    async def go():
        case = replace(CASE, messages=[{"role": "user", "content": say}], **members)
        async with open_client(url) as client:
            return await run_case(client, "any", case, limit)

    return asyncio.run(go())


def test_a_whole_answer(url):
    outcome = run(url, "fine")
    assert (outcome.kind, outcome.text, outcome.fathom) == ("finished", "one two three", FATHOM)
    assert 0 < outcome.ttft <= outcome.seconds


@pytest.mark.parametrize(
    ("say", "members", "detail"),
    [
        ("silent", {"patience": 0.3}, STAGES[0]),
        ("stalls", {"patience": 0.3}, STAGES[1]),
        ("stalls", {"leave_after": 1}, STAGES[1]),
    ],
)
def test_a_client_that_leaves(url, say, members, detail):
    outcome = run(url, say, **members)
    assert (outcome.kind, outcome.detail) == ("aborted", detail)


@pytest.mark.parametrize(
    ("say", "detail"),
    [
        ("silent", "no whole answer in 0.3 s"),
        ("error", "failed in mid-stream"),
        ("no account", "without the fathom object"),
        ("no end", r"without \[DONE\]"),
        ("status 500 internal error", "status 500: internal error"),
        ("status 400 longer than the context", "status 400"),
    ],
)
def test_failures(url, say, detail):
    outcome = run(url, say, limit=0.3)
    assert outcome.kind == "failed"
    assert re.search(detail, outcome.detail)


def test_a_prompt_over_the_context_is_to_be_refused(url):
    assert run(url, "status 400 longer than the context", too_long=True).kind == "refused"
    assert run(url, "status 500 longer than the context", too_long=True).kind == "failed"
    assert run(url, "fine", too_long=True).kind == "failed"


def answered(policy, **counts):
    case = replace(CASE, fathom=policy)
    return case, Outcome("finished", fathom=FATHOM | counts)


def test_a_mechanism_that_never_ran_is_an_error():
    speed, drafted = answered({"depth_cutoff": 2}, deep_tokens=2), answered({"speculative": True})
    assert soak.proofs(SimpleNamespace(outcomes=[speed]))["depth_cutoff"] == 1
    with pytest.raises(BenchError, match=r"^speculative: asked for"):
        soak.proofs(SimpleNamespace(outcomes=[speed, drafted]))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--requests", "0"], "--requests must be above 0, got 0"),
        (["--aborted", "1.5"], r"--aborted must be in \[0, 1\], got 1.5"),
        (["--in-flight", "-1"], "--in-flight must be above 0, got -1"),
    ],
)
def test_illegal_numbers_are_named(arguments, message, capsys):
    assert soak.main(arguments) == 2
    assert re.search(message, capsys.readouterr().err)


def test_a_small_soak_of_the_demo_pair(tmp_path, monkeypatch, capsys):
    """Every eighth case is a probe at least: 40 cases hold each policy several times."""
    monkeypatch.setattr(soak, "CONTEXTS", (150,))
    out = tmp_path / "soak.json"
    flags = ["--requests", "40", "--in-flight", "6", "--memory-mib", "400", "--cache", str(tmp_path)]
    assert soak.main([*flags, "--out", str(out)]) == 0, capsys.readouterr().err
    result = json.loads(out.read_text())
    assert sum(result["outcomes"].values()) == result["requests"] == 40
    assert {"finished", "aborted", "refused"} == set(result["outcomes"])
    assert result["dense_answers_compared"] > 0
    assert all(
        result["proofs"][name] > 0 for name in ("prefill_keep_rate", "speculative", "decode", "depth_cutoff")
    )
