"""What is changed in a stream besides the account that is put into it."""

import json
import re
import time

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fathom.runtime.config import Policy
from fathom.server.answers.echo import EventEcho, with_stop
from fathom.server.requests.context import CURRENT, RequestContext
from fathom.server.routes import CHAT, COMPLETIONS, GENERATE, GENERATION_ROUTES, MESSAGES, RESPONSES


def echo_of_a_generation():
    return EventEcho(RequestContext(GENERATE, Policy(), 0.0))


@given(parts=st.lists(st.text("a\n\r", max_size=6), max_size=8))
def test_every_complete_event_is_forwarded_at_once(parts):
    echo, stream, sent = echo_of_a_generation(), b"", b""
    for part in parts:
        stream += part.encode()
        sent += echo.feed(part.encode(), more=True)
        ends = [found.end() for found in re.finditer(rb"\r?\n\r?\n", stream)]
        assert sent == stream[: max(ends, default=0)]
    assert sent + echo.feed(b"", more=False) == stream


def test_an_event_costs_no_more_than_to_read_it():
    """Each event of a stream of this route has all of the text so far."""
    meta = {"id": "7", "finish_reason": None}
    event = b"data: " + orjson.dumps({"text": "forty two, " * 20_000, "meta_info": meta}) + b"\n\n"

    def fastest(work):
        found = []
        for _ in range(9):
            began = time.process_time_ns()
            work()
            found.append(time.process_time_ns() - began)
        return min(found)

    echo = echo_of_a_generation()
    assert fastest(lambda: echo.feed(event, more=True)) < 4 * fastest(lambda: orjson.loads(event[6:]))


@pytest.mark.parametrize("reported", [True, False])
def test_a_response_that_failed_shows_no_source(reported, client, finished):
    error = {"code": "server_error", "message": "no: [20:14:18] /project/cpp/grammar.cc:2999: bad type\n"}
    event = {"type": "response.failed", "response": {"id": "resp_7", "error": error}}

    async def script():
        CURRENT.get().expected += 1
        if reported:
            finished()
        yield f"event: response.failed\ndata: {json.dumps(event)}\n\n".encode()

    (told,) = client(script).call(RESPONSES, {}).events
    assert told["response"]["error"] == {"code": "server_error", "message": "no: bad type"}
    assert ("fathom" in told) == reported


@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize(
    ("matched", "reason", "told"),
    [
        ("STOP", "end_turn", ("stop_sequence", "STOP")),
        ("STOP", "tool_use", ("tool_use", None)),
        ("</turn>", "end_turn", ("end_turn", None)),
        (2, "end_turn", ("end_turn", None)),
        (None, "max_tokens", ("max_tokens", None)),
    ],
)
def test_a_stop_sequence_takes_the_place_of_the_end_of_a_turn(matched, reason, told, streamed):
    """If it is the client's, and not one of a template or of the operator."""
    context = RequestContext(MESSAGES, Policy(), 0.0, stops=["more", "STOP"])
    context.collect({"meta_info": {"id": "a", "finish_reason": {"type": "stop", "matched": matched}}})
    end = {"stop_reason": reason}
    content = json.loads(with_stop(json.dumps({"delta": end} if streamed else end).encode(), context))
    end = content["delta"] if streamed else content
    assert (end["stop_reason"], end.get("stop_sequence")) == told


@pytest.mark.parametrize("path", GENERATION_ROUTES)
def test_stop_sequences_are_those_of_a_message(path, client, finished):
    body = {"model": "m", "stop_sequences": ["more", "STOP"]}

    async def script():
        context = CURRENT.get()
        context.expected += 1
        finished()
        context.stopped_by = "STOP"
        yield b'event: message_delta\ndata: {"delta": {"stop_reason": "end_turn"}}\n\n'

    (told,) = client(script).call(path, body).events
    ended = ("stop_sequence", "STOP") if path == MESSAGES else ("end_turn", None)
    assert (told["delta"]["stop_reason"], told["delta"].get("stop_sequence")) == ended


TEXT = b'data: {"id": "c", "choices": [{"index": 0, "delta": {"content": "x"}}]}\n\n'
END = b'data: {"id": "c", "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}\n\n'
ERROR = b'data: {"error": {"message": "max_new_tokens must be less"}}\n\n'
DONE = b"data: [DONE]\n\n"


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, GENERATE])
def test_nothing_follows_an_error_in_a_stream(path, client, finished):
    """Also where another generation of the request has an account."""

    async def script():
        CURRENT.get().expected += 2
        yield TEXT
        finished()
        yield ERROR
        yield DONE

    text, error, done = client(script).call(path, {}).events
    assert text == json.loads(TEXT[6:]) and done == "[DONE]"
    name = "max_new_tokens" if path == GENERATE else "max_tokens"
    assert error == {"error": {"message": f"{name} must be less"}}


def test_the_object_waits_for_the_end_of_every_generation(client, finished, fathom_object):
    """However often one of them is said to have ended."""

    async def script():
        CURRENT.get().expected += 2
        finished(0)
        yield END
        yield END
        yield END
        finished(1)
        yield END

    *before, last = client(script).call(CHAT, {}).events
    assert not any("fathom" in event for event in before)
    assert last["fathom"] == fathom_object(2)
