"""Thoughts in a stream: they and the text behind them are those of the whole answer, whatever pieces come.

Of a piece with the end of the thoughts and more, as where a step puts out several tokens, SGLang's parser for
Cohere takes one step: what is left when the stream ends is dropped, which may be all of the text. And it tells a
mark that the model repeats as a thought. Where blanks or a text come before the thoughts, its parsers with one mark
before them and one behind take these for thoughts too, the mark included, or for none of both: by where pieces end.
"""

from collections.abc import Callable
from typing import Any

from sglang.srt.parser.reasoning_parser import (
    BaseReasoningFormatDetector,
    CohereCommand4Detector,
    StreamingParseResult,
)

Increment = Callable[[Any, str], StreamingParseResult]
_step = CohereCommand4Detector.parse_streaming_increment
_whole = BaseReasoningFormatDetector._detect_and_parse_impl
_increment = BaseReasoningFormatDetector._parse_streaming_increment_impl


def of_cohere(self: Any, new_text: str) -> StreamingParseResult:
    """All steps of SGLang's for Cohere, without a mark of thoughts at the begin."""
    if not self.stripped_think_start and not self._reasoning_done:
        text, mark = self._buffer + new_text, self.think_start_token
        if len(text) < len(mark) and mark.startswith(text):
            self._buffer = text
            return StreamingParseResult()
        self.stripped_think_start = True
        self._buffer, new_text = "", text.removeprefix(mark)
    found = more = _step(self, new_text)
    while more.normal_text or more.reasoning_text:
        more = _step(self, "")
        found.normal_text += more.normal_text
        found.reasoning_text += more.reasoning_text
    return found


def text_first(self: Any, text: str) -> tuple[str, str]:
    """What is text before the first thoughts, and the rest."""
    begin = text.find(self.think_start_token + self.think_start_self_label)
    if self._in_reasoning or self.stripped_think_start or begin < 0 or self.think_end_token in text[:begin]:
        begin = 0
    return text[:begin], text[begin:]


def whole(self: Any, text: str) -> StreamingParseResult:
    """SGLang's for a whole answer, without the text before its thoughts, which is text, and without their mark."""
    before, rest = text_first(self, text)
    if self._in_reasoning:
        thoughts, end, behind = rest.partition(self.think_end_token)
        mark = self.think_start_token + self.think_start_self_label
        rest = thoughts.replace(mark, "", 1) + end + behind
    found: StreamingParseResult = _whole(self, rest)
    found.normal_text = before + found.normal_text
    return found


def increment(self: Any, new_text: str) -> StreamingParseResult:
    """The same in a stream; what may be the begin of the mark waits for the rest of it."""
    before, rest = text_first(self, self._buffer + new_text)
    if before:
        self._buffer, new_text = "", rest
    found: StreamingParseResult = _increment(self, new_text)
    if not (self._in_reasoning or self.stripped_think_start or self._buffer or found.reasoning_text):
        mark = self.think_start_token + self.think_start_self_label
        end = len(found.normal_text) - self._ends_with_partial_token(found.normal_text, mark)
        found.normal_text, self._buffer = found.normal_text[:end], found.normal_text[end:]
    found.normal_text = before + found.normal_text
    return found


PLACES: tuple[tuple[Any, str, Any], ...] = (
    (CohereCommand4Detector, "parse_streaming_increment", of_cohere),
    (BaseReasoningFormatDetector, "_detect_and_parse_impl", whole),
    (BaseReasoningFormatDetector, "_parse_streaming_increment_impl", increment),
)
"""SGLang's, and what we put there."""


def install() -> None:
    """Put our functions in SGLang's places."""
    for place in PLACES:
        setattr(*place)
