"""Who is let in: the bound, the drain, Retry-After, and the end of work that nobody waits for."""

import asyncio
import json

import pytest

from fathom.server.requests.admission import CLIENT_CLOSED_REQUEST, AdmissionMiddleware, Gate

CHAT, GENERATE, MESSAGES = "/v1/chat/completions", "/generate", "/v1/messages"


class App:
    """Answers when it is told to; remembers how it ended."""

    def __init__(self, status=200, stream=False):
        self.status, self.stream, self.afterwards = status, stream, 0
        self.go, self.entered, self.ended = asyncio.Event(), asyncio.Event(), None

    async def __call__(self, scope, receive, send):
        try:
            self.seen = await receive()
            self.entered.set()
            if self.stream:
                await send({"type": "http.response.start", "status": self.status, "headers": []})
            await self.go.wait()
            if not self.stream:
                await send({"type": "http.response.start", "status": self.status, "headers": []})
            await send({"type": "http.response.body", "body": b"{}"})
            self.ended = "answered"
            await asyncio.sleep(self.afterwards)
        except asyncio.CancelledError:
            self.ended = "cancelled"
            raise


class Call:
    """One request through the middleware; the client stays until ``hang_up``."""

    def __init__(self, middleware, path=GENERATE, method="POST", parts=(b"{}",), headers=()):
        self.sent, self.left = [], asyncio.Event()
        self.unread = [
            {"type": "http.request", "body": part, "more_body": i > 0}
            for i, part in enumerate(reversed(parts))
        ]
        scope = {"type": "http", "method": method, "path": path, "headers": list(headers)}
        self.task = asyncio.ensure_future(middleware(scope, self.receive, self.send))

    async def receive(self):
        if self.unread:
            return self.unread.pop()
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message):
        self.sent.append(message)

    @property
    def status(self):
        return self.sent[0]["status"]

    @property
    def headers(self):
        return dict(self.sent[0]["headers"])


def run(scenario):
    asyncio.run(asyncio.wait_for(scenario, 10))


@pytest.mark.parametrize("path", [CHAT, GENERATE, MESSAGES, "/invocations", "/api/chat", "/vertex_generate"])
def test_one_too_many_is_told_when_to_come_back(path):
    async def scenario():
        app, gate = App(), Gate(max_in_flight=2)
        middleware = AdmissionMiddleware(app, gate)
        inside = [Call(middleware, path) for _ in range(2)]
        await app.entered.wait()
        late = Call(middleware, path)
        await late.task
        assert late.status == 503 and int(late.headers[b"retry-after"]) >= 1
        assert late.unread, "the body of a refused request is not read"
        content = json.loads(late.sent[1]["body"])
        error = content.get("error", content)
        message = error if isinstance(error, str) else error["message"]
        assert message == "the server is busy: it holds 2 requests, its limit"
        app.go.set()
        await asyncio.gather(*(call.task for call in inside))
        assert [call.status for call in inside] == [200, 200] and gate.in_flight == 0
        again = Call(middleware, path)
        await again.task
        assert again.status == 200

    run(scenario())


def test_other_routes_are_not_counted():
    async def scenario():
        app, gate = App(), Gate(max_in_flight=1)
        middleware = AdmissionMiddleware(app, gate)
        app.go.set()
        for method, path in (("POST", "/tokenize"), ("GET", "/health"), ("GET", "/metrics")):
            call = Call(middleware, path, method)
            await call.task
            assert call.status == 200 and gate.in_flight == 0

    run(scenario())


@pytest.mark.parametrize("path", ["/tokenize", "/invocations", CHAT])
def test_bodies_are_bounded(path):
    async def scenario():
        app, gate = App(), Gate(max_body_bytes=4)
        app.go.set()
        middleware = AdmissionMiddleware(app, gate)
        declared = Call(middleware, path, headers=[(b"content-length", b"5")])
        await declared.task
        assert declared.status == 413 and declared.unread and b"retry-after" not in declared.headers
        assert json.loads(declared.sent[1]["body"])["message"].endswith("larger than the limit of 4 bytes")
        await Call(middleware, path, parts=(b"1234",)).task
        assert app.seen["body"] == b"1234"
        for method in ("POST", "GET"):  # some routes read a body of the other kind, too
            longer = Call(middleware, path, method, parts=(b"12345",))
            await longer.task
            assert app.seen["type"] == "http.disconnect"
            assert longer.status == 413 and len(longer.sent) == 2

    run(scenario())


def test_a_body_that_grows_after_the_answer_has_begun_ends_no_answer():
    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await receive()
        await send({"type": "http.response.body", "body": b"{}"})

    async def scenario():
        call = Call(AdmissionMiddleware(app, Gate(max_body_bytes=4)), "/tokenize", parts=(b"12345",))
        await call.task
        assert [message["type"] for message in call.sent] == ["http.response.start", "http.response.body"]
        assert call.status == 200

    run(scenario())


def test_responses_in_the_background_take_places():
    async def scenario():
        app, background = App(), [1]
        gate = Gate(max_in_flight=2, background=lambda: len(background))
        middleware = AdmissionMiddleware(app, gate)
        inside = Call(middleware, CHAT)
        await app.entered.wait()
        assert gate.inside == 2
        late = Call(middleware, CHAT)
        await late.task
        assert late.status == 503
        background.clear()
        app.go.set()
        again = Call(middleware, CHAT)
        await asyncio.gather(inside.task, again.task)
        assert again.status == 200 and gate.inside == 0

    run(scenario())


def test_a_draining_server_lets_in_only_what_ends_requests():
    async def scenario():
        app, gate = App(), Gate(draining=lambda: True)
        app.go.set()
        middleware = AdmissionMiddleware(app, gate)
        for path in (CHAT, GENERATE, "/invocations", "/v1/embeddings"):
            call = Call(middleware, path)
            await call.task
            assert call.status == 503 and b"retry-after" in call.headers
            assert call.headers[b"connection"] == b"close"
        for method, path in (("POST", "/abort_request"), ("GET", "/health"), ("GET", "/metrics")):
            call = Call(middleware, path, method)
            await call.task
            assert call.status == 200

    run(scenario())


@pytest.mark.parametrize(("status", "told"), [(503, True), (429, True), (500, False), (200, False)])
def test_the_engines_own_refusals_get_the_header(status, told):
    async def scenario():
        app = App(status)
        app.go.set()
        call = Call(AdmissionMiddleware(app, Gate()))
        await call.task
        assert (b"retry-after" in call.headers) == told

    run(scenario())


def test_work_ends_when_the_client_goes_before_the_answer():
    async def scenario():
        app, gate = App(), Gate()
        call = Call(AdmissionMiddleware(app, gate))
        await app.entered.wait()
        call.left.set()
        await asyncio.wait_for(call.task, 1)
        assert app.ended == "cancelled" and call.status == CLIENT_CLOSED_REQUEST and gate.in_flight == 0

    run(scenario())


def test_a_client_that_goes_in_the_midst_of_its_body_is_one_that_left():
    """Without an answer, SGLang would count status 500: an error of the server."""

    async def read(scope, receive, send):
        while (await receive())["type"] != "http.disconnect":
            pass

    async def scenario():
        gate = Gate()
        call = Call(AdmissionMiddleware(read, gate))
        call.unread[0]["more_body"] = True
        call.left.set()
        await call.task
        assert call.status == CLIENT_CLOSED_REQUEST and gate.in_flight == 0

    run(scenario())


def test_a_stream_that_has_begun_is_not_cancelled_from_here():
    async def scenario():
        app = App(stream=True)
        call = Call(AdmissionMiddleware(app, Gate()))
        await app.entered.wait()
        call.left.set()
        await asyncio.sleep(0.05)
        assert not call.task.done()
        app.go.set()
        await call.task
        assert app.ended == "answered" and call.status == 200

    run(scenario())


@pytest.mark.parametrize("gone", [False, True])
def test_a_place_is_free_when_the_answer_is_sent_or_the_client_gone(gone):
    async def scenario():
        app, gate = App(stream=True), Gate()
        app.afterwards = 60
        call = Call(AdmissionMiddleware(app, gate))
        await app.entered.wait()
        assert gate.in_flight == 1
        (call.left if gone else app.go).set()
        await asyncio.sleep(0.05)
        assert gate.in_flight == 0 and not call.task.done()
        call.task.cancel()
        await asyncio.wait([call.task])
        assert gate.in_flight == 0

    run(scenario())


def test_the_end_of_the_server_cancels_what_runs():
    async def scenario():
        app, gate = App(), Gate()
        call = Call(AdmissionMiddleware(app, gate))
        await app.entered.wait()
        call.task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call.task
        assert app.ended == "cancelled" and not call.sent and gate.in_flight == 0

    run(scenario())
