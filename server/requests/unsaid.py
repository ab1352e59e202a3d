"""Members of a request that are ``null``: as if they had not been said, as in OpenAI's API.

Clients in languages whose objects have all members send them so. SGLang refuses most of those that have a default,
and takes a response's ``store`` for no.
"""

from functools import cache
from typing import Any

from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest, CompletionRequest, ResponsesRequest

from fathom.server.routes import CHAT, COMPLETIONS, RESPONSES

FORMS = {CHAT: ChatCompletionRequest, COMPLETIONS: CompletionRequest, RESPONSES: ResponsesRequest}


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
    tools = content.get("tools") if path in FORMS else None
    for tool in tools if isinstance(tools, list) else ():
        function = tool.get("function", tool) if isinstance(tool, dict) else None  # in a chat it is a member
        if isinstance(function, dict) and function.get("strict", ...) is None:
            del function["strict"]
            unsaid.append("strict")
    return bool(unsaid)
