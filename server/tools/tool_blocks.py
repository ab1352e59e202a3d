"""Tool calls between marks: streamed they are the calls, and the text around them the text, of the whole answer.

Many of SGLang's parsers lose calls or text of a stream whose pieces are not single tokens, as where drafts are
accepted or a client asks for longer pieces, and tell half a mark as text. And of an answer that is not streamed
most leave out the text behind the first call, which they stream.

Some look for what is between marks by the blanks at its ends too, in all ways to share these out: of 5,000 line
ends in dots' format, half a minute in which nobody is answered.

Here a call of the JSON formats (Qwen, Hermes) is given to SGLang's reader of JSON alone, without what is around
it. Of other formats whose parsers are not sound a block of calls is told when it is closed, as SGLang's parser for
whole answers reads it. And the text of a whole answer is what a stream of it says.
"""

import copy
import json
import re
from collections.abc import Callable, Collection, Iterable
from enum import Enum
from types import SimpleNamespace
from typing import Any

from sglang.srt.function_call import internlm_detector, kimik3_detector, kimik3_format
from sglang.srt.function_call.base_format_detector import BaseFormatDetector
from sglang.srt.function_call.cohere_command4_detector import CohereCommand4Detector
from sglang.srt.function_call.core_types import StreamingParseResult, ToolCallItem
from sglang.srt.function_call.deepseekv3_detector import DeepSeekV3Detector
from sglang.srt.function_call.deepseekv31_detector import DeepSeekV31Detector
from sglang.srt.function_call.deepseekv32_detector import DeepSeekV32Detector
from sglang.srt.function_call.dots_detector import DotsToolDetector
from sglang.srt.function_call.function_call_parser import FunctionCallParser
from sglang.srt.function_call.gigachat3_detector import GigaChat3Detector
from sglang.srt.function_call.gpt_oss_detector import GptOssDetector
from sglang.srt.function_call.hermes_detector import HermesDetector
from sglang.srt.function_call.hunyuan_detector import HunyuanDetector
from sglang.srt.function_call.internlm_detector import InternlmDetector
from sglang.srt.function_call.kimik2_detector import KimiK2Detector
from sglang.srt.function_call.kimik3_detector import KimiK3Detector
from sglang.srt.function_call.lfm2_detector import Lfm2Detector
from sglang.srt.function_call.ling3_detector import Ling3Detector
from sglang.srt.function_call.llama32_detector import Llama32Detector
from sglang.srt.function_call.mimo_detector import MiMoDetector
from sglang.srt.function_call.minicpm5_detector import MiniCPM5Detector
from sglang.srt.function_call.minimax_m2 import MinimaxM2Detector
from sglang.srt.function_call.mistral_detector import MistralDetector
from sglang.srt.function_call.qwen3_coder_detector import Qwen3CoderDetector
from sglang.srt.function_call.qwen25_detector import Qwen25Detector
from sglang.srt.function_call.step3_detector import Step3Detector

from fathom.server.tools import unended_calls

Increment = Callable[[Any, str, Any], StreamingParseResult]

BLOCKS: dict[type[BaseFormatDetector], tuple[str, str]] = {
    DeepSeekV3Detector: ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    DeepSeekV31Detector: ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    GigaChat3Detector: ("<|function_call|>", "</s>"),
    InternlmDetector: ("<|action_start|> <|plugin|>", "<|action_end|>"),
    MiMoDetector: ("<tool_call>", "</tool_call>"),
    MiniCPM5Detector: ("<function", "</function>"),
    MinimaxM2Detector: ("<minimax:tool_call>", "</minimax:tool_call>"),
    Step3Detector: ("<｜tool_calls_begin｜>", "<｜tool_calls_end｜>"),
}
"""Marks before and behind a block of calls that is told as a whole."""
OF_JSON = Qwen25Detector, HermesDetector
STRING = re.compile(r'"(?:[^"\\\n]|\\.)*(?:"|\\?$)')
"""Of JSON, at the end of a text without its end."""
STEP3S = re.compile(
    r'<steptml:parameter name="([^"]+)">((?:[^<]|<(?!/?steptml:))*+)</steptml:parameter>',
)
"""An argument of Step 3's."""
KIMIS = (
    *(
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
        "<|tool_call_begin|>",
        "<|tool_call_end|>",
    ),
    "<|tool_call_argument_begin|>",
)
KIMI_K3S = kimik3_format.RESPONSE_OPEN, kimik3_format.RESPONSE_CLOSE, kimik3_format.MESSAGE_CLOSE
HARMONYS = (
    *("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>", "<|return|>"),
    *("<|channel|>commentary to=", "<|start|>assistant"),
)
_kimis = KimiK2Detector.parse_streaming_increment
_harmonys = GptOssDetector.parse_streaming_increment
_kimi_k3s, _finish_kimi_k3 = KimiK3Detector.parse_streaming_increment, KimiK3Detector.finish
_deepseeks = DeepSeekV32Detector.parse_streaming_increment
_hunyuans = HunyuanDetector.parse_streaming_increment
_coheres = CohereCommand4Detector.detect_and_parse
_qwen3_coders = Qwen3CoderDetector.detect_and_parse
_init_step3 = Step3Detector.__init__
_finish = BaseFormatDetector.finish
_calls_of_json = BaseFormatDetector.parse_base_json
_whole = FunctionCallParser.parse_non_stream


class Place(Enum):
    """Where in an answer of a JSON format a stream is."""

    TEXT = 0
    CALL = 1
    BEHIND = 2  # between a call's JSON and the mark that closes it
    UNKNOWN = 3  # in a call of a tool that there is not


def begun(text: str, marks: Iterable[str]) -> int:
    """How much of a text's end is the begin of a mark, and not all of it."""
    most = max(
        (
            length
            for mark in marks
            for length in range(1, min(len(mark) - 1, len(text)) + 1)
            if text.endswith(mark[:length])
        ),
        default=0,
    )
    return most


def split(text: str, marks: Iterable[str]) -> tuple[str, str]:
    """A text, and what of its end may be the begin of a mark."""
    kept = begun(text, marks)
    return text[: len(text) - kept], text[len(text) - kept :]


def of_blocks(opening: str, closing: str) -> Increment:
    """A parser's function for a further piece: text around blocks at once, the calls of one when it is closed."""

    def increment(self: Any, new_text: str, tools: Any) -> StreamingParseResult:
        searched = len(self._buffer)
        text, said = self._buffer + new_text, ""
        calls: list[Any] = []
        while True:
            before, mark, _ = text.partition(opening)
            if not mark:
                more, self._buffer = split(text, [opening])
                return StreamingParseResult(normal_text=said + more, calls=calls)
            said, text, searched = said + before, text[len(before) :], searched - len(before)
            end = text.find(closing, max(len(opening), searched - len(closing)))
            if end < 0:
                self._buffer = text
                return StreamingParseResult(normal_text=said, calls=calls)
            end += len(closing)
            more, found = read_block(self, text[:end], tools)
            said, calls = said + more, calls + found
            text, searched = text[end:], 0

    increment.opening = opening  # type: ignore[attr-defined]
    return increment


def read_block(self: Any, block: str, tools: Any) -> tuple[str, list[Any]]:
    """The calls of a block, with numbers that go on; of one without any the text that SGLang tells."""
    found = self.detect_and_parse(block, tools)
    for call in found.calls:
        self.current_tool_id += 1
        call.tool_index = self.current_tool_id
    return "" if found.calls else found.normal_text or "", list(found.calls)


def message_by_message(self: Any, new_text: str, tools: Any) -> StreamingParseResult:
    """SGLang's for GPT-OSS, which gets no more than the end of one message and no mark in two pieces."""
    text, self.half_a_mark = split(getattr(self, "half_a_mark", "") + new_text, HARMONYS)
    result = StreamingParseResult()
    for piece in re.split(r"(?<=<\|call\|>)|(?<=<\|end\|>)", text):
        if not piece:
            continue
        plain = self._buffer + piece
        found = _harmonys(self, piece, tools)
        of_message = "<|message|>" in self.harmony_parser._buffer
        if found.normal_text == plain and not (of_message or any(mark in plain for mark in HARMONYS)):
            # It is in the parser below too, which would tell it with the next message.
            self.harmony_parser = type(self.harmony_parser)()
        result.normal_text += found.normal_text or ""
        result.calls.extend(found.calls)
    return result


def by_sections(increment: Increment, *more: str) -> Increment:
    """A parser's function for a further piece, which gets no text behind a section of calls, which it would drop,
    and no mark in two pieces.

    Args:
        more: marks, besides the section's own, that are no text.
    """

    def with_text_behind(self: Any, new_text: str, tools: Any) -> StreamingParseResult:
        opening, closing = re.escape(self.bot_token), re.escape(self.eot_token)
        text = getattr(self, "half_a_mark", "") + new_text
        text, self.half_a_mark = split(text, (self.bot_token, self.eot_token, *more))
        result = StreamingParseResult()
        for piece in filter(None, re.split(f"(?={opening})|(?<={closing})", text)):
            if piece.startswith(self.bot_token):
                self.in_section = True
            elif getattr(self, "behind_calls", False):
                for mark in more:
                    piece = piece.replace(mark, "")
                result.normal_text += piece
                continue
            found = increment(self, piece, tools)
            result.normal_text += found.normal_text or ""
            result.calls.extend(found.calls)
            if piece.endswith(self.eot_token):
                self.in_section = False
            self.behind_calls = piece.endswith(self.eot_token) and self.current_tool_id >= 0
        return result

    return with_text_behind


def finish_kimi_k3(self: Any, tools: Any) -> StreamingParseResult:
    """SGLang's for Kimi K3, with what ended as a mark begins."""
    result: StreamingParseResult = _finish_kimi_k3(self, tools)
    if not getattr(self, "in_section", False):
        rest = kimik3_format.strip_partial_marker_suffix(getattr(self, "half_a_mark", ""))
        result.normal_text = (result.normal_text or "") + rest
    return result


def whole_items(self: Any, text: str, tools: Any) -> StreamingParseResult:
    """SGLang's for Cohere's block of calls, of one without an end the calls that are whole."""
    before, mark, block = text.partition(self.bot_token)
    if not mark or self.eot_token in block:
        return _coheres(self, text, tools)
    decoder, items, rest = json.JSONDecoder(), [], block.lstrip("[ \t\r\n")
    while rest:
        try:
            item, end = decoder.raw_decode(rest)
        except ValueError:
            break
        items.append(item)
        rest = rest[end:].lstrip(", \t\r\n")
    return _coheres(self, before + mark + json.dumps(items) + self.eot_token, tools)


def whole_functions(self: Any, text: str, tools: Any) -> StreamingParseResult:
    """SGLang's for Qwen3-Coder, without a call that the answer ends within: it would have the arguments so far."""
    if self.tool_call_end_token not in text:
        ended, mark, rest = text.rpartition(self.function_end_token)
        text = ended + mark + rest.partition(self.tool_call_prefix)[0]
    return _qwen3_coders(self, text, tools)


def without_blanks(self: Any, new_text: str, tools: Any) -> StreamingParseResult:
    """SGLang's for DeepSeek V3.2, without the lines' ends between calls."""
    behind = self.current_tool_id >= 0
    found: StreamingParseResult = _deepseeks(self, new_text, tools)
    if behind and (found.normal_text or "").isspace():
        found.normal_text = ""
    return found


def linear(pattern: str) -> str:
    """SGLang's pattern, whose search no longer tries all ways to share out blanks. Those before a closing mark it
    leaves to SGLang, which strips them.
    """
    return re.sub(r"\\s([*+])\(", r"\\s\1+(", pattern).replace(r"(.*?)\s*<", "(.*?)<")


def with_linear(init: Callable[[Any], None], name: str) -> Callable[[Any], None]:
    """The function by which a parser begins, and such a pattern."""

    def begin(self: Any) -> None:
        init(self)
        setattr(self, name, compiled(getattr(self, name)))

    return begin


def compiled(pattern: re.Pattern[str]) -> re.Pattern[str]:
    return re.compile(linear(pattern.pattern), pattern.flags)


def with_brackets(self: Any) -> None:
    """SGLang's parser for Step 3, which would leave out an argument with a ``<`` in it."""
    _init_step3(self)
    self.param_regex = STEP3S


def find_blocks(pattern: str, text: str, flags: int) -> list[str]:
    """As ``re.findall`` of such a pattern."""
    return re.findall(linear(pattern), text, flags)


def of_json(self: Any, new_text: str, tools: Any) -> StreamingParseResult:
    """SGLang's for calls in JSON between marks, which reads no more than that JSON."""
    text, said, calls = getattr(self, "unread", "") + new_text, "", []
    place = getattr(self, "place", Place.TEXT)
    opening, closing = self.bot_token, self.eot_token.strip()
    while text:
        if place is Place.TEXT:
            before, mark, text = text.partition(opening)
            if mark:
                said, place, self._buffer = said + before, Place.CALL, mark
                continue
            more, text = split(before, [opening])
            said += more
        elif place is Place.CALL:
            given = len(text)
            found, text, place = json_of(self, text, tools)
            calls += found
            if place is not Place.CALL:
                continue
            if (end := end_of_call(self._buffer, closing, given)) >= 0:
                if self.current_tool_name_sent:
                    if is_json(self._buffer[len(opening) : end - len(closing)]):
                        calls.append(ToolCallItem(tool_index=self.current_tool_id, parameters="{}"))
                    self.current_tool_id, self.current_tool_name_sent = self.current_tool_id + 1, False
                text, place, self._buffer = self._buffer[end:], Place.TEXT, ""
                continue
        elif place is Place.UNKNOWN:
            _, mark, behind = text.partition(closing)
            text = behind if mark else split(text, [closing])[1]
            if mark:
                place = Place.TEXT
                continue
        else:
            rest = text.lstrip()
            if not closing.startswith(rest) or rest == closing:
                text, place = rest.removeprefix(closing) if rest.startswith(closing) else text, Place.TEXT
                continue
        break
    self.unread, self.place = text, place
    return StreamingParseResult(normal_text=said, calls=calls)


def json_of(self: Any, text: str, tools: Any) -> tuple[list[Any], str, Place]:
    """Pieces of a call in JSON, what is behind it, and the place that this is."""
    number, told = self.current_tool_id, list(self.streamed_args_for_tool)
    call, calls = self._buffer + text, []
    while True:
        found = BaseFormatDetector.parse_streaming_increment(self, text, tools).calls
        calls += found
        text = ""
        if self.current_tool_id > max(number, 0) and not self.current_tool_name_sent:
            behind, self._buffer = self._buffer, ""
            return calls, behind, Place.BEHIND
        if not self._buffer:
            self.current_tool_id, self.streamed_args_for_tool = number, told
            return calls, call, Place.UNKNOWN
        if not found:
            return calls, "", Place.CALL


def end_of_call(call: str, closing: str, new: int) -> int:
    """Where the mark ends that closes a call whose JSON SGLang finds no end of; -1 for nowhere.

    It finds none of malformed JSON, and of a call without arguments.

    Args:
        new: characters at the end of the call that were not there when it was last looked for.
    """
    if closing not in call[-new - len(closing) :]:
        return -1
    outside = STRING.sub(lambda string: "_" * len(string[0]), call)
    found = outside.find(closing)
    return found + len(closing) if found >= 0 else -1


def calls_of_objects(self: Any, found: Any, tools: Any) -> list[ToolCallItem]:
    """SGLang's for JSON, of what is an object: of a number or list behind calls, as of a text, it would raise."""
    found = found if isinstance(found, list) else [found]
    calls: list[ToolCallItem] = _calls_of_json(
        self, [each for each in found if isinstance(each, dict)], tools
    )
    return calls


def finish(self: Any, tools: Any) -> StreamingParseResult:
    """What a stream's end shows to be text, as half a mark is; and calls of a block that it closes."""
    result: StreamingParseResult = _finish(self, tools)
    opening, rest = getattr(type(self).parse_streaming_increment, "opening", None), ""
    buffer, self._buffer = self._buffer[getattr(self, "parsed_pos", 0) :], ""
    if opening is not None and buffer.startswith(opening):
        rest, calls = read_block(self, buffer, tools)
        result.calls.extend(calls)
    elif isinstance(self, OF_JSON):
        rest = getattr(self, "unread", "") if getattr(self, "place", Place.TEXT) is Place.TEXT else ""
    elif self.current_tool_id < 0:
        rest, calls = read_block(self, buffer, tools) if self.has_tool_call(buffer) else (buffer, [])
        result.calls.extend(calls)
    elif opening is not None or not goes_on(self, buffer):
        rest = buffer
    if not getattr(self, "in_section", False):  # or all that is left is of a call
        result.normal_text = (result.normal_text or "") + rest + getattr(self, "half_a_mark", "")
    return result


def goes_on(self: Any, rest: str) -> bool:
    """Whether what a parser has kept behind calls is of a call, which has no end."""
    if getattr(self, "is_inside_tool_call", self.current_tool_name_sent):  # the former where a parser has it
        return True
    begin = rest.lstrip()
    if isinstance(self, Llama32Detector):
        return not begin.strip(self.tool_call_separator + " \t\r\n")
    if isinstance(self, MistralDetector):
        return self.within_array or self._tool_calls_marker in rest
    further = begin.startswith(("{", "[", *filter(None, [self.tool_call_separator.strip()])))
    return further or any(mark and mark in rest for mark in (self.bot_token, self.eot_token))


def whole(self: Any, full_text: str) -> tuple[str, list[Any]]:
    """SGLang's for an answer that is not streamed, whose text is what a stream says; calls are numbered in order.

    Where a stream has as many calls that are whole, those: some parsers find none in a block without an end, or
    read the first block alone, or make another text of a string (GLM's ``None`` of ``null``). Of malformed calls
    some tell all of the answer, or nothing that is behind them.
    """
    streamed = copy.copy(self)
    streamed.detector = copy.deepcopy(self.detector)
    try:
        text, calls = _whole(self, full_text)
    except RecursionError:  # more brackets within each other than Python reads
        return full_text, []
    (said, found), (rest, more) = streamed.parse_stream_chunk(full_text), streamed.parse_stream_end()
    told = complete([*found, *more], {tool.function.name for tool in self.tools})
    calls = max(told, calls, key=len)
    cut = unended_calls.begin(self, full_text) < len(full_text)
    if calls or cut or isinstance(self.detector, (*OF_JSON, *BLOCKS, CohereCommand4Detector, Lfm2Detector)):
        text = ((said or "") + rest).strip()
    for number, call in enumerate(calls):
        call.tool_index = number
    return text, calls


def complete(pieces: Iterable[ToolCallItem], names: Collection[str | None]) -> list[ToolCallItem]:
    """The calls of a stream that have a name of these and whole arguments; the others have no end."""
    calls: dict[int, ToolCallItem] = {}
    for piece in pieces:
        call = calls.setdefault(piece.tool_index, ToolCallItem(tool_index=piece.tool_index, parameters=""))
        call.name, call.parameters = piece.name or call.name, call.parameters + piece.parameters
    return [call for call in calls.values() if call.name in names and is_json(call.parameters)]


def is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


_INCREMENT, _PARTIAL = "parse_streaming_increment", "_STREAMING_PARTIAL_PATTERN"
PLACES: tuple[tuple[Any, str, Any], ...] = (
    *((detector, _INCREMENT, of_blocks(*marks)) for detector, marks in BLOCKS.items()),
    *((detector, _INCREMENT, of_json) for detector in OF_JSON),
    (KimiK2Detector, _INCREMENT, by_sections(_kimis, *KIMIS)),
    (GptOssDetector, _INCREMENT, message_by_message),
    (DeepSeekV32Detector, _INCREMENT, by_sections(without_blanks)),
    (KimiK3Detector, _INCREMENT, by_sections(_kimi_k3s, *KIMI_K3S)),
    (KimiK3Detector, "finish", finish_kimi_k3),
    (HunyuanDetector, _INCREMENT, by_sections(_hunyuans)),
    (CohereCommand4Detector, "detect_and_parse", whole_items),
    (Qwen3CoderDetector, "detect_and_parse", whole_functions),
    (Step3Detector, "__init__", with_brackets),
    (DotsToolDetector, "__init__", with_linear(DotsToolDetector.__init__, "func_call_regex")),
    (Ling3Detector, "__init__", with_linear(Ling3Detector.__init__, "func_detail_regex")),
    (Ling3Detector, _PARTIAL, compiled(getattr(Ling3Detector, _PARTIAL))),
    *((kimik3_detector, name, compiled(getattr(kimik3_detector, name))) for name in ("_CALL_RE", "_ARG_RE")),
    (internlm_detector, "re", SimpleNamespace(**{**vars(re), "findall": find_blocks})),
    (BaseFormatDetector, "finish", finish),
    (BaseFormatDetector, "parse_base_json", calls_of_objects),
    (FunctionCallParser, "parse_non_stream", whole),
)
"""SGLang's, and what we put there."""
