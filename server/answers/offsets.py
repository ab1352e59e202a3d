"""Where each token of a completion begins in its text (``text_offset`` of log-probabilities): SGLang says -1."""

from collections.abc import Callable, Collection, Sequence
from typing import Any

from fathom.server.requests.context import CURRENT

BROKEN = "\ufffd"
"""In the text of a token that is part of a character."""
AROUND = 16
"""Characters within which a token is looked for that is not where the one before it ends."""


class Places:
    """Finds the tokens of one text, which may come in pieces.

    Args:
        decode: the text of token ids, those of special tokens included.
        special: ids of tokens that may not be in the text.
    """

    def __init__(self, decode: Callable[[list[int]], str], special: Collection[int]):
        self._decode, self._special = decode, special
        self._text, self._at = "", 0
        self._parts: list[int] = []

    def add(self, text: str, tokens: Sequence[tuple[Any, int, str]]) -> list[int]:
        """Where further tokens (log-probability, id, text of its own) begin.

        Args:
            text: that comes with them; that of tokens which are parts of a character may come later.

        Returns:
            The offset of each, in characters: of the character where a token is part of one, and of what follows
            where it is not in the text.
        """
        self._text += text
        return [self._place(token, own) for _, token, own in tokens]

    def _place(self, token: int, own: str) -> int:
        if BROKEN in own:
            before = self._decode(self._parts).rstrip(BROKEN) if self._parts else ""
            self._parts.append(token)
            return self._at + len(before)
        if self._parts:
            self._at += len(self._decode(self._parts))
            self._parts = []
        if not self._text.startswith(own, self._at):
            if token in self._special:
                return self._at
            # A token alone loses the blank that it begins with where a tokenizer writes none at a text's begin.
            found = self._text.find(own, self._at, self._at + len(own) + AROUND)
            self._at = found if found >= 0 else self._at
        begin = self._at
        self._at += len(own)
        return begin


def install() -> None:
    """Put our functions around SGLang's, which makes the log-probabilities of a choice and then the choice."""
    from sglang.srt.entrypoints import http_server
    from sglang.srt.entrypoints.openai import serving_completions as completions

    make = completions.to_openai_style_logprobs
    last: tuple[Any, list[Any]] = (None, [])

    def with_tokens(**given: Any) -> Any:
        nonlocal last
        told = make(**given)
        last = told, [*(given["input_token_logprobs"] or ()), *(given["output_token_logprobs"] or ())]
        return told

    def new_places() -> Places:
        tokenizer = http_server.get_global_state().tokenizer_manager.tokenizer
        return Places(tokenizer.decode, frozenset(getattr(tokenizer, "all_special_ids", ())))

    def with_offsets(kind: Callable[..., Any]) -> Callable[..., Any]:
        def made(**given: Any) -> Any:
            index, logprobs, context = given["index"], given.get("logprobs"), CURRENT.get()
            known = context.places if context is not None else {}
            if logprobs is not None and index not in known:
                known[index] = new_places()
            if index in known:
                offsets = known[index].add(given["text"], last[1] if last[0] is logprobs else ())
                if logprobs is not None:
                    logprobs.text_offset = offsets
            return kind(**given)

        return made

    completions.to_openai_style_logprobs = with_tokens
    completions.CompletionResponseChoice = with_offsets(completions.CompletionResponseChoice)
    completions.CompletionResponseStreamChoice = with_offsets(completions.CompletionResponseStreamChoice)
