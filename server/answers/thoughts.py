"""Thoughts in a stream: they and the text behind them are those of the whole answer, whatever pieces come.

Of a piece with the end of the thoughts and more, as where a step puts out several tokens, SGLang's parser for
Cohere takes one step: what is left when the stream ends is dropped, which may be all of the text. And it tells a
mark that the model repeats as a thought. Where blanks or a text come before the thoughts, its parsers with one mark
before them and one behind take these for thoughts too, the mark included, or for none of both: by where pieces end.
A mark in the text behind thoughts that a template has begun is text to them in a whole answer, and begins others in
a stream.
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
    """SGLang's for Cohere, with the step behind the end of thoughts, without a mark of them at the begin."""
    if not self.stripped_think_start:
        text, mark = self._buffer + new_text, self.think_start_token
        if mark.startswith(text):
            self._buffer = text
            return StreamingParseResult()
        self.stripped_think_start = True
        self._buffer, new_text = "", text.removeprefix(mark)
    found = _step(self, new_text)
    if found.reasoning_text:
        found.normal_text += _step(self, "").normal_text
    return found


def mark_of(self: Any) -> str:
    """What stands before thoughts."""
    mark: str = self.think_start_token + self.think_start_self_label
    return mark


def text_first(self: Any, text: str) -> tuple[str, str]:
    """What is text before the first thoughts, and the rest."""
    begin = text.find(mark_of(self))
    if self._in_reasoning or begin < 0:
        begin = 0
    return text[:begin], text[begin:]


def whole(self: Any, text: str) -> StreamingParseResult:
    """SGLang's for a whole answer, without the text before its thoughts, which is text, and without their mark."""
    if not self._in_reasoning and mark_of(self) not in text:
        return StreamingParseResult(normal_text=text)
    before, rest = text_first(self, text)
    if self._in_reasoning:
        thoughts, end, behind = rest.partition(self.think_end_token)
        rest = thoughts.replace(mark_of(self), "", 1) + end + behind
    found: StreamingParseResult = _whole(self, rest)
    found.normal_text = before + found.normal_text
    return found


def increment(self: Any, new_text: str) -> StreamingParseResult:
    """The same in a stream; what may be the begin of the mark waits for the rest of it."""
    before, rest = text_first(self, self._buffer + new_text)
    thinks, behind, self._buffer = self._in_reasoning, "", ""
    if thinks:
        thoughts, end, behind = rest.partition(self.think_end_token)
        rest = thoughts + end
    found: StreamingParseResult = _increment(self, rest)
    found.normal_text += behind
    if thinks and not self._in_reasoning:
        self.stripped_think_start = True  # one that comes now is text
    if not (self.stripped_think_start or self._buffer):
        end = len(found.normal_text) - self._ends_with_partial_token(found.normal_text, mark_of(self))
        found.normal_text, self._buffer = found.normal_text[:end], found.normal_text[end:]
    found.normal_text = before + found.normal_text
    return found


PLACES: tuple[tuple[Any, str, Any], ...] = (
    (CohereCommand4Detector, "parse_streaming_increment", of_cohere),
    (BaseReasoningFormatDetector, "_detect_and_parse_impl", whole),
    (BaseReasoningFormatDetector, "_parse_streaming_increment_impl", increment),
)
"""SGLang's, and what we put there."""
