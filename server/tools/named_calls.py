"""Calls in Python of tools whose names are none in Python: ``get-x``, as of MCP servers, or ``import``.

To Python ``get-x(a=1)`` is a difference, and SGLang tells the call as text. Here such a name of a request's tools,
where a bracket follows it, is read as a stand-in that is a name, and put back in what is told, texts included.
"""

import re
from collections.abc import Callable, Iterable
from keyword import iskeyword
from typing import Any

from sglang.srt.function_call.core_types import StreamingParseResult

Read = Callable[[Any, str, Any], StreamingParseResult]
NAME = re.compile(r"[\w.-]+")


def stand_ins(tools: Iterable[Any]) -> dict[str, str]:
    """The names of tools that Python cannot read, by what stands in for them."""
    names = (tool.function.name or "" for tool in tools)
    return {
        f"tool_{name.encode().hex()}_": name  # which is no begin of another
        for name in names
        if NAME.fullmatch(name) and (iskeyword(name) or not name.isidentifier())
    }


def readable(text: str, names: dict[str, str]) -> str:
    """A text in which such names, where a bracket follows, have their stand-ins.

    Args:
        names: as of ``stand_ins``.
    """
    if not names:
        return text
    by_name = {name: stand_in for stand_in, name in names.items()}
    any_name = "|".join(map(re.escape, by_name))
    return re.sub(rf"(?<![\w.-])(?:{any_name})(?=\()", lambda found: by_name[found[0]], text)


def put_back(text: str, names: dict[str, str]) -> str:
    """A text, or JSON, with the names for which stand-ins are in it."""
    for stand_in, name in names.items():
        text = text.replace(stand_in, name)
    return text


def with_stand_ins(tools: list[Any], names: dict[str, str]) -> list[Any]:
    """The tools, and those with stand-ins for their names."""
    by_name = {name: stand_in for stand_in, name in names.items()}
    renamed = (
        tool.model_copy(update={"function": tool.function.model_copy(update={"name": by_name[name]})})
        for tool in tools
        if (name := tool.function.name) in by_name
    )
    return [*tools, *renamed]


def rename(calls: Iterable[Any], names: dict[str, str]) -> None:
    """Put the names back in calls, which change."""
    for call in calls:
        call.name, call.parameters = names.get(call.name, call.name), put_back(call.parameters, names)


def of_whole(read: Read) -> Read:
    """A parser's function for a whole text."""

    def reading(self: Any, text: str, tools: Any) -> StreamingParseResult:
        names = stand_ins(tools)
        found = read(self, readable(text, names), with_stand_ins(tools, names))
        found.normal_text = put_back(found.normal_text or "", names)
        rename(found.calls, names)
        return found

    return reading


def of_piece(read: Read) -> Read:
    """A parser's function for a further piece, which keeps what it has not read, and reads calls by the above."""

    def reading(self: Any, new_text: str, tools: Any) -> StreamingParseResult:
        if not (names := stand_ins(tools)):
            return read(self, new_text, tools)
        text, self._buffer = self._buffer + new_text, ""
        found = read(self, readable(text, names), tools)
        self._buffer = put_back(self._buffer, names)
        found.normal_text = put_back(found.normal_text or "", names)
        return found

    return reading


def of_content(
    read: Callable[[Any, str, Any], tuple[list[Any], str]],
) -> Callable[[Any, str, Any], tuple[list[Any], str]]:
    """A parser's function for what is between its marks, which tells calls, and an error."""

    def reading(self: Any, content: str, tools: Any) -> tuple[list[Any], str]:
        names = stand_ins(tools)
        calls, error = read(self, readable(content, names), with_stand_ins(tools, names))
        rename(calls, names)
        return calls, error

    return reading
