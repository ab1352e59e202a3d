"""Who is let in, and what ends when a client goes away.

Bounds on the requests inside the server and on their bodies, refusal while it drains, ``Retry-After`` where it is
of use, and an end to the work on an answer that nobody waits for any more.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import Any

import orjson

from fathom.server.routes import GENERATES, error_body, path_of

DEFAULT_MAX_IN_FLIGHT = 512
DEFAULT_DRAIN_SECONDS = 120
DEFAULT_CLIENT_SECONDS = 120
DEFAULT_MAX_BODY_BYTES = 64 << 20

BUSY_RETRY_SECONDS, DRAIN_RETRY_SECONDS = 1, 5
CLIENT_CLOSED_REQUEST = 499  # nginx's status for it; nobody receives it, but metrics count it
GONE = {"type": "http.disconnect"}
LATE = dict(GONE)
"""Of a client that is still connected, but was waited for too long."""

ALLOWED_WHILE_DRAINING = ("/abort_request",)


@dataclass
class Gate:
    """What decides whether a request is let in.

    Attributes:
        max_in_flight: most generation requests inside the server, waiting or running.
        drain_seconds: how long running requests may take after SIGTERM.
        max_body_bytes: largest body of a request.
        client_seconds: how long a client may send nothing of a request that it has begun, or take nothing of an
            answer that fills all buffers, before it counts as gone.
        draining: whether the server is ending.
        background: how many responses are computed that nobody waits for (``"background": true``).
        in_flight: generation requests that somebody waits for.
    """

    max_in_flight: int = DEFAULT_MAX_IN_FLIGHT
    drain_seconds: float = DEFAULT_DRAIN_SECONDS
    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES
    client_seconds: float = DEFAULT_CLIENT_SECONDS
    draining: Callable[[], bool] = lambda: False
    background: Callable[[], int] = lambda: 0
    in_flight: int = 0

    @property
    def inside(self) -> int:
        """Generation requests inside the server now."""
        return self.in_flight + self.background()


class AdmissionMiddleware:
    """ASGI middleware in front of everything that reads a request's body."""

    def __init__(self, app: Any, gate: Gate):
        self._app = app
        self._gate = gate

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path, gate = path_of(scope), self._gate
        if scope["method"] not in ("POST", "PUT"):
            await self._pass_on(path, scope, receive, send)  # some routes read a body all the same
        elif gate.draining() and path not in ALLOWED_WHILE_DRAINING:
            await refuse(path, 503, "the server is shutting down", send, DRAIN_RETRY_SECONDS)
        elif path not in GENERATES:
            await self._pass_on(path, scope, receive, with_retry_after(send))
        elif gate.inside >= gate.max_in_flight:
            message = f"the server is busy: it holds {gate.inside} requests, its limit"
            await refuse(path, 503, message, send, BUSY_RETRY_SECONDS)
        else:
            place, app = Place(gate), partial(self._pass_on, path)
            try:
                await serve_while_wanted(
                    app, scope, receive, with_retry_after(send), place.leave, gate.client_seconds
                )
            finally:
                place.leave()

    async def _pass_on(self, path: str, scope: Any, receive: Any, send: Any) -> None:
        limit = self._gate.max_body_bytes
        too_large = partial(
            refuse, path, 413, f"the request body is larger than the limit of {limit} bytes", send
        )
        declared = dict(scope["headers"]).get(b"content-length", b"")
        if declared.isdigit() and int(declared) > limit:
            await too_large()
            return
        body, begun = BoundedBody(limit, receive), False

        async def sent(message: Any) -> None:
            nonlocal begun
            if begun or not body.exceeded:
                begun = True
                await send(message)

        try:
            await self._app(scope, body, sent)
        except Exception:
            if begun or not body.exceeded:
                raise
        if body.exceeded and not begun:
            await too_large()


class Place:
    """One of the places inside the server, given back once."""

    def __init__(self, gate: Gate):
        gate.in_flight += 1
        self._gate: Gate | None = gate

    def leave(self) -> None:
        """Give the place back, the first time that this is called."""
        if self._gate is not None:
            self._gate.in_flight -= 1
            self._gate = None


async def refuse(path: str, status: int, message: str, send: Any, retry_seconds: int | None = None) -> None:
    """Answer with an error in the route's format, without reading the body, and close the connection."""
    body = orjson.dumps(error_body(path, status, message))
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"connection", b"close"),
    ]
    if retry_seconds is not None:
        headers.append((b"retry-after", str(retry_seconds).encode()))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


class BoundedBody:
    """A ``receive`` for which the client is gone once it has sent more than ``limit`` bytes."""

    def __init__(self, limit: int, receive: Any):
        self._left, self._receive = limit, receive

    @property
    def exceeded(self) -> bool:
        """Whether it was more."""
        return self._left < 0

    async def __call__(self) -> Any:
        message = await self._receive()
        self._left -= len(message.get("body", b""))
        return GONE if self.exceeded else message


def with_retry_after(send: Any) -> Any:
    """A ``send`` that adds ``Retry-After`` to an engine's own 429 or 503."""

    async def sent(message: Any) -> None:
        if message["type"] == "http.response.start" and message["status"] in (429, 503):
            headers = message.get("headers", [])
            if all(name.lower() != b"retry-after" for name, _ in headers):
                headers = [*headers, (b"retry-after", str(BUSY_RETRY_SECONDS).encode())]
            message = {**message, "headers": headers}
        await send(message)

    return sent


async def serve_while_wanted(
    app: Any, scope: Any, receive: Any, send: Any, on_end: Callable[[], None], client_seconds: float
) -> None:
    """Run ``app``, and cancel it when its client goes before the answer has begun.

    SGLang looks for the client of a request that is not streamed every four seconds. A stream that has begun is
    left to Starlette, which notices at once.

    Args:
        app, scope, receive, send: as in ASGI.
        on_end: called when the answer was sent or the client went: SGLang's background task of a stream keeps
            ``app`` running for two seconds more.
        client_seconds: who lets us wait longer for a part of the request, or with a part of the answer, has gone:
            the place is somebody else's.
    """
    body_read, begun = asyncio.Event(), asyncio.Event()
    disconnected: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    async def watched_receive() -> Any:
        if body_read.is_set():
            return await asyncio.shield(disconnected)
        try:
            async with asyncio.timeout(client_seconds):
                message = await receive()
        except TimeoutError:
            message = LATE
        if message["type"] == "http.disconnect":
            disconnected.set_result(message)
            body_read.set()
        elif not message.get("more_body", False):
            body_read.set()
        return message

    async def watched_send(message: Any) -> None:
        begun.set()
        if disconnected.done():
            return
        try:
            async with asyncio.timeout(client_seconds):
                await send(message)
        except TimeoutError:
            if not disconnected.done():
                disconnected.set_result(LATE)
            on_end()
            return
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            on_end()

    async def watch() -> None:
        await body_read.wait()
        while not disconnected.done():
            message = await receive()
            if message["type"] == "http.disconnect" and not disconnected.done():
                disconnected.set_result(message)
        on_end()
        if not begun.is_set():
            work.cancel()

    work = asyncio.ensure_future(app(scope, watched_receive, watched_send))
    watcher = asyncio.ensure_future(watch())
    try:
        await work
    except asyncio.CancelledError:
        if not disconnected.done() or begun.is_set():
            work.cancel()
            raise
    finally:
        watcher.cancel()
        gone = disconnected.result() if disconnected.done() and not begun.is_set() else None
        disconnected.cancel()
    if gone is not None:
        status = HTTPStatus.REQUEST_TIMEOUT if gone is LATE else CLIENT_CLOSED_REQUEST
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": b""})
