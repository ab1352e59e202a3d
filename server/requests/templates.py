"""Chats are rendered by the server's template: a client may give it values, but not a template of its own.

Templates are programs. One that a client sent would run in the process that answers everybody, for as long as it
likes: tokenizers take it as a value of ``chat_template_kwargs``.
"""

import json
from pathlib import Path
from typing import Any

TEMPLATE = "chat_template"

OF_PROCESSORS = "chat_template.json"
"""Where a checkpoint that takes images may keep its template: for its processor, which reads texts and images."""


def complete(tokenizer: Any, model: str, revision: str | None) -> None:
    """Give a tokenizer the template that its checkpoint keeps for a processor, if there is one and it has none.

    Args:
        tokenizer: a Transformers tokenizer, or None where none is loaded.
        model: the folder or repository that it is from.
    """
    from transformers.utils import cached_file

    if tokenizer is None or getattr(tokenizer, TEMPLATE, None) is not None:
        return
    file = cached_file(model, OF_PROCESSORS, revision=revision, _raise_exceptions_for_missing_entries=False)
    if file is not None:
        tokenizer.chat_template = json.loads(Path(file).read_text("utf-8"))[TEMPLATE]


def install() -> None:
    """Put our check before SGLang's making of a prompt from messages, which all routes of chats share."""
    from sglang.srt.entrypoints.openai.serving_chat import OpenAIServingChat

    process_messages = OpenAIServingChat._process_messages

    def with_the_servers(self: Any, request: Any, is_multimodal: bool) -> Any:
        if TEMPLATE in (request.chat_template_kwargs or {}):
            raise ValueError(f"chat_template_kwargs must not have {TEMPLATE}: the template is the server's")
        return process_messages(self, request, is_multimodal)

    OpenAIServingChat._process_messages = with_the_servers
