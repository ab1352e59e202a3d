"""Texts that end an answer, where characters span tokens.

SGLang looks for them in the text of an answer's last tokens: one more than the stop is encoded to. An answer may
have the same text in more tokens; and of a window that begins within a character, a tokenizer that falls back to
bytes decodes none of the bytes. A stream is held back while its end may become a stop, which SGLang does not see
where the end is part of a character.
"""

from typing import Any

from sglang.srt.managers.detokenizer_manager import DetokenizerManager
from sglang.srt.managers.schedule_batch import Req

from fathom.runtime.sglang_host.reports.detokenizer import REPLACEMENT, known_ids, settled

BYTES_OF_A_CHARACTER = 4
"""At most, in UTF-8, and so many tokens it may span."""

_stop_match_tail_len = Req._stop_match_tail_len


def stop_match_tail_len(self: Req, new_accepted_len: int) -> int:
    """How many of the last tokens are looked at: SGLang's number, or as many as the longest stop can have.

    No token is less than a byte. As in SGLang there is one before them: some tokenizers strip a text's first blank.
    """
    longest = max((len(stop.encode()) for stop in self.sampling_params.stop_strs or ()), default=0)
    least = min(longest + max(new_accepted_len, 1), len(self.output_ids)) if longest else 0
    return max(_stop_match_tail_len(self, new_accepted_len), least)


def tail_str(self: Req, new_accepted_len: int = 1) -> str:
    """The text of those tokens, and of up to three before them if they begin within a character."""
    if not (self.sampling_params.stop_strs or self.sampling_params.stop_regex_strs):
        return ""
    begin = len(self.output_ids) - stop_match_tail_len(self, new_accepted_len)
    text = decoded(self.tokenizer, self.output_ids[begin:])
    for earlier in range(1, min(BYTES_OF_A_CHARACTER, begin + 1)):
        if not text.startswith(REPLACEMENT):
            break
        wider = decoded(self.tokenizer, self.output_ids[begin - earlier :])
        if not wider.startswith(REPLACEMENT):
            return wider
    return text


def decoded(tokenizer: Any, ids: list[int]) -> str:
    """The text of tokens, of which unknown ones are what SGLang's detokenizer takes them for."""
    if (known := known_ids(tokenizer)) is not None:
        ids = DetokenizerManager._clamp_decode_ids(ids, known)
    return tokenizer.decode(ids)


def check_match_stop_str_prefix(self: Req) -> bool:
    """Whether what a stream would send by now ends with a stop, or with the beginning of one."""
    stops = [stop for stop in self.sampling_params.stop_strs or () if stop]
    tail = settled(self.tail_str()) if stops else ""
    return any(
        stop in tail or any(tail.endswith(stop[:count]) for count in range(1, len(stop))) for stop in stops
    )


def install() -> None:
    """Put our functions in the places of SGLang's."""
    Req._stop_match_tail_len = stop_match_tail_len
    Req.tail_str = tail_str
    Req.check_match_stop_str_prefix = check_match_stop_str_prefix
