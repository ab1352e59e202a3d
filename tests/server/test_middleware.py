"""The middleware against an application that speaks each route's formats."""

import asyncio
import json

import pytest
from envelopes import message_of
from hypothesis import given
from hypothesis import strategies as st

from fathom.runtime.config import Policy
from fathom.server.answers.echo import splice
from fathom.server.requests.admission import AdmissionMiddleware, Gate
from fathom.server.requests.context import CURRENT, Face, merge
from fathom.server.routes import (
    CHAT,
    COMPLETIONS,
    GENERATE,
    GENERATION_ROUTES,
    MESSAGES,
    OLLAMA,
    PROBES,
    RESPONSES,
    TEXT_ROUTES,
)

ANSWERS = {
    CHAT: b'{"id":"c","choices":[{"finish_reason":"stop"}]}',
    COMPLETIONS: b'{"id":"c","choices":[{"text":"x","finish_reason":"stop"}]} \n',
    RESPONSES: b'{"id":"resp_1","status":"completed","output":[]}',
    MESSAGES: b'{"id":"m","type":"message"}',
    GENERATE: b'{"text":"x","meta_info":{"id":"rid0"}}',
}


def chat(index, finish_reason=None, text="x"):
    choice = {"index": index, "delta": {"content": text}, "finish_reason": finish_reason}
    chunk = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]}
    return b"data: " + json.dumps(chunk, separators=(",", ":")).encode() + b"\n\n"


def named(name, **members):
    return f"event: {name}\ndata: {json.dumps({'type': name, **members})}\n\n".encode()


DONE = b"data: [DONE]\n\n"


def expect(n):
    CURRENT.get().expected += n


@pytest.mark.parametrize("path", GENERATION_ROUTES)
def test_a_json_answer_gets_the_object_and_nothing_else_changes(path, client, fathom_object):
    caller = client((1, ANSWERS[path]))
    reply = caller.call(path, {"model": "m", "fathom": {"preset": "exact"}})
    assert reply.json == json.loads(ANSWERS[path]) | {"fathom": fathom_object()}
    assert reply.body.startswith(ANSWERS[path].rstrip()[:-1])
    assert json.loads(caller.inner.bodies[0]) == {"model": "m"}
    assert dict(caller.inner.scopes[0]["headers"])[b"content-length"] == b"%d" % len(caller.inner.bodies[0])
    assert caller.inner.policies == [Policy()]
    assert CURRENT.get() is None


@pytest.mark.parametrize("path", GENERATION_ROUTES)
def test_a_body_without_a_policy_passes_byte_for_byte(path, client):
    raw = b'{ "model" : "m",\n "temperature": 1.50 }'
    caller = client((1, ANSWERS[path]))
    caller.call(path, raw, parts=[raw[:7], raw[7:]])
    assert caller.inner.bodies == [raw]


@pytest.mark.parametrize("path", GENERATION_ROUTES)
def test_what_a_request_says_of_its_model_and_its_answer(path, client):
    """A response needs no model, and chats and completions have a default; a schema of this form is a message's."""
    seen = []
    caller = client((1, ANSWERS[path]))
    caller.app._model_name = "served"
    schema = {"output_config": {"format": {"type": "json_schema", "schema": {"type": "null"}}}}
    for model in ({}, {"model": None}, {"model": "m"}, {"model": 5}):
        body = model | schema
        caller.call(path, body, on_chunk=lambda _: seen.append(CURRENT.get()))
        named = {"model": "served"} if path == RESPONSES and model.get("model") is None else model
        if path in (CHAT, COMPLETIONS) and model.get("model") is None:
            named = {}
        assert json.loads(caller.inner.bodies.pop()) == schema | named
    assert [context.model for context in seen] == ["", "", "m", ""]
    assert {context.json_schema for context in seen} == {'{"type":"null"}' if path == MESSAGES else ""}


@pytest.mark.parametrize("path", [CHAT, GENERATE])
def test_a_body_that_came_in_pieces_is_handed_on_with_its_length(path, client):
    raw = b'{"model": "m"}'
    caller = client((1, ANSWERS[path]))
    caller.call(path, raw, "PUT", parts=[raw[:3], raw[3:]], headers=[(b"Transfer-Encoding", b"chunked")])
    assert caller.inner.scopes[0]["headers"] == [(b"content-length", b"%d" % len(raw))]
    assert caller.inner.policies == [Policy()]


@pytest.mark.parametrize("path", PROBES)
def test_a_probe_without_a_body_is_one_with_it(path, client):
    caller = client((0, b"{}"))
    for method in ("HEAD", "GET", "POST"):
        caller.call(path, b"", method)
    assert [scope["method"] for scope in caller.inner.scopes] == ["GET", "GET", "POST"]


@pytest.mark.parametrize("path", [*GENERATION_ROUTES, CHAT + "/"])
@pytest.mark.parametrize("raw", [b'{"bad', b"", b"[]", b"3", b'"x"', b"\xff", b'{"a":' * 2000])
def test_what_is_no_json_object_is_a_400(path, raw, client):
    caller = client((1, b"{}"))
    reply = caller.call(path, raw)
    assert reply.status == 400
    assert not caller.inner.bodies
    assert "the request body" in message_of(path, reply.json)


@pytest.mark.parametrize("path", GENERATION_ROUTES)
@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ({"prefill_keep_rate": 1.7}, 'fathom.prefill_keep_rate must be in (0, 1] or "auto", got 1.7'),
        (
            {"decode": "slow"},
            'fathom.decode must be one of "slow_fast", "full", got "slow"',
        ),
        ("turbo", 'fathom must be an object, got "turbo"'),
    ],
)
def test_an_illegal_policy_is_a_400_in_the_routes_format(path, policy, message, client):
    caller = client((1, b"{}"))
    reply = caller.call(path, {"fathom": policy})
    assert reply.status == 400
    assert message_of(path, reply.json) == message
    assert not caller.inner.bodies


@pytest.mark.parametrize("path", GENERATION_ROUTES)
@pytest.mark.parametrize("declared", [True, False])
def test_a_body_over_the_limit_is_a_413(path, declared, client):
    caller = client((1, b"{}"))
    caller.app = AdmissionMiddleware(caller.app, Gate(max_body_bytes=100))
    headers = None if declared else [(b"transfer-encoding", b"chunked")]
    reply = caller.call(path, b"", parts=[b'{"a":"', b"x" * 99, b'"}'], headers=headers)
    if declared:
        reply = caller.call(path, b'{"a":"' + b"x" * 99 + b'"}')
    assert reply.status == 413
    assert "larger than the limit of 100 bytes" in message_of(path, reply.json)
    assert not caller.inner.bodies


def test_a_client_that_leaves_while_sending_is_forgotten(client):
    caller = client((1, b"{}"))
    scope = {"type": "http", "method": "POST", "path": CHAT, "headers": []}

    async def receive():
        return {"type": "http.disconnect"}

    async def send(message):
        raise AssertionError(message)

    asyncio.run(caller.app(scope, receive, send))
    assert not caller.inner.bodies


@pytest.mark.parametrize(
    ("method", "path"), [("GET", CHAT), ("POST", "/v1/embeddings"), ("POST", CHAT + "/x")]
)
def test_other_requests_pass_untouched(method, path, client):
    caller = client((0, b'{"a":1}'))
    reply = caller.call(path, b"not json", method=method)
    assert caller.inner.bodies == [b"not json"]
    assert reply.json == {"a": 1}


STOCK_ERRORS = [
    {"object": "error", "message": "Bad x.", "type": "400", "param": "x", "code": 400},
    {"error": {"message": "Bad x.", "type": "BadRequest", "param": "x", "code": 400}},
    {"error": {"message": "Bad x.", "param": "x"}},
    {"type": "error", "error": {"type": "BadRequest", "message": "Bad x.", "param": "x"}},
]


@pytest.mark.parametrize("path", GENERATION_ROUTES)
@pytest.mark.parametrize("error", STOCK_ERRORS)
def test_every_error_of_a_route_has_the_routes_one_format(path, error, client):
    reply = client((0, json.dumps(error).encode()), status=400).call(path, {})
    assert reply.status == 400
    assert message_of(path, reply.json) == "Bad x."
    assert path == MESSAGES or "x" in (reply.json.get("param"), reply.json.get("error", {}).get("param"))


@pytest.mark.parametrize("method", ["GET", "POST"])
@pytest.mark.parametrize("path", ["/update_weights_from_disk", "/get_weights_by_name"])
def test_packed_weights_are_neither_changed_nor_read(path, method, client):
    reply = client((0, b"{}"), Face(packed_weights=True)).call(path, {}, method)
    assert reply.status == 400
    assert "packed for the CPU" in reply.json["message"]
    assert client((0, b"{}")).call(path, {}, method).status == 200


@pytest.mark.parametrize("path", GENERATION_ROUTES)
def test_an_internal_error_tells_nothing(path, client):
    reply = client((0, b'{"message":"no attribute foo"}'), status=500).call(path, {})
    assert reply.status == 500
    assert b"foo" not in reply.body and b"internal error" in reply.body


def test_an_error_inside_a_stream_shows_no_source(client):
    async def script():
        yield b'data: {"error":{"message":"[13:26:58] /project/cpp/grammar.cc:29: bad schema\\n"}}\n\n'
        yield b'event: error\ndata: {"type":"error","error":{"message":"File \\"/b.py\\", line 3: bad"}}\n\n'

    first, second = client(script).call(MESSAGES, {}).events
    assert first == {"error": {"message": "bad schema"}}
    assert second == {"type": "error", "error": {"message": "bad"}}


def test_several_generations_are_summed(client, fathom_object):
    assert client((3, ANSWERS[CHAT])).call(CHAT, {}).json["fathom"] == fathom_object(3)


def test_a_batch_gets_one_object_per_item(client, fathom_object):
    items = [{"text": "a", "meta_info": {"fathom": {"kept_tokens": n}}} for n in (1, 2)]
    reply = client((2, json.dumps(items).encode())).call(GENERATE, {})
    assert [item["fathom"] for item in reply.json] == [
        {"preset": "exact", "kept_tokens": n, "generations": 1} for n in (1, 2)
    ]


def test_merging_keeps_what_agrees_and_sums_what_counts():
    one = {
        "a": 1,
        "b": 0.5,
        "same": "x",
        "flag": True,
        "other": "y",
        "policy": {"k": 1},
        "first_token_time": 9.0,
        "longest_burst": 4,
    }
    other = one | {"a": 2, "other": "z", "longest_burst": 3}
    expected = {
        "a": 3,
        "b": 1.0,
        "longest_burst": 4,
        "same": "x",
        "flag": True,
        "policy": {"k": 1},
        "generations": 2,
    }
    assert merge([one, other]) == expected


@given(st.dictionaries(st.text(), st.integers() | st.text(), max_size=3), st.sampled_from(["", " ", "\n"]))
def test_splicing_adds_one_member(members, space):
    text = (space + json.dumps(members) + space).encode()
    assert json.loads(splice(text, {"k": 1})) == members | {"fathom": {"k": 1}}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, GENERATE])
@pytest.mark.parametrize("pieces", [1, 3, 1000])
def test_the_finishing_chunk_carries_the_object_however_it_is_cut(
    path, pieces, client, finished, fathom_object
):
    async def script():
        expect(1)
        yield chat(0, text='say "finish_reason":"stop"')
        finished()
        data = chat(0, finish_reason="stop") + DONE
        size = max(1, len(data) // pieces)
        for start in range(0, len(data), size):
            yield data[start : start + size]

    events = client(script).call(path, {}).events
    assert "fathom" not in events[0]
    assert events[1]["fathom"] == fathom_object()
    assert events[2] == "[DONE]" and len(events) == 3


def test_two_generations_are_told_once_in_the_last_finishing_chunk(client, finished, fathom_object):
    async def script():
        expect(2)
        yield chat(1)
        finished(1)
        yield chat(1, "stop")
        yield chat(0)
        finished(0)
        yield chat(0, "length")
        yield DONE

    events = client(script).call(COMPLETIONS, {}).events
    assert [isinstance(event, dict) and "fathom" in event for event in events] == [
        False,
        False,
        False,
        True,
        False,
    ]
    assert events[3]["fathom"] == fathom_object(2)


def test_chat_finishing_chunks_that_come_together(client, finished, fathom_object):
    async def script():
        expect(2)
        finished(0)
        finished(1)
        yield chat(0, "stop") + chat(1, "stop") + DONE

    events = client(script).call(CHAT, {}).events
    assert "fathom" not in events[0] and events[1]["fathom"] == fathom_object(2)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_stream_without_a_finishing_chunk_gets_one_of_its_own(path, client, finished, fathom_object):
    async def script():
        expect(1)
        yield chat(0)
        finished()
        yield DONE

    events = client(script).call(path, {}).events
    frame = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": []}
    assert events[1:] == [frame | {"fathom": fathom_object()}, "[DONE]"]


def test_a_stream_that_failed_is_left_alone(client, finished):
    async def script():
        expect(1)
        yield b'data: {"error":{"message":"x"}}\n\n'
        yield DONE

    assert client(script).call(CHAT, {}).events == [{"error": {"message": "x"}}, "[DONE]"]


@pytest.mark.parametrize("terminal", ["message_delta", "message_stop"])
def test_messages(terminal, client, finished, fathom_object):
    async def script():
        expect(1)
        yield named("content_block_delta", delta={"text": "event: message_delta"})
        finished()
        yield named(terminal)
        yield named("message_stop")

    events = client(script).call(MESSAGES, {}).events
    assert "fathom" not in events[0] and "fathom" not in events[2]
    assert events[1] == {"type": terminal, "fathom": fathom_object()}


@pytest.mark.parametrize("terminal", ["response.completed", "response.incomplete", "response.failed"])
def test_responses(terminal, client, finished, fathom_object):
    async def script():
        expect(1)
        yield named("response.output_text.delta", delta="x")
        finished()
        yield named(terminal, response={"id": "resp_7"})

    caller = client(script)
    events = caller.call(RESPONSES, {}).events
    assert "fathom" not in events[0]
    assert events[1]["fathom"] == events[1]["response"]["fathom"] == fathom_object()
    caller.inner.script = (0, b'{"id":"resp_7"}')
    assert caller.call(RESPONSES + "/resp_7", b"", method="GET").json["fathom"] == fathom_object()
    assert "fathom" not in caller.call(RESPONSES + "/resp_8", b"", method="GET").json


def test_a_background_response_tells_when_it_is_retrieved(client, fathom_object):
    caller = client((0, b'{"id":"resp_1","status":"queued"}'))
    later = []

    def keep(chunk):
        later.append(CURRENT.get())

    assert "fathom" not in caller.call(RESPONSES, {"background": True}, on_chunk=keep).json
    later[0].collect(
        {"meta_info": {"id": "r", "finish_reason": {"type": "stop"}, "fathom": {"kept_tokens": 4}}}
    )
    caller.inner.script = (0, b'{"id":"resp_1","status":"completed"}')
    reply = caller.call(RESPONSES + "/resp_1", b"", method="GET")
    assert reply.json["fathom"] == {"preset": "exact", "kept_tokens": 4, "generations": 1}


def test_the_accounts_of_the_last_responses_are_kept(client, monkeypatch, fathom_object):
    monkeypatch.setattr("fathom.server.middleware.STORED", 2)
    caller = client(None)
    for name in "abc":
        caller.inner.script = (1, b'{"id":"resp_%s"}' % name.encode())
        caller.call(RESPONSES, {"model": "m"})
    for name in "abc":
        caller.inner.script = (0, b'{"id":"resp_%s"}' % name.encode())
        told = caller.call(f"{RESPONSES}/resp_{name}", b"", "GET").json
        assert told.get("fathom") == (None if name == "a" else fathom_object())


@pytest.mark.parametrize("path", [CHAT, GENERATE])
def test_a_packed_answer_is_left_alone(path, client):
    """Whoever packed it, its bytes are no JSON."""

    async def app(scope, receive, send):
        await receive()
        expect(1)
        headers = [(b"content-type", b"application/json"), (b"content-encoding", b"gzip")]
        await send({"type": "http.response.start", "status": 400, "headers": headers})
        await send({"type": "http.response.body", "body": b"\x1f\x8b"})

    caller = client(None)
    caller.app._app = app
    assert caller.call(path, {"model": "m"}).body == b"\x1f\x8b"


@pytest.mark.parametrize("path", GENERATION_ROUTES)
def test_nothing_is_held_back(path, client, finished):
    """Each event must have left before the next one is made."""
    seen = asyncio.Event()

    async def script():
        expect(1)
        for number in range(5):
            seen.clear()
            yield chat(0, text=str(number)) if path != MESSAGES else named("content_block_delta", n=number)
            await asyncio.wait_for(seen.wait(), 1)
        finished()
        yield DONE

    caller = client(script)
    events = caller.call(path, {"stream": True}, on_chunk=lambda chunk: chunk and seen.set()).events
    assert len(events) >= 6


def test_the_engine_still_learns_that_the_client_left(client):
    async def script():
        yield b""

    caller = client(script)
    read = []

    async def app(scope, receive, send):
        read.append((await receive())["type"])
        read.append((await receive())["type"])

    caller.app._app = app
    caller.call(CHAT, {})
    assert read == ["http.request", "http.disconnect"]


def test_requests_in_parallel_keep_their_own_policy(client, fathom_object):
    """Contexts must not leak between tasks."""
    seen = {}

    async def app(scope, receive, send):
        body = json.loads((await receive())["body"])
        before = CURRENT.get()
        await asyncio.sleep(0.01 * body["number"])
        assert CURRENT.get() is before
        seen[body["number"]] = before

    caller = client((0, b"{}"))
    caller.app._app = app

    async def one(n):
        raw = json.dumps({"number": n}).encode()

        async def receive():
            return {"type": "http.request", "body": raw}

        await caller.app({"type": "http", "method": "POST", "path": CHAT, "headers": []}, receive, None)

    async def everyone():
        await asyncio.gather(*(one(n) for n in range(5)))

    asyncio.run(everyone())
    assert len({id(context) for context in seen.values()}) == 5

    async def one_after_the_other():
        for number in range(2):
            await one(number)
            assert CURRENT.get() is None

    asyncio.run(one_after_the_other())


@pytest.mark.parametrize("path", TEXT_ROUTES)
def test_a_server_without_a_tokenizer_says_so(path, client):
    caller = client((1, b"{}"), Face(tokenizes=False))
    reply = caller.call(path, {"model": "m", "prompt": [5]})
    assert reply.status == 400 and not caller.inner.bodies
    told = reply.json["error"] if path in OLLAMA else message_of(path, reply.json)
    assert "--skip-tokenizer-init" in told
    assert caller.call(GENERATE, {"input_ids": [5]}).status == 200


def test_these_are_routes_of_sglangs():
    from sglang.srt.entrypoints.http_server import app

    assert {*TEXT_ROUTES, *PROBES} <= {getattr(route, "path", None) for route in app.routes}
