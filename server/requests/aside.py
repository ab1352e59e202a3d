"""Long prompts are made from what clients send beside the event loop, which goes on answering everybody else.

SGLang renders a chat, and tokenizes its text, where it handles the request: for about a second per megabyte, and as
long again where it is looked for what a selection must keep, no stream would go on and no probe be answered.
"""

import asyncio
import contextvars
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from fastapi import Response
from pydantic import BaseModel

from fathom.server.requests.context import CURRENT

LONG = 1 << 16
"""Bytes of a body, or characters of a text, from which on its prompt is made aside: some 50 ms."""

_Result = TypeVar("_Result")
_THREAD = ThreadPoolExecutor(1, "long-prompts")


def install() -> None:
    """Put our functions around SGLang's."""
    from sglang.srt.entrypoints.anthropic.serving import AnthropicServing
    from sglang.srt.entrypoints.openai.serving_chat import OpenAIServingChat
    from sglang.srt.entrypoints.openai.serving_responses import OpenAIServingResponses
    from sglang.srt.entrypoints.openai.serving_tokenize import OpenAIServingDetokenize, OpenAIServingTokenize
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

    tokenize = TokenizerManager._tokenize_texts
    convert = OpenAIServingChat._convert_to_internal_request
    handle = OpenAIServingChat.handle_request
    whole, streamed = AnthropicServing._handle_non_streaming, AnthropicServing._handle_streaming
    make = OpenAIServingResponses._make_request

    async def tokenized(self: Any, texts: Any, is_cross_encoder: bool = False) -> Any:
        given = self, texts, is_cross_encoder
        if characters(texts) < LONG or self.async_dynamic_batch_tokenizer is not None:
            return await tokenize(*given)
        return await aside(finished, tokenize, *given)

    async def prepare(chat: Any, request: Any, raw_request: Any) -> None:
        if (context := CURRENT.get()) is not None and context.body_bytes >= LONG:
            context.converted = request, await aside(attempt, convert, chat, request, raw_request)

    def converted(self: Any, request: Any, raw_request: Any = None) -> Any:
        context = CURRENT.get()
        if context is None or context.converted is None or context.converted[0] is not request:
            return convert(self, request, raw_request)
        return context.converted[1]()

    async def chat(self: Any, request: Any, raw_request: Any) -> Any:
        await prepare(self, request, raw_request)
        return await handle(self, request, raw_request)

    async def message(self: Any, request: Any, given: Any, raw_request: Any) -> Any:
        await prepare(self.openai_serving_chat, request, raw_request)
        return await whole(self, request, given, raw_request)

    async def message_stream(self: Any, request: Any, given: Any, raw_request: Any) -> Any:
        await prepare(self.openai_serving_chat, request, raw_request)
        return await streamed(self, request, given, raw_request)

    async def response(self: Any, *request: Any) -> Any:
        if (context := CURRENT.get()) is None or context.body_bytes < LONG:
            return await make(self, *request)
        return await aside(finished, make, self, *request)

    TokenizerManager._tokenize_texts = tokenized
    OpenAIServingChat._convert_to_internal_request = converted
    OpenAIServingChat.handle_request = chat
    AnthropicServing._handle_non_streaming, AnthropicServing._handle_streaming = message, message_stream
    OpenAIServingResponses._make_request = response
    AnthropicServing.handle_count_tokens = whole_aside(AnthropicServing.handle_count_tokens)
    for owner in (OpenAIServingTokenize, OpenAIServingDetokenize):
        owner._handle_non_streaming_request = whole_aside(owner._handle_non_streaming_request)


def whole_aside(handle: Callable[..., Coroutine[Any, Any, Any]]) -> Callable[..., Coroutine[Any, Any, Any]]:
    """A method that answers a request, the last of its arguments, and waits for nothing: aside, if it is long."""

    async def handled(self: Any, *request: Any) -> Any:
        length = request[-1].headers.get("content-length")
        if length is not None and int(length) < LONG:
            return await handle(self, *request)
        return await aside(written, handle, self, *request)

    return handled


def written(handle: Callable[..., Coroutine[Any, Any, Any]], *args: Any) -> Any:
    """The answer of a handler that waits for nothing. What is no response yet becomes one: FastAPI would go through
    each of its token ids on the event loop."""
    answer = finished(handle, *args)
    if not isinstance(answer, BaseModel):
        return answer
    return Response(answer.model_dump_json(by_alias=True), media_type="application/json")


async def aside(function: Callable[..., _Result], *args: Any) -> _Result:
    """What a function returns that runs in a thread, after those before it, in the context of the request."""
    context = contextvars.copy_context()
    return await asyncio.get_running_loop().run_in_executor(_THREAD, context.run, function, *args)


def attempt(function: Callable[..., Any], *args: Any) -> Callable[[], Any]:
    """Call a function; what then returns its result, or raises its error, where SGLang expects that."""
    try:
        result = function(*args)
    except Exception as error:  # of any kind: it is for who asked
        raised = error

        def again() -> Any:
            raise raised

        return again
    return lambda: result


def finished(function: Callable[..., Coroutine[Any, Any, _Result]], *args: Any) -> _Result:
    """The result of an asynchronous function that waits for nothing."""
    coroutine = function(*args)
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value
    finally:
        coroutine.close()
    raise RuntimeError(f"{function.__qualname__} waits for something")


def characters(texts: Any) -> int:
    """Of a text, or of texts in lists."""
    return len(texts) if isinstance(texts, str) else sum(map(characters, texts or ()))
