"""Where in an answer a block of tool calls begins that has no end, as where ``max_tokens`` cut it.

What parsers keep back of a call until it is closed they tell as text when the answer ends within it, and clients
show the markup to people.
"""

import json
import re
from typing import Any

from sglang.srt.function_call.apertus2509_detector import Apertus2509Detector
from sglang.srt.function_call.function_call_parser import FunctionCallParser
from sglang.srt.function_call.gigachat3_detector import GigaChat3Detector
from sglang.srt.function_call.gpt_oss_detector import GptOssDetector
from sglang.srt.function_call.inkling_detector import InklingDetector
from sglang.srt.function_call.internlm_detector import InternlmDetector
from sglang.srt.function_call.kimik3_detector import KimiK3Detector
from sglang.srt.function_call.llama32_detector import Llama32Detector
from sglang.srt.function_call.minicpm5_detector import MiniCPM5Detector
from sglang.srt.function_call.minimax_m3 import MinimaxM3Detector
from sglang.srt.function_call.mistral_detector import MistralDetector
from sglang.srt.function_call.muse_glimmer_detector import MuseGlimmerDetector
from sglang.srt.function_call.pythonic_detector import PythonicDetector

from fathom.server.tools import named_calls
from fathom.server.tools.tool_arguments import end_of_list

M3 = re.escape("]<]minimax[>[")
MARKS: dict[type, tuple[str, str]] = {
    Apertus2509Detector: (r"<\|tools_prefix\|>", r"<\|tools_suffix\|>"),
    GptOssDetector: (
        r"<\|start\|>|<\|channel\|>",
        r"<\|(?:call|end|return)\|>"
        r"|<\|channel\|>(?:final|commentary)(?:\s*<\|constrain\|>\w+)?<\|message\|>(?=\s*\S)",
    ),
    InklingDetector: (
        r"<\|message_model\|>|<\|content_invoke_tool_\w+\|>",
        r"<\|end_message\|>|<\|content_text\|>",
    ),
    InternlmDetector: (r"<\|action_start\|>", r"<\|action_end\|>"),
    KimiK3Detector: (r"<\|(?:open|close)\|>", r"<\|sep\|>"),
    MiniCPM5Detector: (r"<function\s", "</function>"),
    MinimaxM3Detector: (M3, f"{M3}</tool_call>"),
    MuseGlimmerDetector: (
        r"<\|start\|>|\Ato=(?:user|functions)|<atem:function_calls>",
        r"to=user<\|message\|>|<\|eom\|>|<\|eot\|>|</atem:function_calls>",
    ),
}
"""Patterns of what is before and behind a block, where a parser has no names for them. Of formats of messages, what
is before and behind all that is no text.
"""
OF_JSON = {GigaChat3Detector: r"<\|function_call\|>", Llama32Detector: r"<\|python_tag\|>"}
"""Formats whose calls have no mark behind them."""
BETWEEN = re.compile(r"[;,\s]*")
STRING = re.compile(r'"(?:[^"\\]|\\.)*(?:"|\\?\Z)', re.DOTALL)
_has_tool_call = FunctionCallParser.has_tool_call


def begin(parser: Any, answer: str) -> int:
    """Where a block of calls without an end begins, in characters; the answer's length where there is none.

    Args:
        parser: SGLang's, of a format and a request's tools.
    """
    kind = type(parser.detector)
    if kind in OF_JSON or kind is PythonicDetector:
        names = "|".join(re.escape(tool.function.name or "") for tool in parser.tools)
        return (
            begin_of_json(answer, OF_JSON[kind], names) if kind in OF_JSON else begin_of_list(answer, names)
        )
    if (marks := MARKS.get(kind) or named(parser.detector)) is None:
        return len(answer)
    closed = max((found.end() for found in re.finditer(marks[1], answer)), default=0)
    opened = re.compile(marks[0]).search(answer, closed)
    return opened.start() if opened else len(answer)


def named(detector: Any) -> tuple[str, str] | None:
    """The marks that a parser has names for."""
    opening = detector.bot_token or getattr(detector, "tool_call_start_token", "")
    closing = detector.eot_token or getattr(detector, "tool_call_end_token", "")
    if not (opening and closing) or isinstance(detector, MistralDetector):  # whose mark is a bracket
        return None
    return re.escape(opening.strip()), re.escape(closing.strip())


def begin_of_json(answer: str, mark: str, names: str) -> int:
    """As ``begin``, of objects behind a mark, or without one where the first is a call."""
    opened = re.search(rf'{mark}|\A\s*(?={{\s*"name"\s*:\s*"(?:{names})")', answer)
    if not opened:
        return len(answer)
    start, at, decoder = opened.start(), opened.end(), json.JSONDecoder()
    if not answer[at:].strip():
        return start
    while answer.startswith("{", at := BETWEEN.match(answer, at).end()):  # type: ignore[union-attr]
        try:
            _, at = decoder.raw_decode(answer, at)
        except (ValueError, RecursionError):
            outside = STRING.sub("", answer[at:])
            unended = outside.count("{") > outside.count("}") or outside.count("[") > outside.count("]")
            return start if unended else len(answer)
        start = at
    return len(answer)


def begin_of_list(answer: str, names: str) -> int:
    """As ``begin``, of a list of calls in Python."""
    calls, at = re.compile(rf"\[\s*(?:{names})\(\s*\w+\s*="), 0
    while opened := calls.search(answer, at):
        at = end_of_list(answer, opened.start(), of_calls=True)
        if at < 0:
            return opened.start()
    return len(answer)


def text_before(parser: Any, answer: str, rest: str) -> str:
    """Of what a parser tells as text at an answer's end what is not within a block without an end.

    Args:
        rest: what the answer ends with, with or without marks.
    """
    return rest[: max(0, len(rest) - (len(answer) - begin(parser, answer)))]


def has_tool_call(self: Any, text: str) -> bool:
    """SGLang's, also of a call's begin: of a text without a call nothing is left out."""
    readable = named_calls.readable(text, named_calls.stand_ins(self.tools))
    return _has_tool_call(self, readable) or begin(self, text) < len(text)
