"""``/v1/messages``: what the client did wrong is status 400, a full queue 503, and every stream tells its prompt.

SGLang answers the former two with status 500 where they are noticed after the request was read. How long the prompt
is, it tells with the first text of a stream, and says 0 where there is none. Thoughts that are left to the model
(``adaptive``), it refuses where the model has none, though agents ask for them whatever the model. And the line for
Anthropic's accounts that Claude Code puts before its instructions, other ones in each conversation, it gives to the
model, so that no two conversations begin alike.
"""

import re
import sys
from collections.abc import AsyncIterator
from typing import Any

import orjson
from starlette.exceptions import HTTPException

from fathom.server.requests.context import CURRENT
from fathom.server.routes import MESSAGES

_BILLING = re.compile(r"x-anthropic-billing-header:[^\n]*\n?")
_END = re.compile(r'"finish_reason": ?"')
_DATA = "data: "


def install() -> None:
    """Put our functions around SGLang's."""
    from sglang.srt.entrypoints.anthropic.serving import ERROR_TYPE_MAP, AnthropicServing
    from sglang.srt.entrypoints.openai.serving_chat import OpenAIServingChat

    error_response = AnthropicServing._error_response
    stream_of = OpenAIServingChat._generate_chat_stream
    count_tokens = AnthropicServing.handle_count_tokens
    convert = AnthropicServing._convert_to_chat_completion_request

    def with_cause(self: Any, status_code: int, error_type: str, message: str, **known: Any) -> Any:
        error = sys.exc_info()[1]
        if isinstance(error, HTTPException):
            status_code, message = error.status_code, str(error.detail)
        elif isinstance(error, ValueError):
            status_code, message = 400, str(error)
        else:
            return error_response(
                self, status_code=status_code, error_type=error_type, message=message, **known
            )
        kind = ERROR_TYPE_MAP.get(status_code, "api_error")
        return error_response(self, status_code=status_code, error_type=kind, message=message)

    async def stream(self: Any, *request: Any) -> AsyncIterator[str]:
        events = stream_of(self, *request)
        context = CURRENT.get()
        if context is not None and context.route == MESSAGES:
            events = with_usage_at_the_end(events)
        async for event in events:
            yield event

    async def counted(self: Any, request: Any, raw_request: Any) -> Any:
        if not request.messages:  # templates look at the last one
            return self._error_response(400, "invalid_request_error", "messages must not be empty")
        return await count_tokens(self, request, raw_request)

    def converted(self: Any, request: Any) -> Any:
        if isinstance(request.system, list):
            system = [block for block in request.system if not _BILLING.fullmatch(block.text or "")]
            request = request.model_copy(update={"system": system})
        try:
            return convert(self, request)
        except ValueError:
            if request.thinking is None or request.thinking.type != "adaptive":
                raise
            return convert(self, request.model_copy(update={"thinking": None}))

    AnthropicServing._error_response = with_cause
    AnthropicServing._convert_to_chat_completion_request = converted
    AnthropicServing.handle_count_tokens = counted
    OpenAIServingChat._generate_chat_stream = stream


async def with_usage_at_the_end(events: AsyncIterator[str]) -> AsyncIterator[str]:
    """A chat's stream whose event with the reason of the end has the usage too, which follows it."""
    end = ""
    async for event in events:
        if end:
            told = orjson.loads(event[len(_DATA) :]) if event.startswith(_DATA + "{") else {}
            if usage := told.get("usage"):
                end = (
                    _DATA + orjson.dumps(orjson.loads(end[len(_DATA) :]) | {"usage": usage}).decode() + "\n\n"
                )
            yield end
            end = ""
        if _END.search(event):
            end = event
        else:
            yield event
    if end:
        yield end
