"""What GPT-OSS says before its calls is told as it is written.

SGLang's parser of its messages holds such a message of the channel ``commentary`` until it ends, and drops what an
answer ends within: of one that ``max_tokens`` cuts there, people see nothing. Thoughts and the last message it
tells in pieces, and so are these here.

Behind a call it leaves out a word of models that repeat the channel's name, and also the begin of a message, as
``C`` of ``C++``.
"""

from typing import Any

from sglang.srt.parser.harmony_parser import CanonicalStrategy, Event, HarmonyParser

_thoughts = CanonicalStrategy._parse_partial_analysis
_parse = HarmonyParser.parse


def begun(self: Any, text: str, tokens: list[Any], start_pos: int) -> tuple[Any, str] | None:
    """SGLang's for the begin of a message of thoughts, and of one that is said to nobody but the user.

    Returns:
        What is told of it, and the text that is kept for the next piece; None of any other message.
    """
    if found := _thoughts(self, text, tokens, start_pos):
        return found
    marks = [token for token in tokens[start_pos:] if token.type != "TEXT"]
    if [mark.type for mark in marks][-2:] != ["CHANNEL", "MESSAGE"] or len(marks) > 3:
        return None
    header = text[marks[0].start : marks[-1].start]
    if self._extract_channel_type(text[marks[-2].end : marks[-1].start]) != "commentary" or "to=" in header:
        return None
    said = text[marks[-1].end :]
    # An event that tells nothing: without one, the parser of calls takes the piece for plain text.
    event = Event("normal", said) if said else Event("reasoning", "")
    return event, text[marks[0].start : marks[-1].end]


def parse(self: Any, chunk: str) -> list[Event]:
    """SGLang's for a further piece; in a message no word is left out."""
    text = self._buffer + chunk
    if text.startswith(("<|start|>", "<|channel|>")) and "<|message|>" in text:
        self._should_filter_commentary, self._partial_commentary = False, ""
    events: list[Event] = _parse(self, chunk)
    return events


PLACES: tuple[tuple[Any, str, Any], ...] = (
    (CanonicalStrategy, "_parse_partial_analysis", begun),
    (HarmonyParser, "parse", parse),
)
"""SGLang's, and what we put there."""
