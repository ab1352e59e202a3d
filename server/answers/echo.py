"""Puts the ``fathom`` object into an answer, without holding any token back."""

import re
from collections.abc import Callable
from typing import Any

import orjson

from fathom.server.answers.errors import clean, in_names_of
from fathom.server.requests.context import RequestContext
from fathom.server.routes import CHAT, COMPLETIONS, MESSAGES, RESPONSES

KEY = "fathom"
_BREAK = re.compile(rb"\n\r?\n")  # behind "\r" or not; one that begins with "\r?" is tried at every byte
_FINISHED = re.compile(rb'"finish_reason": ?[^n ]')  # quotes inside text are escaped: only a key matches
_LAST_EVENTS = {
    MESSAGES: re.compile(rb"\A\s*event: ?message_(delta|stop)\b"),
    RESPONSES: re.compile(rb"\A\s*event: ?response\.(completed|incomplete|failed)\b"),
}
_ERROR = re.compile(rb'\A\s*(event: ?error\r?\n)?data: ?\{("type": ?"error", ?)?"error"')
_FAILED = re.compile(rb"\A\s*event: ?response\.failed\b")
_DONE = re.compile(rb"\A\s*data: ?\[DONE\]")


def splice(body: bytes, value: Any) -> bytes:
    """A JSON object's text with one more member; every other byte stays as it was."""
    head = body.rstrip()[:-1].rstrip()
    comma = b"" if head.endswith(b"{") else b","
    return head + comma + b'"fathom":' + orjson.dumps(value) + b"}"


def with_stop(payload: bytes, context: RequestContext) -> bytes:
    """An Anthropic answer, or the event that ends one, with the stop sequence that ended it: SGLang tells none.

    Other texts that end answers, as those of a template, are no client's, and the end of the turn.
    """
    if context.route != MESSAGES or context.stopped_by not in context.stops:
        return payload
    content = orjson.loads(payload)
    end = content.get("delta", content)
    if end.get("stop_reason") == "end_turn":
        end |= {"stop_reason": "stop_sequence", "stop_sequence": context.stopped_by}
    return orjson.dumps(content)


def into_json(body: bytes, context: RequestContext) -> bytes:
    """A whole JSON answer with the object added: at the top, or in each item of a batch."""
    answer = context.answer()
    start = body.lstrip()[:1]
    if start == b"{" and answer is not None:
        return splice(with_stop(body, context), answer)
    if start != b"[":
        return body
    items = orjson.loads(body)
    for item in items:
        report = (item.get("meta_info") or {}).get(KEY) if isinstance(item, dict) else None
        if report is not None:
            item[KEY] = context.describe([report])
    return orjson.dumps(items)


class EventEcho:
    """Rewrites one server-sent event stream: the event that ends the answer carries the object.

    Every complete event is forwarded at once. Only an event that is not yet complete waits for its rest.
    """

    def __init__(
        self, context: RequestContext, remember: Callable[[str, RequestContext], None] | None = None
    ):
        self._context = context
        self._remember = remember
        self._rest = b""
        self._last = b""
        self._seen = 0
        self.done = False

    def feed(self, chunk: bytes, more: bool) -> bytes:
        """The bytes to send for ``chunk``; with ``more`` false also what was still incomplete."""
        if self.done and not self._rest:
            return chunk
        data, start, out = self._rest + chunk, 0, []
        for found in _BREAK.finditer(data):
            out.append(self._event(data[start : found.end()]))
            start = found.end()
        self._rest = data[start:]
        if not more:
            out.append(self._rest)
            self._rest = b""
        return b"".join(out)

    def _event(self, event: bytes) -> bytes:
        if _ERROR.match(event):
            self._last = event
            return self._error(event)
        if _FAILED.match(event):
            event = self._error(event)
        if self.done:
            return event
        if _DONE.match(event):
            return self._extra_event() + event
        if self._ends_answer(event):
            answer = self._context.answer()
            if answer is not None:
                self.done = True
                return self._with_answer(event, answer)
        self._last = event
        return event

    def _error(self, event: bytes) -> bytes:
        head, mark, payload = event.partition(b"data:")
        content = orjson.loads(payload)
        error = content["response"].get("error") if _FAILED.match(event) else content["error"]
        if isinstance(error, dict) and isinstance(error.get("message"), str):
            error["message"] = in_names_of(self._context.route, clean(error["message"]))
        return head + mark + b" " + orjson.dumps(content) + b"\n\n"

    def _ends_answer(self, event: bytes) -> bool:
        route = self._context.route
        if route in _LAST_EVENTS:
            return bool(_LAST_EVENTS[route].match(event))
        if not _FINISHED.search(event):
            return False
        self._seen += 1
        return self._context.complete and self._seen >= self._context.expected

    def _with_answer(self, event: bytes, answer: dict[str, Any]) -> bytes:
        start = 0 if event.startswith(b"data:") else event.index(b"\ndata:") + 1
        head, payload = event[: start + 5], event[start + 5 :]
        tail = payload[len(payload.rstrip()) :]
        if self._context.route == RESPONSES:
            payload = self._into_response(payload, answer)
        return head + b" " + splice(with_stop(payload.strip(), self._context), answer) + tail

    def _into_response(self, payload: bytes, answer: dict[str, Any]) -> bytes:
        content = orjson.loads(payload)
        response = content.get("response")
        if isinstance(response, dict):
            response[KEY] = answer
            if self._remember is not None:
                self._remember(response.get("id", ""), self._context)
        return orjson.dumps(content)

    def _extra_event(self) -> bytes:
        """An event of its own, for a stream that is about to end without one that could carry the object."""
        answer = self._context.answer()
        self.done = True
        if answer is None or not self._last.startswith(b"data:"):
            return b""
        last = orjson.loads(self._last[5:])
        if "error" in last:
            return b""
        if self._context.route in (CHAT, COMPLETIONS):
            last = {key: last[key] for key in ("id", "object", "created", "model") if key in last}
            last["choices"] = []
        return b"data: " + orjson.dumps(last | {KEY: answer}) + b"\n\n"
