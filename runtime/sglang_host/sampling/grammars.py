"""Grammars of structured output: compiled ones, of which the engine keeps no more than it should, and their masks.

SGLang keeps every grammar that a request ever brought, and XGrammar's compiler keeps it once more, both without a
limit: with a vocabulary of 128,000 tokens a JSON schema of twelve members takes 0.3 MiB, and a regular expression
of bounded repetitions nine.

A grammar may come to where it allows nothing. XGrammar then allows no token; a matcher of llguidance is of no use
from there on, and SGLang's engine ends where it is asked again, or the answer as if it were complete.
"""

from collections import OrderedDict
from typing import Any

import torch
import xgrammar
from sglang.srt.constrained.base_grammar_backend import GrammarRow
from sglang.srt.constrained.grammar_manager import GrammarManager
from sglang.srt.constrained.llguidance_backend import GuidanceGrammar
from sglang.srt.constrained.reasoner_grammar_backend import ReasonerGrammarBackend, ReasonerGrammarObject
from sglang.srt.constrained.xgrammar_backend import XGrammarGrammarBackend

MOST_BYTES = 256 << 20
"""Most memory that kept grammars take, in bytes."""
LEAST_BYTES = 16 << 10
"""What one takes at least: its matcher and what Python has around it."""


class KeptGrammars(OrderedDict[tuple[str, str], Any]):
    """Compiled grammars by kind and text, of which the last used stay.

    All of a model's processes compile the same ones in one order, so all of them keep the same ones.

    Args:
        most: the bytes for all of them; the one that came last stays, whatever its size.
    """

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most, self._bytes = most, 0

    def get(self, key: tuple[str, str], default: Any = None) -> Any:
        """The grammar of a key, which counts as its use."""
        if key not in self:
            return default
        self.move_to_end(key)
        return self[key]

    def __setitem__(self, key: tuple[str, str], grammar: Any) -> None:
        self.pop(key, None)
        super().__setitem__(key, grammar)
        self._bytes += _bytes_of(key, grammar)
        while self._bytes > self._most and len(self) > 1:
            self.pop(next(iter(self)))

    def pop(self, key: tuple[str, str], default: Any = None) -> Any:
        if key in self:
            self._bytes -= _bytes_of(key, self[key])
        return super().pop(key, default)

    def clear(self) -> None:
        super().clear()
        self._bytes = 0


def _bytes_of(key: tuple[str, str], grammar: Any) -> int:
    inner = getattr(grammar, "grammar", grammar)  # of a grammar behind a model's thoughts
    compiled = getattr(inner, "ctx", None)
    return LEAST_BYTES + sum(map(len, key)) + getattr(compiled, "memory_size_bytes", 0)


def install(manager: GrammarManager, most: int = MOST_BYTES) -> None:
    """Let what a scheduler keeps of grammars be bounded: to ``most`` bytes, and its compiler to as many.

    And let a request bound its thinking: SGLang lets it only where the model's thoughts may not hold some tokens.
    """
    backend = manager.grammar_backend
    if backend is None:
        return
    if isinstance(backend, ReasonerGrammarBackend) and backend.enable_strict_thinking:
        if not backend.grammar_backend.is_support_token_filter:
            raise ValueError("--enable-strict-thinking needs --grammar-backend xgrammar")
        backend.enable_token_filter = True
        backend._token_filter_fn = backend.grammar_backend.set_token_filter
    backend.cache = KeptGrammars(most)
    inner = getattr(backend, "grammar_backend", backend)
    if (compiler := getattr(inner, "grammar_compiler", None)) is not None:
        vocabulary = compiler.compile_regex("a").tokenizer_info
        inner.grammar_compiler = type(compiler)(vocabulary, cache_limit_bytes=most)


def apply_vocab_mask(logits: torch.Tensor, vocab_mask: torch.Tensor) -> None:
    """Leave only the tokens of a mask, on a CPU."""
    xgrammar.apply_token_bitmask_inplace(logits, vocab_mask, backend="cpu")


def mask_without_gpu() -> None:
    """What strict thinking needs: SGLang's backend has it for GPUs alone, its grammars for a CPU too."""
    XGrammarGrammarBackend.apply_vocab_mask = staticmethod(apply_vocab_mask)


_fill_batched = GuidanceGrammar.fill_vocab_mask_batched


def fill_vocab_mask_batched(entries: list[GrammarRow], vocab_mask: torch.Tensor) -> None:
    """SGLang's masks [rows, words] of what llguidance allows; none where it has failed."""
    _fill_batched(entries, vocab_mask)
    for entry in entries:
        if isinstance(entry.grammar, GuidanceGrammar) and entry.grammar.ll_matcher.is_error():
            vocab_mask[entry.row] = 0


def fill_vocab_mask(self: GuidanceGrammar, vocab_mask: torch.Tensor, idx: int) -> None:
    """One row of :func:`fill_vocab_mask_batched`."""
    fill_vocab_mask_batched([GrammarRow(idx, self)], vocab_mask)


def mask_failed() -> None:
    """Let a grammar of llguidance that has failed allow nothing."""
    GuidanceGrammar.fill_vocab_mask = fill_vocab_mask
    GuidanceGrammar.fill_vocab_mask_batched = staticmethod(fill_vocab_mask_batched)


def trial(grammar: Any) -> Any:
    """What tokens are tried on: the grammar, or a copy where it could not take back one that it fails behind."""
    inner = grammar.grammar if isinstance(grammar, ReasonerGrammarObject) else grammar
    return grammar.copy() if isinstance(inner, GuidanceGrammar) else grammar


def forget(tried: Any, grammar: Any, count: int) -> None:
    """Leave a grammar as it was before so many tokens were accepted by what :func:`trial` made of it."""
    if tried is grammar and count:
        grammar.rollback(count)
