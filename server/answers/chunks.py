"""Streamed chats whose events have several tokens, as drafting and stream intervals make them, or none.

SGLang gives all tokens of an event the alternatives of the first, and leaves out the log-probabilities of tokens
whose text waits for the next one: a character may be spread over several.
"""

from collections.abc import AsyncIterator
from typing import Any

from fathom.server.requests.context import CURRENT


def install() -> None:
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
