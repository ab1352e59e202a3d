"""API keys: taken as each route's clients send them, and asked for in the route's error format."""

from typing import Any

from starlette.routing import WebSocketRoute

from fathom.server.requests.admission import refuse
from fathom.server.routes import GENERATES, MESSAGES, path_of

REASONS = {401: "the API key is missing or wrong", 403: "the API key does not allow this"}


FOR_ADMINISTRATORS = ("load_lora_adapter_from_tensors", "set_trace_level")
"""SGLang's routes that change the server, but are open to who may send requests."""


def install(root: str = "") -> None:
    """Put our middleware around SGLang's check of keys, which it adds when it starts.

    That check lets every WebSocket pass; their one route, of speech, is taken away. And it knows the routes that
    need no key by how paths begin, which a mount point changes.

    Args:
        root: where a proxy mounts the server, ``--fastapi-root-path``.
    """
    from sglang.srt.entrypoints import http_server
    from sglang.srt.utils import auth

    routes = http_server.app.router.routes
    routes[:] = [route for route in routes if not isinstance(route, WebSocketRoute)]
    for route in routes:
        if getattr(route, "path", "").removeprefix("/") in FOR_ADMINISTRATORS:
            auth.auth_level(auth.AuthLevel.ADMIN_OPTIONAL)(route.endpoint)

    add_check, decide = auth.add_api_key_middleware, auth.decide_request_auth

    def decide_by_route(*, path: str, **given: Any) -> Any:
        return decide(path=path_of({"path": path, "root_path": root}), **given)

    def add_both(app: Any, **keys: Any) -> None:
        add_check(app, **keys)
        app.add_middleware(KeyFormats)

    auth.add_api_key_middleware = add_both
    auth.decide_request_auth = decide_by_route


class KeyFormats:
    """ASGI middleware outside SGLang's check, which knows bearer tokens and one form of refusal."""

    def __init__(self, app: Any):
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        path = path_of(scope) if scope["type"] == "http" else ""
        if path.startswith(MESSAGES):
            scope = with_bearer(scope)
        if scope["type"] == "http":
            scope = without_odd_keys(scope)
        if path in GENERATES or path.startswith(MESSAGES):
            send = in_format(path, send)
        await self._app(scope, receive, send)


def with_bearer(scope: Any) -> Any:
    """The scope of an Anthropic client's request, with its key where others have theirs."""
    headers = dict(scope["headers"])
    if b"authorization" in headers or b"x-api-key" not in headers:
        return scope
    bearer = (b"authorization", b"Bearer " + headers[b"x-api-key"])
    return {**scope, "headers": [*scope["headers"], bearer]}


def without_odd_keys(scope: Any) -> Any:
    """The scope without keys that are not ASCII, which no key is and SGLang cannot compare."""
    if all(value.isascii() for name, value in scope["headers"] if name == b"authorization"):
        return scope
    return {**scope, "headers": [header for header in scope["headers"] if header[0] != b"authorization"]}


def in_format(path: str, send: Any) -> Any:
    """A ``send`` that gives refusals the route's format."""
    refused = False

    async def sent(message: Any) -> None:
        nonlocal refused
        if message["type"] == "http.response.start" and message["status"] in REASONS:
            refused = True
            await refuse(path, message["status"], REASONS[message["status"]], send)
        elif not refused:
            await send(message)

    return sent
