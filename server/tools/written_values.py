"""Texts in arguments of tool calls keep the blanks and line ends at their ends.

SGLang strips them in seven formats, as if they were the format's: a file that an agent writes loses its last line
end, and a text to be replaced no longer matches. Of these the models' own templates write a value right between its
marks; dots' writes it on lines of its own, as ``\\n{value}\\n``, and models also without.

Of MiniCPM 5's calls, which SGLang reads as XML, a value with tags in it would be empty. And a number without end
(``inf``), or larger than a float, would end an answer of three formats with an error; it is told as a text.
"""

import html
import json
import re
from collections.abc import Callable
from typing import Any

from sglang.srt.function_call import mimo_detector
from sglang.srt.function_call.core_types import StreamingParseResult
from sglang.srt.function_call.deepseekv32_detector import DeepSeekV32Detector
from sglang.srt.function_call.dots_detector import DotsToolDetector
from sglang.srt.function_call.minicpm5_detector import MiniCPM5Detector
from sglang.srt.function_call.minimax_m2 import MinimaxM2Detector
from sglang.srt.function_call.minimax_m3 import MinimaxM3Detector
from sglang.srt.function_call.poolside_v1_detector import PoolsideV1Detector
from sglang.srt.function_call.step3_detector import Step3Detector

from fathom.server.tools.tool_blocks import split

PARAMETER_END = "</｜DSML｜parameter>"
"""Of DeepSeek's."""
POOLSIDES = re.compile(r"<tool_call>|</tool_call>|<arg_value>(.*?)</arg_value>", re.DOTALL)
MINICPMS = re.compile(
    r"(<param\s+name=['\"]([^'\"]+)['\"]>)(\s*<!\[CDATA\[.*?\]\]>\s*(?=</param>)|.*?)(?=</param>)", re.DOTALL
)
"""An argument of MiniCPM 5's: its opening mark, its name and its value."""
CDATA = re.compile(r"\s*<!\[CDATA\[(.*)\]\]>\s*", re.DOTALL)
_deepseeks = DeepSeekV32Detector._parse_parameters_from_xml
_dots = DotsToolDetector._parse_xml_invoke
_minicpms = MiniCPM5Detector.detect_and_parse
_poolsides, _whole_poolsides = (
    PoolsideV1Detector.parse_streaming_increment,
    PoolsideV1Detector.detect_and_parse,
)
_step3s = Step3Detector._parse_steptml_invoke


def as_written(found: Any, value: str) -> Any:
    """What SGLang reads a value for; if that is the text without the blanks at its ends, with these."""
    return value if isinstance(found, str) and found.strip() == value.strip() else found


def of_deepseek(self: Any, invoke_content: str, allow_partial: bool = False) -> str:
    """SGLang's for the arguments of a call of DeepSeek's, with texts as they were written.

    Args:
        allow_partial: whether the last one may have no end yet.
    """
    if invoke_content.lstrip().startswith("{"):
        return str(_deepseeks(self, invoke_content, allow_partial))
    found, end = {}, 0
    for match in re.finditer(self.parameter_regex, invoke_content, re.DOTALL):
        name, is_text, value = match.groups()
        found[name] = value if is_text == "true" else json.loads(_deepseeks(self, match[0]))[name]
        end = match.end()
    rest = invoke_content[end:]
    if allow_partial and (begun := re.search(self.partial_parameter_regex, rest, re.DOTALL)):
        if begun[2] == "true":
            found[begun[1]] = split(begun[3], [PARAMETER_END])[0]
        else:
            found |= json.loads(_deepseeks(self, rest, allow_partial=True))
    return json.dumps(found, ensure_ascii=False)


def of_dots(self: Any, match: re.Match[str], tools: Any) -> dict[str, Any]:
    """SGLang's for a call of dots', with texts as they were written, on lines of their own or not."""
    call: dict[str, Any] = _dots(self, match, tools)
    for parameter in self.parameter_regex.finditer(match["body"]):
        name, value = self._extract_name(parameter["name"]), parameter["value"]
        if len(value) > 1 and value[0] == value[-1] == "\n":
            value = value[1:-1]
        call["arguments"][name] = as_written(call["arguments"][name], value)
    return call


def of_minicpm(self: Any, text: str, tools: Any) -> StreamingParseResult:
    """SGLang's for MiniCPM 5, with texts as they were written; one with tags is marked as text for it."""
    result = StreamingParseResult()
    for piece in re.split(f"({self.func_call_regex})", text, flags=re.DOTALL):
        found = _minicpms(self, MINICPMS.sub(tagged, piece), tools)
        result.normal_text += found.normal_text if found.calls else piece
        for call in found.calls:
            given = json.loads(call.parameters)
            for _, name, value in MINICPMS.findall(piece):
                inner = CDATA.fullmatch(value)
                texts = [inner[1]] if inner else [value, html.unescape(value)]
                for each in texts if name in given else ():
                    given[name] = as_written(given[name], each)
            call.parameters = json.dumps(given, ensure_ascii=False)
            result.calls.append(call)
    return result


def tagged(found: re.Match[str]) -> str:
    """An argument of MiniCPM 5's, marked as text where it has tags in it."""
    value = found[3]
    return found[1] + (f"<![CDATA[{value}]]>" if "<" in value and not CDATA.fullmatch(value) else value)


def block_of_minimax(self: Any, block: str, tools: Any) -> list[Any]:
    """The calls of a block of MiniMax M2's, as SGLang reads them, with texts as they were written."""
    calls: list[Any] = []
    for invoke in self.tool_call_function_regex.finditer(block):
        name, mark, body = (invoke[1] or invoke[2] or "").partition('">')
        if not mark:
            continue
        name, given = name.strip(), {}
        for parameter in self.tool_call_parameter_regex.finditer(body):
            key, mark, value = (parameter[1] or parameter[2] or "").partition('">')
            if mark:
                found = self._parse_parameter(name, key.strip(), value.strip("\n"), tools)
                given[key.strip()] = as_written(found, value)
        calls += self.parse_base_json({"name": name, "arguments": given}, tools)
    return calls


def of_poolside(self: Any, new_text: str, tools: Any) -> StreamingParseResult:
    """SGLang's for Poolside, which takes a line end from both ends of a value: of those it is given."""
    text, self._buffer = self._buffer + new_text, ""
    return _poolsides(self, on_lines(text, self._state.name != "OUTSIDE"), tools)


def of_whole_poolside(self: Any, text: str, tools: Any) -> StreamingParseResult:
    """The same of a whole answer."""
    return _whole_poolsides(self, on_lines(text, within=False), tools)


def on_lines(text: str, within: bool) -> str:
    """A text whose values in Poolside's calls, if they have an end, are on lines of their own.

    Args:
        within: whether it begins within a call.
    """

    def value_on_lines(found: re.Match[str]) -> str:
        nonlocal within
        if found[1] is None:
            within = found[0] == "<tool_call>"
        return f"<arg_value>\n{found[1]}\n</arg_value>" if within and found[1] is not None else found[0]

    return POOLSIDES.sub(value_on_lines, text) if "</arg_value>" in text else text


def of_step3(self: Any, text: str, tools: Any = None) -> tuple[str | None, dict[str, Any]]:
    """SGLang's for a call of Step 3's, with texts as they were written."""
    name, given = _step3s(self, text, tools)
    if invoke := self.invoke_regex.search(text):
        for key, value in self.param_regex.findall(invoke[2]):
            given[key] = as_written(given[key], value)
    return name, given


def or_text(convert: Callable[..., Any]) -> Callable[..., Any]:
    """SGLang's function that reads a value by its schema, of a number that is too large the text."""

    def converted(*args: Any) -> Any:
        try:
            return convert(*args)
        except OverflowError:
            return next(arg for arg in args if isinstance(arg, str))

    return converted


PLACES: tuple[tuple[Any, str, Any], ...] = (
    (DeepSeekV32Detector, "_parse_parameters_from_xml", of_deepseek),
    (DotsToolDetector, "_parse_xml_invoke", of_dots),
    (MiniCPM5Detector, "detect_and_parse", of_minicpm),
    (MinimaxM2Detector, "_parse_block", block_of_minimax),
    (PoolsideV1Detector, "parse_streaming_increment", of_poolside),
    (PoolsideV1Detector, "detect_and_parse", of_whole_poolside),
    (Step3Detector, "_parse_steptml_invoke", of_step3),
    *(
        (place, name, or_text(getattr(place, name)))
        for place, name in (
            (mimo_detector, "_convert_param_value"),
            (MinimaxM2Detector, "_convert_param_value_with_types"),
            (MinimaxM3Detector, "_convert_leaf_value"),
        )
    ),
)
"""SGLang's, and what we put there."""
