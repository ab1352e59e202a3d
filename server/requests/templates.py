"""Chats are rendered by the server's template: a client may give it values, but not a template of its own.

Templates are programs. One that a client sent would run in the process that answers everybody, for as long as it
likes: tokenizers take it as a value of ``chat_template_kwargs``.
"""

from typing import Any

TEMPLATE = "chat_template"


def install() -> None:
    """Put our check before SGLang's making of a prompt from messages, which all routes of chats share."""
    from sglang.srt.entrypoints.openai.serving_chat import OpenAIServingChat

    process_messages = OpenAIServingChat._process_messages

    def with_the_servers(self: Any, request: Any, is_multimodal: bool) -> Any:
        if TEMPLATE in (request.chat_template_kwargs or {}):
            raise ValueError(f"chat_template_kwargs must not have {TEMPLATE}: the template is the server's")
        return process_messages(self, request, is_multimodal)

    OpenAIServingChat._process_messages = with_the_servers
