"""Compressed bodies are read as they were before, and are no larger than any other."""

import asyncio
import tracemalloc

import pytest
import zstandard
from fastapi import FastAPI
from starlette.middleware import Middleware

from fathom.server.requests import decompression

LIMIT = 1 << 20


def call(body, kind="zstd"):
    """What the application read, the headers it saw, and the status of an answer from before it."""
    read, seen, statuses = [], [], []

    async def app(scope, receive, send):
        read.append((await receive())["body"])
        seen.extend(scope["headers"])

    async def receive():
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message):
        statuses.extend([message["status"]] if "status" in message else [])

    headers = [(b"content-length", b"%d" % len(body)), (b"host", b"h")]
    if kind is not None:
        headers.append((b"x-body-compressed", kind.encode()))
    scope = {"type": "http", "method": "POST", "path": "/generate", "headers": headers}
    asyncio.run(decompression.Decompression(app, LIMIT)(scope, receive, send))
    return read, dict(seen), statuses


def compressed(data):
    return zstandard.ZstdCompressor().compress(data)


@pytest.mark.parametrize("data", [b"", b"{}", b"x" * LIMIT])
def test_what_fits_is_handed_on(data):
    read, headers, statuses = call(compressed(data))
    assert (read, statuses) == ([data], [])
    assert headers == {b"host": b"h", b"content-length": b"%d" % len(data)}
    assert call(data, None)[0] == [data]


def test_what_does_not_is_not_even_held():
    bomb = compressed(bytes(64 * LIMIT))
    tracemalloc.start()
    try:
        assert call(bomb) == ([], {}, [413])
        assert tracemalloc.get_traced_memory()[1] < 8 * LIMIT
    finally:
        tracemalloc.stop()
    assert call(compressed(b"x" * (LIMIT + 1)))[2] == [413]


@pytest.mark.parametrize(("body", "kind"), [(b"junk", "zstd"), (b"{}", "gzip"), (b"{}", "")])
def test_what_cannot_be_read_is_the_clients_mistake(body, kind):
    assert call(body, kind) == ([], {}, [400])


def test_it_takes_sglangs_place():
    from sglang.srt.entrypoints.http_request_decompression import RequestDecompressionMiddleware

    app = FastAPI(middleware=[Middleware(RequestDecompressionMiddleware)])
    assert decompression.take(app)
    assert not app.user_middleware and not decompression.take(app)
