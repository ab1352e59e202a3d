"""GLM's tool calls in a stream: found without a search through all of a call for each piece, and no text is lost.

SGLang looks for a call's parts with regular expressions that go through it a character at a time, from its begin
and on the event loop. And its parser for GLM-4.5 drops a text that comes in one piece with the call behind it.
Of an argument that ends as its closing mark begins (``a <``) it misses that mark, and takes what follows for
more of the argument.
"""

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from sglang.srt.function_call import glm47_moe_detector
from sglang.srt.function_call.core_types import StreamingParseResult
from sglang.srt.function_call.glm4_moe_detector import Glm4MoeDetector
from sglang.srt.function_call.glm47_moe_detector import Glm47MoeDetector

OPEN, CLOSE, KEY = "<tool_call>", "</tool_call>", "<arg_key"
OF_GLM_45 = r"<tool_call>(.*?)(?:\\n|\n)(.*?)(</tool_call>|$)"
OF_GLM_47 = r"<tool_call>(.*?)(?:(<arg_key.*?))?(?:(</tool_call>)|$)"
"""SGLang's patterns for a call that may not have an end yet."""

BEFORE_MARK = re.compile("(?=<)")

_increment = Glm4MoeDetector.parse_streaming_increment


class Call:
    """What a match of one of the patterns says of a call: its name, its arguments and what closes it."""

    def __init__(self, end: int, *groups: str | None):
        self._end, self._groups = end, groups

    def group(self, number: int) -> str | None:
        return self._groups[number - 1]

    def end(self, number: int = 0) -> int:
        """Of the whole, which ends with the last group."""
        return self._end


def increment(self: Any, new_text: str, tools: Any) -> StreamingParseResult:
    """SGLang's for GLM-4.5, with the text before a call."""
    before, mark, behind = (self._buffer + new_text).partition(self.bot_token)
    if not mark:
        return _increment(self, new_text, tools)
    self._buffer = ""
    found: StreamingParseResult = _increment(self, mark + behind, tools)
    found.normal_text = before.replace(self.eot_token, "") + found.normal_text
    return found


def mark_by_mark(process: Callable[..., str], *parsed: str) -> Callable[..., str]:
    """A parser's function for more of a call's arguments, in which what began as a mark ends where another begins.

    Args:
        parsed: kinds of values that are told when they are closed.
    """

    def processed(self: Any, raw_increment: str, func_name: str, tools: Any) -> str:
        told = ""
        for piece in BEFORE_MARK.split(raw_increment):
            if piece.startswith("<") and self._stream_state == "IN_VALUE":
                half, self._xml_tag_buffer = self._xml_tag_buffer, ""
                self._current_value += half
                if half and self._cached_value_type not in parsed:
                    first = self._cached_value_type == "string" and not self._value_started
                    told += '"' * first + half
                    self._value_started = True
            told += process(self, piece, func_name, tools)
        return told

    return processed


def search(pattern: str, text: str, flags: int = 0) -> Any:
    """As ``re.search``."""
    return call_of_glm47(text) if pattern == OF_GLM_47 else re.search(pattern, text, flags)


def call_of_glm45(text: str) -> Call | None:
    """As a search for ``OF_GLM_45``."""
    if (begin := text.find(OPEN)) < 0:
        return None
    begin += len(OPEN)
    line = text.find("\n", begin)
    written = text.find("\\n", begin, line if line >= 0 else len(text))
    if (stop := written if written >= 0 else line) < 0:
        return None
    behind = stop + (2 if written >= 0 else 1)
    end, close = _end(text, behind)
    return Call(end + len(close), text[begin:stop], text[behind:end], close)


def call_of_glm47(text: str) -> Call | None:
    """As a search for ``OF_GLM_47``; its last group is empty where the pattern's is none."""
    if (begin := text.find(OPEN)) < 0:
        return None
    begin += len(OPEN)
    end, close = _end(text, begin)
    key = text.find(KEY, begin, end)
    name, arguments = (text[begin:end], None) if key < 0 else (text[begin:key], text[key:end])
    return Call(end + len(close), name, arguments, close)


def _end(text: str, begin: int) -> tuple[int, str]:
    """Where what begins there ends, and with what: with the call, or with the text, a last line's end left out."""
    if (end := text.find(CLOSE, begin)) >= 0:
        return end, CLOSE
    return max(begin, len(text) - text.endswith("\n")), ""


_PROCESS = "_process_xml_to_json_streaming"
PLACES: tuple[tuple[Any, str, Any], ...] = (
    (Glm4MoeDetector, "parse_streaming_increment", increment),
    (Glm4MoeDetector, "_STREAMING_PARTIAL_PATTERN", SimpleNamespace(search=call_of_glm45)),
    (Glm4MoeDetector, _PROCESS, mark_by_mark(getattr(Glm4MoeDetector, _PROCESS))),
    (
        Glm47MoeDetector,
        _PROCESS,
        mark_by_mark(getattr(Glm47MoeDetector, _PROCESS), "auto", "number", "integer"),
    ),
    (glm47_moe_detector, "re", SimpleNamespace(**{**vars(re), "search": search})),
)
"""SGLang's, and what we put there."""
