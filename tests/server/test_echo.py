"""What is changed in a stream besides the account that is put into it."""

import json
import re
import time

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fathom.runtime.config import Policy
from fathom.server.context import CURRENT, RequestContext
from fathom.server.echo import EventEcho
from fathom.server.routes import GENERATE, RESPONSES


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
