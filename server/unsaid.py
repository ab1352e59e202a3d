"""Members of a request that are ``null``: as if they had not been said, as in OpenAI's API.

Clients in languages whose objects have all members send them so. SGLang refuses most of those that have a default,
and takes a response's ``store`` for no.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest, CompletionRequest, ResponsesRequest

from fathom.server.routes import CHAT, COMPLETIONS, RESPONSES

FORMS = {CHAT: ChatCompletionRequest, COMPLETIONS: CompletionRequest, RESPONSES: ResponsesRequest}
_FUNCTION: dict[str, Callable[[dict[str, Any]], Any]] = {
    CHAT: lambda tool: tool.get("function"),
    RESPONSES: lambda tool: tool,
}
"""What of a tool has its ``strict``."""


@cache
def defaulted(path: str) -> frozenset[str]:
    """Members of a route's requests whose default is not ``null``."""
    form = FORMS.get(path)
    return frozenset(
        name
        for name, field in (form.model_fields if form else {}).items()
        if not field.is_required() and field.get_default(call_default_factory=True) is not None
    )


def without_nulls(path: str, content: dict[str, Any]) -> bool:
    """Take out of a request what is ``null`` and has a default.

    Args:
        path: the route; content: the request's JSON object, which changes.

    Returns:
        Whether there was any.
    """
    unsaid = [name for name in defaulted(path) if content.get(name, ...) is None]
    for name in unsaid:
        del content[name]
    tools = content.get("tools") if path in _FUNCTION else None
    named = (
        [_FUNCTION[path](tool) for tool in tools if isinstance(tool, dict)] if isinstance(tools, list) else []
    )
    loose = [each for each in named if isinstance(each, dict) and each.get("strict", ...) is None]
    for each in loose:
        del each["strict"]
    return bool(unsaid or loose)
