"""What of a stream's text is sent while its end may still be part of a character; tokens that have no text."""

from typing import Any

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


def known_ids(tokenizer: Any) -> int | None:
    """How many token ids a tokenizer knows that raises for others: one in Python.

    A model whose table is padded may put out others. Those written in Rust make no text of them; None for these,
    and where it cannot be told.
    """
    if getattr(tokenizer, "is_fast", False):
        return None
    try:
        return len(tokenizer)
    except TypeError:  # SGLang's own
        return getattr(tokenizer, "vocab_size", None)
