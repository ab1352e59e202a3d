"""Finds what a chat prompt must keep when its policy drops prompt tokens.

SGLang's chat, responses and messages routes all turn messages into a prompt by one method. Where that happens under
a policy that judges prompts, the places of system text, tools, tool results and the generation header are found and
go along with the request.
"""

from typing import Any

from fathom.server.context import CURRENT
from fathom.server.spans import find_spans


def install() -> None:
    """Put our function around SGLang's."""
    from sglang.srt.entrypoints.openai.serving_chat import OpenAIServingChat

    process_messages = OpenAIServingChat._process_messages

    def with_spans(self: Any, request: Any, is_multimodal: bool) -> Any:
        result = process_messages(self, request, is_multimodal)
        context = CURRENT.get()
        if context is not None and context.policy.prefill_keep_rate != 1:
            context.protected = protected(self.tokenizer_manager.tokenizer, request, result.prompt_ids)
        return result

    OpenAIServingChat._process_messages = with_spans


def protected(tokenizer: Any, request: Any, prompt_ids: Any) -> tuple[tuple[int, int], ...]:
    """What of a chat prompt must stay: all of it where that cannot be told.

    Args:
        request: SGLang's chat request; prompt_ids: the prompt made from it.
    """
    if not isinstance(prompt_ids, list):
        return ((0, 1 << 30),)
    messages = [message.model_dump(exclude_none=True) for message in request.messages]
    offered = request.tools if request.tools and request.tool_choice != "none" else []
    try:
        spans = find_spans(
            tokenizer,
            messages,
            [tool.model_dump() for tool in offered],
            prompt_ids,
            request.chat_template_kwargs,
        )
    except Exception:  # a template may raise anything; the prompt was rendered in some other way then
        return ((0, len(prompt_ids)),)
    return spans.tokens()
