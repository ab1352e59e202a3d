"""Arguments of tool calls are read while they are streamed, in a time that hardly grows with what has been read.

SGLang reads all of a call anew with each piece of it, in Python and on the event loop: of a file that an agent
writes, of some thousand tokens, each of the last ones took milliseconds from everybody.

And a Llama's call that is JSON is read as JSON. SGLang takes it for a Python dictionary first and changes its
quotes, those within texts too, after which a text that holds such a dictionary is read no further.
"""

from typing import Any

import jiter
from partial_json_parser.core.options import Allow
from sglang.srt.function_call import base_format_detector
from sglang.srt.function_call.base_format_detector import BaseFormatDetector
from sglang.srt.function_call.llama32_detector import Llama32Detector

_read = base_format_detector._partial_json_loads
_increment = Llama32Detector.parse_streaming_increment


def install() -> None:
    """Put our functions in SGLang's places."""
    base_format_detector._partial_json_loads = read
    base_format_detector._find_common_prefix = common_prefix
    Llama32Detector.parse_streaming_increment = increment


def increment(self: Any, new_text: str, tools: Any) -> Any:
    """SGLang's for Llama, if the call is a Python dictionary."""
    before, _, behind = (self._buffer + new_text).partition(self.bot_token)
    call = (behind or before).lstrip(self.tool_call_separator + " \t\r\n")
    # SGLang's leaves the buffer with other quotes.
    self.of_python = getattr(self, "of_python", False) or call.startswith("{'")
    of = _increment if self.of_python else BaseFormatDetector.parse_streaming_increment
    return of(self, new_text, tools)


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
            return _read(text, flags)
        if found != without:
            return found, len(text)
    return _read(text, flags)


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
