"""Streams whose events have several tokens, as drafting and stream intervals make them, or none.

SGLang's parsers of tool calls take one step for each event of a stream and never come to what is left at its end:
calls lose their arguments. Some of its parsers give each block of calls the number 0, and clients take all of them
for one. Its chats give all tokens of an event the alternatives of the first, and leave out the
log-probabilities of tokens whose text waits for the next one: a character may be spread over several.
"""

from collections.abc import AsyncIterator
from typing import Any

from fathom.server.context import CURRENT

MOST_STEPS = 1000
"""Of a parser in one event: more than any has tokens."""


def install() -> None:
    """Put our functions around SGLang's."""
    install_parsers()
    install_logprobs()


def install_parsers() -> None:
    """Let the parsers of tool calls take all steps that an event allows."""
    from sglang.srt.function_call.function_call_parser import FunctionCallParser
    from sglang.srt.function_call.json_array_parser import JsonArrayParser

    one_step = FunctionCallParser.parse_stream_chunk
    one_step_of_json = JsonArrayParser.parse_streaming_increment

    def all_steps(self: Any, chunk_text: str) -> tuple[str, list[Any]]:
        text, calls = one_step(self, chunk_text)
        for _ in range(MOST_STEPS):
            more, further = one_step(self, "")
            if not more and not further:
                break
            text, calls = (text or "") + (more or ""), [*calls, *further]
        return text, numbered(self, calls)

    def all_steps_of_json(self: Any, new_text: str, tools: Any) -> Any:
        result = one_step_of_json(self, new_text, tools)
        for _ in range(MOST_STEPS):
            more = one_step_of_json(self, "", tools)
            if not more.normal_text and not more.calls:
                break
            result.normal_text = (result.normal_text or "") + (more.normal_text or "")
            result.calls.extend(more.calls)
        return result

    FunctionCallParser.parse_stream_chunk = all_steps
    JsonArrayParser.parse_streaming_increment = all_steps_of_json


def numbered(parser: Any, calls: list[Any]) -> list[Any]:
    """Parts of calls, where each that has a name gets a number of its own."""
    told, shift = getattr(parser, "numbers", (-1, 0))
    for call in calls:
        if call.name and call.tool_index + shift <= told:
            shift = told + 1 - call.tool_index
        call.tool_index += shift
        told = max(told, call.tool_index)
    parser.numbers = told, shift
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
