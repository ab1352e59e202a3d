"""What of a stream's text is sent while its end may still be part of a character."""

REPLACEMENT = "\ufffd"
"""What a tokenizer decodes part of a character to."""


def install() -> None:
    """Let SGLang's detokenizer send text by :func:`settled`."""
    from sglang.srt.managers import detokenizer_manager

    detokenizer_manager.find_printable_text = settled


def settled(text: str) -> str:
    """What of a text stays as it is, whatever tokens follow.

    SGLang's function may take less of a longer text, and its detokenizer then sends again what it has sent: where
    several tokens come at a time, as under drafting, streams repeated characters.
    """
    return text.rstrip(REPLACEMENT)
