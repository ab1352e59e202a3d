"""Takes the policy out of each generation request and puts the account of it into the answer.

Pure ASGI: it sees every body message as it passes, so a stream is never gathered.
"""

import json
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import orjson

from fathom.runtime.config import PolicyError
from fathom.server.context import CURRENT, Face, RequestContext
from fathom.server.echo import EventEcho, into_json
from fathom.server.errors import MALFORMED, raised_by_body, rewrite
from fathom.server.routes import (
    COMPLETIONS,
    GENERATE,
    GENERATES,
    GENERATION_ROUTES,
    RESPONSES,
    WEIGHT_ROUTES,
    error_body,
    path_of,
)

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

INTERNAL_FIELDS = (
    *(
        "http_worker_ipc",
        "received_time",
        "need_wait_for_mm_inputs",
        "num_items_assigned",
        "external_trace_header",
    ),
    *("bootstrap_pair_key", "decode_tp_size", "lora_id", "positional_embed_overrides", "encoder_urls"),
)
INTERNAL_SAMPLING_FIELDS = (
    *("stop_strs", "stop_regex_strs", "stop_str_max_len", "stop_regex_max_len", "is_normalized"),
    "ebnf_full_assistant",
)

MAX_GENERATIONS = 128
"""Most answers that one prompt may ask for (``n``), and most beams: OpenAI's limit for ``n``."""

PACKED = (
    "the weights of this model are packed for the CPU: they can be neither changed nor read while it is served; "
    "start the server again with the new model"
)

REMEMBERED_RESPONSES = 1024
"""How many ``/v1/responses`` answers keep their account for a later retrieval."""


class RequestError(Exception):
    """A request that is refused before it reaches a route."""

    def __init__(self, status: int, message: str, param: str | None = None):
        super().__init__(message)
        self.status = status
        self.param = param


class ClientGone(Exception):
    """The client went away while its request was read."""


class PolicyMiddleware:
    """ASGI middleware around SGLang's routes."""

    def __init__(self, app: App, face: Face, model_name: str = ""):
        self._app = app
        self._face = face
        self._model_name = model_name
        self._responses: OrderedDict[str, RequestContext] = OrderedDict()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = path_of(scope) if scope["type"] == "http" else ""
        if path in GENERATION_ROUTES and scope["method"] in ("POST", "PUT"):
            await self._generate(path, scope, receive, send)
        elif path in GENERATES and scope["method"] in ("POST", "PUT"):
            await self._generate_by_default(path, scope, receive, send)
        elif path.startswith(RESPONSES + "/") and scope["method"] == "GET":
            stored = self._responses.get(path.removeprefix(RESPONSES + "/"))
            await self._app(scope, receive, Answer(send, stored) if stored else send)
        elif path in WEIGHT_ROUTES and self._face.packed_weights:
            await send_error(path, RequestError(400, PACKED), send)
        else:
            await self._app(scope, receive, send)

    async def _generate(self, path: str, scope: Scope, receive: Receive, send: Send) -> None:
        received_time = time.perf_counter()
        try:
            body = await read_body(receive)
            body, request, model = take_policy(body, path, self._model_name, self._face.completes_middles)
            policy, left_out = self._face.choose(request)
        except ClientGone:
            return
        except RequestError as error:
            await send_error(path, error, send)
            return
        except PolicyError as error:
            param = f"fathom.{error.field}" if error.field else "fathom"
            await send_error(path, RequestError(400, str(error), param), send)
            return
        context = RequestContext(path, policy, received_time, left_out, model)
        token = CURRENT.set(context)
        answer = Answer(send, context, self._remember if path == RESPONSES else None)
        try:
            await self._app(with_length(scope, len(body)), replay(body, receive), answer)
        except Exception as error:
            if answer.begun or not raised_by_body(error):
                raise
            await send_error(path, RequestError(400, MALFORMED), send)
        finally:
            CURRENT.reset(token)

    async def _generate_by_default(self, path: str, scope: Scope, receive: Receive, send: Send) -> None:
        """One of the routes that know no policy: nobody's wish for one is passed over in silence."""
        try:
            body = await read_body(receive)
            refuse_policy(body)
        except ClientGone:
            return
        except RequestError as error:
            await send_error(path, error, send)
            return
        await self._app(scope, replay(body, receive), send)

    def _remember(self, response_id: str, context: RequestContext) -> None:
        self._responses[response_id] = context
        while len(self._responses) > REMEMBERED_RESPONSES:
            self._responses.popitem(last=False)


async def read_body(receive: Receive) -> bytes:
    """The whole request body, which ``admission`` bounds.

    Raises:
        ClientGone: when the client disconnects first.
    """
    parts, more = [], True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        parts.append(message.get("body", b""))
        more = message.get("more_body", False)
    return b"".join(parts)


def take_policy(
    body: bytes, path: str = "", served: str = "", middles: bool = False
) -> tuple[bytes, Any, str]:
    """The body without its ``fathom`` member, that member (None where there is none), and the model it names.

    Raises:
        RequestError: 400 for what is no JSON object, for a policy in the engine's private field, and for a
            count of generations below one.
    """
    try:
        content = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise RequestError(400, f"the request body is not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise RequestError(400, "the request body must be a JSON object")
    refuse_private(content)
    if path == GENERATE:
        refuse_internal(content)
    if path == RESPONSES:
        refuse_response(content)
    refuse_count(content)
    if path == COMPLETIONS:
        refuse_without_effect(content, middles)
    model = content.get("model")
    name = model if isinstance(model, str) else ""
    unnamed = path == RESPONSES and model is None
    if unnamed:  # as on the other routes; SGLang asks for it by an error of its own
        content["model"] = served
    if "fathom" not in content and not unnamed:
        return body, None, name
    request = content.pop("fathom", None)
    return orjson.dumps(content), request, name


def refuse_policy(body: bytes) -> None:
    """Refuse a policy where none can be asked for. What is no JSON object, the route refuses itself."""
    try:
        content = orjson.loads(body)
    except orjson.JSONDecodeError:
        return
    if isinstance(content, dict) and content.get("fathom") is not None:
        asked = ", ".join(GENERATION_ROUTES)
        raise RequestError(400, f"fathom cannot be had on this route; it can on {asked}", "fathom")


def sampling_sets(content: dict[str, Any]) -> list[dict[str, Any]]:
    """One set of sampling parameters, or those of each prompt; what is none is left for the route to refuse."""
    given = content.get("sampling_params")
    return [each for each in (given if isinstance(given, list) else [given]) if isinstance(each, dict)]


def refuse_private(content: dict[str, Any]) -> None:
    """Refuse a request that addresses the engine's private field directly."""
    for holder in [content, *sampling_sets(content)]:
        custom = holder.get("custom_params")
        for name in custom if isinstance(custom, dict) else ():
            if name.startswith("fathom"):
                name = f"custom_params.{name}"
                message = f'{name} is reserved; put the policy in a top-level "fathom" object'
                raise RequestError(400, message, name)


def refuse_internal(content: dict[str, Any]) -> None:
    """Refuse fields by which SGLang's own processes talk to each other; its native route takes them from anyone."""
    sets = (("sampling_params.", each, INTERNAL_SAMPLING_FIELDS) for each in sampling_sets(content))
    for prefix, holder, names in (("", content, INTERNAL_FIELDS), *sets):
        for name in names:
            if holder.get(name) is not None:
                raise RequestError(400, f"{prefix}{name} is not for clients", prefix + name)


def refuse_response(content: dict[str, Any]) -> None:
    """Refuse a response to nothing, or without room for a token."""
    if content.get("input") == []:
        raise RequestError(400, "input must not be empty", "input")
    limit = content.get("max_output_tokens")
    if type(limit) is int and limit < 1:
        raise RequestError(
            400, f"max_output_tokens must be an integer >= 1, got {limit}", "max_output_tokens"
        )


def refuse_without_effect(content: dict[str, Any], middles: bool) -> None:
    """Refuse what SGLang takes on its completions route and does not do."""
    if (best_of := content.get("best_of")) is not None and best_of != (content.get("n") or 1):
        raise RequestError(400, "best_of is not supported; legal: the value of n", "best_of")
    if content.get("suffix") and not middles:
        raise RequestError(400, "suffix needs a server with --completion-template", "suffix")


def refuse_count(content: dict[str, Any]) -> None:
    """Refuse to make no generation at all, or more than one prompt may have."""
    found = [(name, content.get(name)) for name in ("n", "best_of") if isinstance(content.get(name), int)]
    # SGLang's native route compares this one before anything has looked at its type.
    found += [("sampling_params.n", each.get("n")) for each in sampling_sets(content)]
    for name, count in found:
        if count is not None and not (type(count) is int and 1 <= count <= MAX_GENERATIONS):
            message = f"{name} must be an integer in [1, {MAX_GENERATIONS}], got {json.dumps(count)[:80]}"
            raise RequestError(400, message, name)


def with_length(scope: Scope, length: int) -> Scope:
    """The scope of the request that is handed on, with the length of the body it will find."""
    drop = (b"content-length", b"transfer-encoding")
    headers = [(name, value) for name, value in scope["headers"] if name.lower() not in drop]
    return {**scope, "headers": [*headers, (b"content-length", str(length).encode())]}


def replay(body: bytes, receive: Receive) -> Receive:
    """A ``receive`` that first hands out ``body`` and then what the client does next."""
    pending = [body]

    async def replayed() -> Message:
        if pending:
            return {"type": "http.request", "body": pending.pop(), "more_body": False}
        return await receive()

    return replayed


async def send_error(path: str, error: RequestError, send: Send) -> None:
    """Answer with an error in the route's own format."""
    body = orjson.dumps(error_body(path, error.status, str(error), error.param))
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


class Answer:
    """A ``send`` that adds the object to a successful answer: a JSON body, or an event stream."""

    def __init__(
        self,
        send: Send,
        context: RequestContext,
        remember: Callable[[str, RequestContext], None] | None = None,
    ):
        self._send = send
        self._context = context
        self._remember = remember
        self._held: Message | None = None
        self._parts: list[bytes] = []
        self._events: EventEcho | None = None
        self.begun = False

    async def __call__(self, message: Message) -> None:
        self.begun = True
        if message["type"] == "http.response.start":
            await self._start(message)
        elif message["type"] != "http.response.body":
            await self._send(message)
        elif self._held is not None:
            await self._hold(self._held, message)
        elif self._events is not None:
            body = self._events.feed(message.get("body", b""), message.get("more_body", False))
            await self._send({**message, "body": body})
        else:
            await self._send(message)

    async def _start(self, message: Message) -> None:
        headers = {name.lower(): value for name, value in message.get("headers", [])}
        kind = headers.get(b"content-type", b"").split(b";")[0].strip().lower()
        editable = b"content-encoding" not in headers
        if editable and kind == b"application/json":
            self._held = message
            return
        if editable and kind == b"text/event-stream":
            self._events = EventEcho(self._context, self._remember)
        await self._send(message)

    async def _hold(self, start: Message, message: Message) -> None:
        self._parts.append(message.get("body", b""))
        if message.get("more_body", False):
            return
        self._held = None
        body = b"".join(self._parts)
        if start["status"] >= 400:
            body = rewrite(self._context.route, start["status"], body)
        else:
            if self._remember is not None:
                self._remember(orjson.loads(body).get("id", ""), self._context)
            body = into_json(body, self._context)
        headers = [(k, v) for k, v in start["headers"] if k.lower() != b"content-length"]
        await self._send({**start, "headers": [*headers, (b"content-length", str(len(body)).encode())]})
        await self._send({"type": "http.response.body", "body": body})
