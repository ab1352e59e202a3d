"""Finds what a chat prompt must keep when its policy drops prompt tokens.

SGLang's chat, responses and messages routes all turn messages into a prompt by one method. Where that happens under
a policy that judges prompts, the places of what it protects (``prefill_protect``) and of the generation header are
found and go along with the request. They are looked for in the conversation as SGLang renders it, which is not what
the client sent: missing contents are filled in, parts joined, arguments of tool calls read.
"""

from collections.abc import Collection
from typing import Any

from fathom.server.requests.context import CURRENT, Conversation, RequestContext
from fathom.server.requests.spans import find_spans


def install() -> None:
    """Put our functions around SGLang's."""
    from sglang.srt.entrypoints.openai.serving_chat import OpenAIServingChat

    process_messages = OpenAIServingChat._process_messages
    render = OpenAIServingChat._render_and_encode_chat_template

    def with_spans(self: Any, request: Any, is_multimodal: bool) -> Any:
        context = judged()
        if context is None:
            return process_messages(self, request, is_multimodal)
        context.conversation = None
        result = process_messages(self, request, is_multimodal)
        conversation = context.conversation or as_sent(request)
        tokenizer, kinds = self.tokenizer_manager.tokenizer, context.policy.prefill_protect
        context.protected = protected(tokenizer, conversation, result.prompt_ids, kinds)
        return result

    def remembered(self: Any, messages: Any, *, tools: Any, template_kwargs: Any, **options: Any) -> Any:
        result = render(self, messages, tools=tools, template_kwargs=template_kwargs, **options)
        if (context := judged()) is not None:
            context.conversation = Conversation(messages, tools, template_kwargs)
        return result

    OpenAIServingChat._process_messages = with_spans
    OpenAIServingChat._render_and_encode_chat_template = remembered


def judged() -> RequestContext | None:
    """The request that is handled, where its policy judges prompts."""
    context = CURRENT.get()
    return None if context is None or context.policy.prefill_keep_rate == 1 else context


def as_sent(request: Any) -> Conversation:
    """The conversation of a prompt that SGLang did not render with the tokenizer's template.

    Args:
        request: SGLang's chat request.
    """
    messages = [message.model_dump(exclude_none=True) for message in request.messages]
    offered = request.tools if request.tools and request.tool_choice != "none" else []
    return Conversation(messages, [tool.model_dump() for tool in offered], request.chat_template_kwargs)


def protected(
    tokenizer: Any, conversation: Conversation, prompt_ids: Any, kinds: Collection[str]
) -> tuple[tuple[int, int], ...]:
    """What of a chat prompt must stay, as ranges of tokens: all of it where that cannot be told.

    Args:
        prompt_ids: the prompt made from the conversation; a text where it is tokenized later.
        kinds: what the policy protects (``prefill_protect``).
    """
    if not isinstance(prompt_ids, list):
        return ((0, 1 << 30),)
    try:
        said, offered, options = conversation.messages, conversation.tools, conversation.template_kwargs
        spans = find_spans(tokenizer, said, offered, prompt_ids, options, kinds)
    except Exception:  # a template may raise anything; the prompt was rendered in some other way then
        return ((0, len(prompt_ids)),)
    return spans.tokens()
