"""Calls that ``tool_choice`` demands are told as calls, whether or not the server parses those that a model makes.

SGLang's grammar makes them JSON of one form, and its chats read that form without a parser; but only where there is
one (``--tool-call-parser``) do they look.
"""

from typing import Any


def install() -> None:
    """Put our function around SGLang's."""
    from sglang.srt.entrypoints.openai.protocol import ToolChoice
    from sglang.srt.entrypoints.openai.serving_chat import OpenAIServingChat

    parsing_active = OpenAIServingChat._tool_call_parsing_active

    def or_demanded(self: Any, request: Any) -> bool:
        demanded = request.tool_choice == "required" or isinstance(request.tool_choice, ToolChoice)
        return parsing_active(self, request) or (demanded and bool(self._effective_tools(request)))

    OpenAIServingChat._tool_call_parsing_active = or_demanded
