"""Compressed bodies (``SGLANG_ENABLE_REQUEST_DECOMPRESSION``) are bounded as others are, as sent and as read.

SGLang decompresses in front of every limit: a body of 33 KB was 1 GiB in memory, twice.
"""

import asyncio
import io
from functools import partial
from typing import Any

from fastapi import FastAPI
from starlette.datastructures import Headers
from starlette.middleware import Middleware

from fathom.server.middleware import ClientGone, read_body, replay, send_error, with_length
from fathom.server.requests.refusals import RequestError
from fathom.server.routes import path_of

HEADER = "x-body-compressed"
KIND = "zstd"


def take(app: FastAPI) -> bool:
    """Take SGLang's middleware away from an application that has not started; whether it had it."""
    found = [
        each
        for each in app.user_middleware
        if getattr(each.cls, "__name__", "") == "RequestDecompressionMiddleware"
    ]
    for each in found:
        app.user_middleware.remove(each)
    return bool(found)


def bounded(limit: int) -> Middleware:
    """Ours, whose place is behind what bounds the bodies that are sent."""
    return Middleware(Decompression, limit=limit)


class Decompression:
    """ASGI middleware.

    Args:
        limit: bytes that a body may have.
    """

    def __init__(self, app: Any, limit: int):
        self._app, self._limit = app, limit

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        kind = Headers(scope=scope).get(HEADER) if scope["type"] == "http" else None
        if kind is None:
            await self._app(scope, receive, send)
            return
        try:
            if kind != KIND:
                raise RequestError(400, f"{HEADER} must be {KIND}, got {kind[:40]!r}")
            body = await read_body(receive)
            decompress = partial(decompressed, body, self._limit)
            body = await asyncio.get_running_loop().run_in_executor(None, decompress)
        except ClientGone:
            return
        except RequestError as error:
            await send_error(path_of(scope), error, send)
            return
        headers = [(name, value) for name, value in scope["headers"] if name.lower() != HEADER.encode()]
        await self._app(with_length({**scope, "headers": headers}, len(body)), replay(body, receive), send)


def decompressed(body: bytes, limit: int) -> bytes:
    """A body as it was before it was compressed.

    Raises:
        RequestError: 400 for what is not compressed so, 413 for more bytes than the limit.
    """
    import zstandard

    try:
        whole: bytes = zstandard.ZstdDecompressor().stream_reader(io.BytesIO(body)).read(limit + 1)
    except zstandard.ZstdError:
        raise RequestError(400, f"the request body is not compressed as {HEADER} says") from None
    if len(whole) > limit:
        raise RequestError(413, f"the request body is larger than the limit of {limit} bytes")
    return whole
