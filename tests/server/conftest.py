"""A small application with each route's formats, behind the real middleware."""

import asyncio
import json
from dataclasses import dataclass, field

import pytest

from fathom.server.middleware import PolicyMiddleware
from fathom.server.requests.context import CURRENT, Face

REPORT = {
    "prompt_tokens": 10,
    "kept_tokens": 10,
    "decode_steps": 3,
    "first_token_time": 1.5,
    "engine": "dense",
}
FATHOM = {"prompt_tokens": 10, "kept_tokens": 10, "decode_steps": 3, "engine": "dense"}


def finish(index=0, report=REPORT):
    """What the engine's front end does when one generation ends."""
    meta = {"id": f"rid{index}", "finish_reason": {"type": "stop"}}
    if report is not None:
        meta["fathom"] = {key: value for key, value in report.items() if key != "first_token_time"}
    CURRENT.get().collect({"meta_info": meta})


@dataclass
class Inner:
    """The application inside the middleware: answers as scripted, and remembers what reached it."""

    script: object = None
    status: int = 200
    bodies: list = field(default_factory=list)
    policies: list = field(default_factory=list)
    scopes: list = field(default_factory=list)
    messages: list = field(default_factory=list)

    async def __call__(self, scope, receive, send):
        body = b""
        while True:
            message = await receive()
            self.messages.append(message["type"])
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        self.bodies.append(body)
        self.scopes.append(scope)
        context = CURRENT.get()
        self.policies.append(context.policy if context else None)
        if callable(self.script):
            await self._stream(send, self.script)
        else:
            await self._json(send)

    async def _json(self, send):
        count = self.script[0]
        if CURRENT.get() is not None:
            CURRENT.get().expected += count
        for index in range(count):
            finish(index)
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(self.script[1]))]
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        await send({"type": "http.response.body", "body": self.script[1]})

    async def _stream(self, send, script):
        headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        async for chunk in script():
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


@dataclass
class Reply:
    """One answer as it left the middleware."""

    status: int
    headers: dict
    chunks: list

    @property
    def body(self):
        return b"".join(self.chunks)

    @property
    def json(self):
        return json.loads(self.body)

    @property
    def events(self):
        """The data of every event; the text itself where it is not JSON."""
        lines = [line[5:].strip() for line in self.body.split(b"\n") if line.startswith(b"data:")]
        return [json.loads(line) if line.startswith(b"{") else line.decode() for line in lines]


class Client:
    """Calls the middleware as a server would."""

    def __init__(self, inner, face=None):
        self.inner = inner
        self.app = PolicyMiddleware(inner, face or Face())

    def call(self, path, body, method="POST", on_chunk=None, headers=None, parts=None):
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        parts = parts or [raw]
        pending = [
            {"type": "http.request", "body": part, "more_body": i < len(parts) - 1}
            for i, part in enumerate(parts)
        ]
        headers = headers or [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(raw))]
        scope = {"type": "http", "method": method, "path": path, "headers": headers}
        reply = Reply(0, {}, [])

        async def receive():
            return pending.pop(0) if pending else {"type": "http.disconnect"}

        async def send(message):
            if message["type"] == "http.response.start":
                assert reply.status == 0
                reply.status = message["status"]
                reply.headers = {name.decode(): value.decode() for name, value in message["headers"]}
                assert len(reply.headers) == len(message["headers"])
            else:
                reply.chunks.append(message.get("body", b""))
                if on_chunk:
                    on_chunk(reply.chunks[-1])

        asyncio.run(asyncio.wait_for(self.app(scope, receive, send), 10))
        if "content-length" in reply.headers:
            assert int(reply.headers["content-length"]) == len(reply.body)
        return reply


@pytest.fixture
def client():
    """Make a client of an application that answers as scripted.

    A script is (number of generations, JSON text) or an async generator function of stream chunks.
    """
    return lambda script, face=None, status=200: Client(Inner(script, status), face)


@pytest.fixture
def finished():
    """Report the end of one generation."""
    return finish


@pytest.fixture
def fathom_object():
    """The object in the answer for ``n`` generations."""

    def expected(n=1):
        counters = {key: value * n for key, value in FATHOM.items() if key != "engine"}
        return {"preset": "exact", "engine": "dense", **counters, "generations": n}

    return expected
