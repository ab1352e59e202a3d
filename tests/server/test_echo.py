"""What is changed in a stream besides the account that is put into it."""

import json

import pytest

from fathom.server.context import CURRENT
from fathom.server.routes import RESPONSES


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
