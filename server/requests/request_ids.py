"""The name by which a client, or a gateway, and the operator know an HTTP request: ``X-Request-Id``."""

import logging
import uuid
from typing import Any

from fastapi import FastAPI

NAME = b"x-request-id"
LONGEST = 512
"""Characters, as many as OpenAI takes."""

logger = logging.getLogger(__name__)


class RequestIds:
    """ASGI application around another one: its requests and its answers have the header.

    The engine knows nothing of it, and each generation by its ``rid``: two requests may have the same name.
    """

    def __init__(self, app: Any):
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        name = name_of(scope["headers"])

        async def sent(message: Any) -> None:
            if message["type"] == "http.response.start":
                if message["status"] == 500:
                    logger.error("Status 500 for the request with X-Request-Id %s", name.decode())
                message = {**message, "headers": with_name(message.get("headers", []), name)}
            await send(message)

        await self._app({**scope, "headers": with_name(scope["headers"], name)}, receive, sent)


def name_of(headers: Any) -> bytes:
    """The request's own name, or a new one where it has none that fits on a line of a log."""
    own = next((value for key, value in headers if key.lower() == NAME), b"")
    sane = 0 < len(own) <= LONGEST and own.isascii() and own.decode("ascii").isprintable()
    return own if sane else uuid.uuid4().hex.encode()


def with_name(headers: Any, name: bytes) -> list[tuple[bytes, bytes]]:
    """Headers in which this is the only name."""
    return [*((key, value) for key, value in headers if key.lower() != NAME), (NAME, name)]


def install(app: FastAPI) -> None:
    """Put names around all of an application, its answer to a failure that nothing in it caught included."""
    build = app.build_middleware_stack
    app.build_middleware_stack = lambda: RequestIds(build())  # type: ignore[method-assign]
