"""Streams whose events have several tokens, as drafting and stream intervals make them, or none.

SGLang's parsers of tool calls take one step for each event of a stream and never come to what is left at its end:
calls lose their arguments. Some of its parsers give each block of calls the number 0, or a call the place of its
tool among all tools, and clients take several calls for one or wait for those before. A thousand brackets within
each other, as of a model that writes nothing else any more, end its parsers and the stream with an error. Its chats
give all tokens of an event the alternatives of the first, and leave out the log-probabilities of tokens whose text
waits for the next one: a character may be spread over several.
"""

from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

from fathom.server.context import CURRENT

MOST_STEPS = 1000
"""Of a parser in one event: more than any has tokens."""


def install() -> None:
    """Put our functions around SGLang's."""
    install_parsers()
    install_logprobs()


def install_parsers() -> None:
    """Let the parsers of tool calls take all steps that an event allows, and give up what they cannot read."""
    from sglang.srt.function_call.core_types import StreamingParseResult
    from sglang.srt.function_call.function_call_parser import FunctionCallParser
    from sglang.srt.function_call.json_array_parser import JsonArrayParser

    one_step, at_the_end = FunctionCallParser.parse_stream_chunk, FunctionCallParser.parse_stream_end
    one_step_of_json = JsonArrayParser.parse_streaming_increment

    def of_a_piece(self: Any, chunk_text: str) -> tuple[str, list[Any]]:
        text, calls = all_steps(self.detector, partial(one_step, self), chunk_text)
        return text, numbered(self, calls)

    def of_the_end(self: Any) -> tuple[str, list[Any]]:
        text, calls = step_or_text(self.detector, lambda _: at_the_end(self), "")
        return text, numbered(self, calls)

    def of_json(self: Any, new_text: str, tools: Any) -> Any:
        def step(piece: str) -> tuple[str | None, list[Any]]:
            result = one_step_of_json(self, piece, tools)
            return result.normal_text, result.calls

        text, calls = all_steps(self, step, new_text)
        return StreamingParseResult(normal_text=text, calls=calls)

    FunctionCallParser.parse_stream_chunk = of_a_piece
    FunctionCallParser.parse_stream_end = of_the_end
    JsonArrayParser.parse_streaming_increment = of_json


Step = Callable[[str], tuple[str | None, list[Any]]]


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


def install_logprobs() -> None:
    """Let each token of a streamed chat come with its own log-probabilities."""
    from sglang.srt.entrypoints.openai.serving_chat import OpenAIServingChat

    per_token = OpenAIServingChat._process_logprobs_tokens
    chunks_of = OpenAIServingChat._generate_stream_content

    def each_its_own(self: Any, logprobs: Any, use_token_index: bool = False) -> Any:
        return per_token(self, logprobs, use_token_index=True)

    async def with_waiting(
        self: Any, content: Any, index: int, choice_logprobs: Any, **known: Any
    ) -> AsyncIterator[str]:
        waiting = context.waiting_logprobs if (context := CURRENT.get()) is not None else {}
        if before := waiting.pop(index, None):
            new = choice_logprobs["content"] if choice_logprobs else []
            choice_logprobs = {"content": before + new}
        sent = False
        async for chunk in chunks_of(
            self, content=content, index=index, choice_logprobs=choice_logprobs, **known
        ):
            sent = True
            yield chunk
        if choice_logprobs and not sent:
            waiting[index] = choice_logprobs["content"]

    OpenAIServingChat._process_logprobs_tokens = each_its_own
    OpenAIServingChat._generate_stream_content = with_waiting
