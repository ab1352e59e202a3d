"""Routes that generate under the server's default policy: a wish for another is refused, all else is handed on."""

import pytest

from fathom.server.routes import GENERATES, GENERATION_ROUTES, OLLAMA

BY_DEFAULT = [*(set(GENERATES) - set(GENERATION_ROUTES)), "/api/chat/"]


@pytest.mark.parametrize("path", sorted(BY_DEFAULT))
def test_a_policy_is_refused_where_none_can_be_asked_for(path, client):
    caller = client((0, b"{}"))
    reply = caller.call(path, {"model": "m", "fathom": {"preset": "exact"}})
    told = reply.json["error" if path.rstrip("/") in OLLAMA else "message"]
    assert reply.status == 400 and not caller.inner.bodies
    assert told.startswith("fathom cannot be had on this route") and all(r in told for r in GENERATION_ROUTES)
    for raw in (b'{ "model" : "m",\n "fathom": null}', b"[1]", b'{"bad', b"\xff", b""):
        caller = client((0, b"{}"))
        assert caller.call(path, raw, parts=[raw[:3], raw[3:]]).status == 200
        assert caller.inner.bodies == [raw] and caller.inner.policies == [None]
