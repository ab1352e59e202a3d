"""``X-Request-Id``: on every answer, the client's own where it is sane, and a new one where it is not."""

import asyncio
import logging

import httpx
import pytest
from fastapi import FastAPI, Request
from hypothesis import given
from hypothesis import strategies as st

from fathom.server.requests import request_ids

app = FastAPI()
request_ids.install(app)


@app.get("/told")
async def told(request: Request):
    return request.headers.getlist("x-request-id")


@app.get("/broken")
async def broken():
    raise RuntimeError("broken")


def get(path, headers):
    async def once():
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            return await client.get(path, headers=headers)

    return asyncio.run(once())


@given(
    own=st.lists(
        st.binary(max_size=520) | st.text(st.characters(min_codepoint=32, max_codepoint=126)).map(str.encode)
    )
)
def test_a_sane_name_stays_and_any_other_is_a_new_one(own):
    reply = get("/told", [(b"X-Request-Id", value) for value in own])
    (name,) = reply.headers.get_list("x-request-id")
    assert reply.json() == [name]
    sane = own and 0 < len(own[0]) <= 512 and all(32 <= code <= 126 for code in own[0])
    if sane:
        assert name.encode() == own[0]
    else:
        assert len(name) == 32 and name != get("/told", []).headers["x-request-id"]


@pytest.mark.parametrize(("path", "status"), [("/broken", 500), ("/nowhere", 404)])
def test_an_error_has_it_too_and_the_log_names_the_one_that_only_the_log_explains(path, status, caplog):
    with caplog.at_level(logging.ERROR):
        reply = get(path, {"x-request-id": "of the gateway"})
    assert (reply.status_code, reply.headers["x-request-id"]) == (status, "of the gateway")
    assert ("of the gateway" in caplog.text) == (status == 500)
