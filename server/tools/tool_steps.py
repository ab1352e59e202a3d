"""Parsers of tool calls read each event of a stream to its end, and number the calls of an answer in their order.

SGLang takes one step for each event, however many tokens it has (drafting and stream intervals make it several),
and never comes to what is left at the end: calls lose their arguments. Some of its parsers give each block of calls
the number 0, or a call the place of its tool among all tools: clients take several calls for one, or find none in
the first places. And a thousand brackets within each other, as of a model that writes nothing else any more, break
a stream off. What of a call is left after the last step, its chats complete themselves: a call that ``max_tokens``
cut off within a file's name is told as one with that name, which agents carry out.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from sglang.srt.entrypoints.openai.serving_chat import OpenAIServingChat
from sglang.srt.function_call.core_types import StreamingParseResult
from sglang.srt.function_call.function_call_parser import FunctionCallParser
from sglang.srt.function_call.json_array_parser import JsonArrayParser

from fathom.server.tools import unended_calls

MOST_STEPS = 1000
"""Of a parser in one event: more than any has tokens."""

Step = Callable[[str], tuple[str | None, list[Any]]]
_of_a_piece, _of_the_end = FunctionCallParser.parse_stream_chunk, FunctionCallParser.parse_stream_end
_of_json = JsonArrayParser.parse_streaming_increment


def of_a_piece(self: Any, chunk_text: str) -> tuple[str, list[Any]]:
    """All of SGLang's steps."""
    vars(self).setdefault("pieces", []).append(chunk_text)
    text, calls = all_steps(self.detector, partial(_of_a_piece, self), chunk_text)
    return text, numbered(self, calls)


def of_the_end(self: Any) -> tuple[str, list[Any]]:
    """SGLang's, with numbers that go on, and without the text of a call that has no end."""
    text, calls = step_or_text(self.detector, lambda _: _of_the_end(self), "")
    if text and not getattr(self.detector, "has_given_up", False):
        text = unended_calls.text_before(self, "".join(getattr(self, "pieces", [])), text)
    return text, numbered(self, calls)


def of_json(self: Any, new_text: str, tools: Any) -> StreamingParseResult:
    """All of SGLang's steps where a grammar makes the call."""

    def step(piece: str) -> tuple[str | None, list[Any]]:
        result = _of_json(self, piece, tools)
        return result.normal_text, result.calls

    text, calls = all_steps(self, step, new_text)
    return StreamingParseResult(normal_text=text, calls=calls)


def all_steps(detector: Any, step: Step, new_text: str) -> tuple[str, list[Any]]:
    """The text and the parts of calls that a piece brings; the first step may bring none and the second some."""
    text, calls = step_or_text(detector, step, new_text)
    for _ in range(MOST_STEPS):
        more, further = step_or_text(detector, step, "")
        if not more and not further:
            break
        text, calls = text + more, [*calls, *further]
    return text, calls


def step_or_text(detector: Any, step: Step, piece: str) -> tuple[str, list[Any]]:
    """One step, or of brackets within brackets, deeper than Python reads, a text: it and all that follows."""
    if getattr(detector, "has_given_up", False):
        return piece, []
    kept = detector._buffer[getattr(detector, "parsed_pos", 0) :]
    kept += getattr(detector, "unread", "") + getattr(detector, "half_a_mark", "")
    try:
        text, calls = step(piece)
    except RecursionError:
        detector.has_given_up = True
        return kept + piece, []
    return text or "", calls


def no_remainder(self: Any, *_: Any) -> None:
    """For a chat's stream at its end: all steps are taken, and what is unsaid was not written."""


def numbered(parser: Any, calls: list[Any]) -> list[Any]:
    """Parts of calls, each with its call's place in the answer; that with a name is the first of its call."""
    begun, places = getattr(parser, "places", (0, {}))
    for call in calls:
        if call.name or call.tool_index not in places:
            places = places | {call.tool_index: begun}
            begun += 1
        call.tool_index = places[call.tool_index]
    parser.places = begun, places
    return calls


PLACES: tuple[tuple[Any, str, Any], ...] = (
    (FunctionCallParser, "has_tool_call", unended_calls.has_tool_call),
    (FunctionCallParser, "parse_stream_chunk", of_a_piece),
    (FunctionCallParser, "parse_stream_end", of_the_end),
    (JsonArrayParser, "parse_streaming_increment", of_json),
    (OpenAIServingChat, "_check_for_unstreamed_tool_args", no_remainder),
)
"""SGLang's, and what we put there."""
