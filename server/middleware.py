"""Takes the policy out of each generation request and puts the account of it into the answer.

Pure ASGI: it sees every body message as it passes, so a stream is never gathered.
"""

import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any, NamedTuple

import orjson

from fathom.runtime.config import PolicyError
from fathom.server.answers.echo import EventEcho, into_json
from fathom.server.answers.errors import MALFORMED, raised_by_body, rewrite
from fathom.server.api.responses import STORED
from fathom.server.requests.context import CURRENT, Face, RequestContext
from fathom.server.requests.refusals import (
    RequestError,
    refuse_encoded,
    refuse_illegal,
    refuse_instances,
    refuse_unanswerable,
    schema_of_answer,
)
from fathom.server.requests.unsaid import without_nulls
from fathom.server.routes import (
    CORPUS_ROUTES,
    GENERATE,
    GENERATES,
    GENERATION_ROUTES,
    MESSAGES,
    OLLAMA,
    OLLAMA_SHOW,
    OTHER,
    PROBES,
    RESPONSES,
    TEXT_ROUTES,
    VERTEX,
    WEIGHT_ROUTES,
    error_body,
    path_of,
)

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

PACKED = (
    "the weights of this model are packed for the CPU: they can be neither changed nor read while it is served; "
    "start the server again with the new model"
)

NO_CORPUS = "external corpora are for drafting from n-grams, which this server does not do"

UNREADABLE = (
    "this server has no tokenizer (--skip-tokenizer-init), so that it can read no text and write none; "
    f"{GENERATE} takes token ids as input_ids"
)


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
        if path in PROBES and scope["method"] == "HEAD":
            await self._app({**scope, "method": "GET"}, receive, send)  # the HTTP server leaves the body out
        elif path in TEXT_ROUTES and not self._face.tokenizes:
            await send_error(path, RequestError(400, UNREADABLE), send)
        elif path in GENERATION_ROUTES and scope["method"] in ("POST", "PUT"):
            await self._generate(path, scope, receive, send)
        elif path in GENERATES and scope["method"] in ("POST", "PUT"):
            await self._generate_by_default(path, scope, receive, send)
        elif path.startswith(RESPONSES + "/") and scope["method"] == "GET":
            stored = self._responses.get(path.removeprefix(RESPONSES + "/"))
            await self._app(scope, receive, Answer(send, stored) if stored else send)
        elif path == OLLAMA_SHOW:
            await self._app(as_json(scope), receive, send)
        elif path in WEIGHT_ROUTES and self._face.packed_weights:
            await send_error(path, RequestError(400, PACKED), send)
        elif path in CORPUS_ROUTES:
            await send_error(path, RequestError(400, NO_CORPUS), send)
        else:
            await self._app(scope, receive, send)

    async def _generate(self, path: str, scope: Scope, receive: Receive, send: Send) -> None:
        received_time = time.perf_counter()
        try:
            refuse_encoded(scope["headers"])
            body = await read_body(receive)
            body, asked = take_policy(body, path, self._model_name, self._face.completes_middles)
            policy, left_out = self._face.choose(asked.policy)
        except ClientGone:
            return
        except RequestError as error:
            await send_error(path, error, send)
            return
        except PolicyError as error:
            param = f"fathom.{error.field}" if error.field else "fathom"
            await send_error(path, RequestError(400, str(error), param), send)
            return
        context = RequestContext(
            path,
            policy,
            received_time,
            left_out,
            asked.model,
            asked.schema,
            asked.stops,
            body_bytes=len(body),
        )
        token = CURRENT.set(context)
        answer = Answer(send, context, self._remember if path == RESPONSES else None)
        try:
            await self._app(with_length(scope, len(body)), replay(body, receive), answer)
        except Exception as error:
            if not raised_by_body(error):
                raise
            await send_error(path, RequestError(400, MALFORMED), send)
        finally:
            CURRENT.reset(token)

    async def _generate_by_default(self, path: str, scope: Scope, receive: Receive, send: Send) -> None:
        """One of the routes that know no policy: nobody's wish for one is passed over in silence."""
        received_time = time.perf_counter()
        scope = as_json(scope) if path in OLLAMA else scope
        try:
            refuse_encoded(scope["headers"])
            body = await read_body(receive)
            refuse_by_default(path, body)
        except ClientGone:
            return
        except RequestError as error:
            await send_error(path, error, send)
            return
        token = CURRENT.set(RequestContext(OTHER, self._face.default, received_time, body_bytes=len(body)))
        try:
            await self._app(scope, replay(body, receive), send)
        except Exception as error:
            if not raised_by_body(error):
                raise
            await send_error(path, RequestError(400, MALFORMED), send)
        finally:
            CURRENT.reset(token)

    def _remember(self, response_id: str, context: RequestContext) -> None:
        self._responses[response_id] = context
        while len(self._responses) > STORED:
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


class Asked(NamedTuple):
    """What a body says.

    Attributes:
        policy: its ``fathom`` member; None where there is none.
        model: the name it gives of one; "" where it gives none.
        schema: the JSON schema of a message's answer; "" where it has none.
        stops: the stop sequences of a message.
    """

    policy: Any
    model: str
    schema: str
    stops: Sequence[Any]


def take_policy(body: bytes, path: str, served: str, middles: bool) -> tuple[bytes, Asked]:
    """The body without its ``fathom`` member and what is ``null`` for unsaid, and what it says.

    Raises:
        RequestError: 400 for what is no JSON object, and as :func:`refuse_illegal`.
    """
    try:
        content = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise RequestError(400, f"the request body is not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise RequestError(400, "the request body must be a JSON object")
    refuse_illegal(path, content, middles)
    shorter = without_nulls(path, content)
    model, stops = content.get("model"), content.get("stop_sequences")
    asked = Asked(
        content.get("fathom"),
        model if isinstance(model, str) else "",
        schema_of_answer(content) if path == MESSAGES else "",
        stops if path == MESSAGES and isinstance(stops, list) else (),
    )
    unnamed = path == RESPONSES and model is None
    if unnamed:  # as on the other routes; SGLang asks for it by an error of its own
        content["model"] = served
    if "fathom" not in content and not unnamed and not shorter:
        return body, asked
    content.pop("fathom", None)
    return orjson.dumps(content), asked


def refuse_by_default(path: str, body: bytes) -> None:
    """Refuse a policy where none can be asked for, what Ollama's routes pass over, and what Vertex AI's fails on.

    What is no JSON object, the route refuses itself.
    """
    try:
        content = orjson.loads(body)
    except orjson.JSONDecodeError:
        return
    if not isinstance(content, dict):
        return
    if content.get("fathom") is not None:
        asked = ", ".join(GENERATION_ROUTES)
        raise RequestError(400, f"fathom cannot be had on this route; it can on {asked}", "fathom")
    if path in OLLAMA:
        refuse_unanswerable(content)
    if path == VERTEX:
        refuse_instances(content)


def as_json(scope: Scope) -> Scope:
    """The scope of a request whose body is read as JSON, whatever the client calls it: so does Ollama, and the
    ``curl`` commands of its documentation name no type."""
    headers = [(name, value) for name, value in scope["headers"] if name.lower() != b"content-type"]
    return {**scope, "headers": [*headers, (b"content-type", b"application/json")]}


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

    async def __call__(self, message: Message) -> None:
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
