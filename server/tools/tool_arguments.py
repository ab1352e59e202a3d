"""Arguments of tool calls are read while they are streamed, in a time that hardly grows with what has been read.

SGLang reads all of a call anew with each piece of it, in Python and on the event loop: of a file that an agent
writes, of some thousand tokens, each of the last ones took milliseconds from everybody.

And a Llama's call that is JSON is read as JSON. SGLang takes it for a Python dictionary first and changes its
quotes, those within texts too, after which a text that holds such a dictionary is read no further.

Of Mistral's calls in one array SGLang streams the first, and the others as text; an array right behind its mark, as
tokenizers without leading blanks have it, is neither call nor text to it; and it takes every ``]`` out of an answer
without calls. Where nothing of a call can be told before it is closed (Mistral's compact form, and calls in
Python), SGLang looks for its end from its beginning, with each piece. A call in Python with a negative number it
leaves out, one with a bracket in a text it does not find in a stream, and of one with 30 arguments and no end its
search would take minutes.

LFM2's parser mends a text in quotes that has such quotes in it by trying each as its end, and reads all of the
calls each time.

MiniMax M3's parser takes a text without a letter for an object, by the mark that closes it, and an object whose
schema names no type (``anyOf``, ``$ref``) for a text with marks, where a piece ends before its first one.

Some of SGLang's parsers drop a text that comes in one piece with the call behind it, as where a step puts out
several tokens.
"""

import ast
import json
import re
from collections.abc import Callable
from typing import Any

import jiter
from partial_json_parser.core.options import Allow
from sglang.srt.function_call import base_format_detector, deepseekv32_detector, lfm2_detector
from sglang.srt.function_call.base_format_detector import BaseFormatDetector
from sglang.srt.function_call.core_types import StreamingParseResult
from sglang.srt.function_call.lfm2_detector import Lfm2Detector
from sglang.srt.function_call.llama32_detector import Llama32Detector
from sglang.srt.function_call.minimax_m3 import MinimaxM3Detector
from sglang.srt.function_call.mistral_detector import MistralDetector
from sglang.srt.function_call.pythonic_detector import PythonicDetector

from fathom.server.tools import named_calls

Increment = Callable[[Any, str, Any], StreamingParseResult]
_read = base_format_detector._partial_json_loads
_increment = Llama32Detector.parse_streaming_increment
_mistrals = MistralDetector.parse_streaming_increment
_whole_mistrals = MistralDetector.detect_and_parse
_pythonic = named_calls.of_piece(PythonicDetector.parse_streaming_increment)
_literal = PythonicDetector._get_parameter_value
_init_pythonic = PythonicDetector.__init__
_begin_m3, _scalar_m3 = MinimaxM3Detector._consume_param_start, MinimaxM3Detector._consume_scalar_param
_mended = lfm2_detector._escape_nested_quotes_in_strings
MOST_TRIED = 8_000_000
"""Characters that are read to mend a text in quotes: of code of 9,000 characters with 800 quotes, 0.4 s."""
CALL = re.compile(r"\[\s*[A-Za-z_]\w*\(")
OBJECT = re.compile(r"\{\s*(?:[\"']|\Z)")
ALL = re.compile(".*", re.DOTALL)
BRACKETS = re.compile(r"[\[\]]")
OF_CALLS = re.compile(r"""'(?:[^'\\]|\\.)*(?:'|\\?\Z)|"(?:[^"\\]|\\.)*(?:"|\\?\Z)|[\[\]]""", re.DOTALL)
"""Brackets, and texts in Python, the last one without its end too."""


def text_first(increment: Increment) -> Increment:
    """A parser's function for a further piece, which is given a text before a call by itself."""

    def with_text(self: Any, new_text: str, tools: Any) -> StreamingParseResult:
        before, mark, behind = (self._buffer + new_text).partition(self.bot_token)
        # What is no text before a call: one that is being read, and one that begins without the mark.
        call = (
            self.current_tool_name_sent
            or self.has_tool_call(before)
            or (self.current_tool_id > 0 and before.startswith(self.tool_call_separator))
        )
        if call or not (before and mark):
            return increment(self, new_text, tools)
        self._buffer = ""
        said = increment(self, before, tools)
        kept, self._buffer = self._buffer, ""
        found = increment(self, mark + behind, tools)
        found.normal_text = f"{said.normal_text}{kept}{found.normal_text}"
        return found

    return with_text


def increment(self: Any, new_text: str, tools: Any) -> StreamingParseResult:
    """SGLang's for Llama, if the call is a Python dictionary; behind a text no call begins without the mark."""
    if getattr(self, "said", False) and self.current_tool_id < 0 and not self.current_tool_name_sent:
        text = self._buffer + new_text
        if self.bot_token not in text:
            kept = self._ends_with_partial_token(text, self.bot_token)
            self._buffer = text[len(text) - kept :]
            return StreamingParseResult(normal_text=text[: len(text) - kept])
    if self.current_tool_id > 0 and not self.current_tool_name_sent:
        text = self._buffer + new_text
        begin = text.lstrip(self.tool_call_separator + " \t\r\n")
        if self.bot_token not in text and begin and not may_be_call(begin, self.bot_token):
            kept = self._ends_with_partial_token(text, self.bot_token)
            self._buffer = text[len(text) - kept :]
            return StreamingParseResult(normal_text=text[: len(text) - kept])
    before, _, behind = (self._buffer + new_text).partition(self.bot_token)
    call = (behind or before).lstrip(self.tool_call_separator + " \t\r\n")
    # SGLang's leaves the buffer with other quotes.
    self.of_python = getattr(self, "of_python", False) or call.startswith("{'")
    of = _increment if self.of_python else BaseFormatDetector.parse_streaming_increment
    found: StreamingParseResult = of(self, new_text, tools)
    self.said = getattr(self, "said", False) or bool((found.normal_text or "").strip())
    return found


def may_be_call(begin: str, mark: str) -> bool:
    """Whether what stands behind Llama's calls may be a further one: a dictionary, or behind a mark."""
    return bool(OBJECT.match(begin)) or mark.startswith(begin)


def with_blank(self: Any, text: str) -> str:
    """A text with the blank that SGLang wants between Mistral's mark and an array."""
    begin = text.find(self._tool_calls_marker)
    tight = self.bot_token.replace(" ", "")
    if begin < 0 or not text.startswith(tight, begin):
        return text
    return text[:begin] + self.bot_token + text[begin + len(tight) :]


def of_whole_mistral(self: Any, text: str, tools: Any) -> StreamingParseResult:
    """SGLang's for a Mistral's answer that is not streamed."""
    return _whole_mistrals(self, with_blank(self, text), tools)


def without_unknown(self: Any, text: str, tools: Any) -> str:
    """A text without the calls, in Mistral's compact form, that it begins with and no tool has the name of."""
    names = self._get_tool_indices(tools)
    while text.startswith(self._tool_calls_marker):
        call = self._try_parse_compact_args_format(text)
        if call is None or call[0] in names:
            break
        text = text[call[2] :]
    return text


def of_mistral(self: Any, new_text: str, tools: Any) -> StreamingParseResult:
    """SGLang's for Mistral, to the end of an array of calls, and of a text without calls all of it."""
    text = self._buffer + new_text
    if not getattr(self, "within_array", False) and (spaced := with_blank(self, text)) != text:
        self._buffer, new_text, text = "", spaced, spaced
    if getattr(self, "within_array", False) and not self.current_tool_name_sent:
        rest = text.lstrip()
        if rest.startswith("]"):
            self.within_array, self._buffer = False, ""
            return of_mistral(self, rest[1:], tools)
        if not rest.lstrip(", \t\r\n"):
            self._buffer = rest
            return StreamingParseResult()
        if rest.startswith(","):
            self._buffer, new_text = self.tool_call_separator + rest[1:].lstrip(), ""
        else:
            self.within_array = False
    if getattr(self, "within_array", False):
        return BaseFormatDetector.parse_streaming_increment(self, new_text, tools)
    if self._tool_calls_marker not in text and not self._ends_with_partial_token(
        text, self._tool_calls_marker
    ):
        self._buffer = ""
        return StreamingParseResult(normal_text=text)
    compact = "[ARGS" in self._buffer and self.bot_token not in text
    if compact and waits(self, new_text, "]}"):
        return StreamingParseResult()
    if (known := without_unknown(self, text, tools)) != text:
        self._buffer = ""
        return of_mistral(self, known, tools)
    calls, array = self.current_tool_id, text.startswith(self.bot_token)
    found = whole_or_nothing(self, _mistrals, new_text, tools)
    self.within_array = array and self.current_tool_id > max(calls, 0)
    return found


def of_python(self: Any, new_text: str, tools: Any) -> StreamingParseResult:
    """SGLang's for calls that are Python."""
    if self._buffer.startswith("[") and waits(self, new_text, "]"):
        return StreamingParseResult()
    return whole_or_nothing(self, _pythonic, new_text, tools)


class Lists:
    """In the place of SGLang's pattern for a list of calls, whose search takes twice as long for each further
    argument of a call without an end; and brackets within texts count for it.

    It finds what a stream does.
    """

    @staticmethod
    def search(text: str) -> re.Match[str] | None:
        """The first list of calls that has an end."""
        begin = text.find("[")
        while begin >= 0 and (end := end_of_list(text, begin)) >= 0:
            if CALL.match(text, begin):
                return ALL.match(text, begin, end + 1)
            begin = text.find("[", end)
        return None


def end_of_list(text: str, begin: int, *, of_calls: bool = False) -> int:
    """Where the bracket is that closes one; -1 for nowhere. Of calls, brackets within texts are none.

    Args:
        of_calls: whether it is known to be a list of calls.
    """
    depth = 0
    for found in (OF_CALLS if of_calls or CALL.match(text, begin) else BRACKETS).finditer(text, begin):
        depth += {"[": 1, "]": -1}.get(found[0], 0)
        if depth == 0:
            return found.start()
    return -1


def with_lists(self: Any) -> None:
    """SGLang's parser for calls in Python, with our search for them."""
    _init_pythonic(self)
    self.tool_call_regex = Lists


def closing_bracket(self: Any, buffer: str, start: int) -> int:
    """As SGLang's."""
    return end_of_list(buffer, start)


def literal(self: Any, value: ast.expr) -> Any:
    """SGLang's for the value of an argument that is Python, or of a number with a sign."""
    return ast.literal_eval(value) if isinstance(value, ast.UnaryOp) else _literal(self, value)


def begin_of_m3(self: Any, calls: list[Any]) -> bool:
    """SGLang's for the begin of one of MiniMax M3's arguments; a mark behind it may close it."""
    begun: bool = _begin_m3(self, calls)
    self._current_param_is_complex = self._schema_has_type(self._current_param_schema, ("object", "array"))
    return begun


def scalar_of_m3(self: Any, calls: list[Any]) -> bool:
    """SGLang's for an argument that is a text, a number and the like; where the schema leaves it open, until a mark
    within it shows that it is not.
    """
    closing = self._parameter_end_token(self._current_param_name)
    mark = self._buffer.find(self.PARAM_START_PREFIX)
    closes = mark < 0 or self._buffer.startswith(closing, mark) or closing.startswith(self._buffer[mark:])
    if closes or self._is_scalar_schema(self._current_param_schema):
        return bool(_scalar_m3(self, calls))
    self._buffer = self._current_param_buffer + self._buffer
    self._current_param_buffer, self._current_param_is_complex = "", True
    return bool(self._consume_complex_param(calls))


def mended(text: str) -> tuple[str, bool]:
    """SGLang's for LFM2, where it takes no longer than anybody may wait; else the text as it is."""
    tries = max(text.count(quote) for quote in "'\"")
    return _mended(text) if tries * len(text) <= MOST_TRIED else (text, False)


def waits(self: Any, new_text: str, closing: str) -> bool:
    """Whether a call that had no end yet has none with this text either, which is kept then."""
    if not getattr(self, "unended", False) or any(mark in new_text for mark in closing):
        return False
    self._buffer += new_text
    return True


def whole_or_nothing(self: Any, increment: Any, new_text: str, tools: Any) -> StreamingParseResult:
    """What SGLang finds with one more text; if that is nothing, and all is kept, no call has an end yet."""
    text = self._buffer + new_text
    found: StreamingParseResult = increment(self, new_text, tools)
    self.unended = not found.calls and not found.normal_text and self._buffer == text
    return found


def read(text: str, flags: Allow) -> tuple[Any, int]:
    """SGLang's ``_partial_json_loads``; where the text ends within a string, which is nearly everywhere, by jiter.

    There, and only there, it says something else with that string than without.
    """
    if flags == Allow.ALL:
        try:
            found, without = (
                jiter.from_json(
                    text.strip().encode(), allow_inf_nan=False, cache_mode="none", partial_mode=mode
                )
                for mode in ("trailing-strings", "on")
            )
        except ValueError:
            return read_begin(text, flags)
        if found != without:
            return found, len(text)
    return read_begin(text, flags)


def read_begin(text: str, flags: Allow) -> tuple[Any, int]:
    """SGLang's, also of a value that has its end before what is no JSON."""
    try:
        return _read(text, flags)
    except ValueError:
        begin = len(text) - len(text.lstrip())
        try:
            found, end = json.JSONDecoder().raw_decode(text, begin)
        except (ValueError, RecursionError):
            found = None
        if isinstance(found, dict):
            return found, end
        raise


def common_prefix(one: str, other: str) -> str:
    """What both texts begin with."""
    least, most = 0, min(len(one), len(other))
    if one[:most] == other[:most]:
        return one[:most]
    while least < most:
        middle = (least + most + 1) // 2
        if one[:middle] == other[:middle]:
            least = middle
        else:
            most = middle - 1
    return one[:least]


PLACES: tuple[tuple[Any, str, Any], ...] = (
    *((module, "_partial_json_loads", read) for module in (base_format_detector, deepseekv32_detector)),
    *(
        (module, "_find_common_prefix", common_prefix)
        for module in (base_format_detector, deepseekv32_detector)
    ),
    (Llama32Detector, "parse_streaming_increment", text_first(increment)),
    (lfm2_detector, "_escape_nested_quotes_in_strings", mended),
    (MinimaxM3Detector, "_consume_param_start", begin_of_m3),
    (MinimaxM3Detector, "_consume_scalar_param", scalar_of_m3),
    (MistralDetector, "parse_streaming_increment", of_mistral),
    (MistralDetector, "detect_and_parse", of_whole_mistral),
    (PythonicDetector, "parse_streaming_increment", of_python),
    (PythonicDetector, "detect_and_parse", named_calls.of_whole(PythonicDetector.detect_and_parse)),
    (Lfm2Detector, "_parse_pythonic_content", named_calls.of_content(Lfm2Detector._parse_pythonic_content)),
    (PythonicDetector, "__init__", with_lists),
    (PythonicDetector, "_find_matching_bracket", closing_bracket),
    (PythonicDetector, "_get_parameter_value", literal),
)
"""SGLang's, and what we put there."""
