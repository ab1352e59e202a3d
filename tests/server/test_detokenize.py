"""Token ids that reach a tokenizer, which takes numbers of 32 bits, or fewer."""

from types import SimpleNamespace

import pytest

from fathom.runtime.sglang_host.machine import torchvision_ops

torchvision_ops.declare()

from transformers import ByT5Tokenizer  # noqa: E402

from fathom.runtime.sglang_host.reports.detokenizer import known_ids  # noqa: E402
from fathom.server.api.detokenize import FathomDetokenize  # noqa: E402
from fathom.server.tokenizer_manager import FathomTokenizerManager  # noqa: E402

MOST = (1 << 32) - 1


@pytest.mark.parametrize(
    ("tokens", "wrong"),
    [
        ([], None),
        ([0, 5, MOST], None),
        ([[0], [], [7, MOST]], None),
        (["a", [None, "b"], 1.5], None),  # SGLang's to refuse
        ([3, -1], -1),
        ([MOST + 1, -1], MOST + 1),
        ([[3], [4, 1 << 70]], 1 << 70),
        ([[3], -9], -9),
    ],
)
def test_only_such_ids_are_let_through(tokens, wrong):
    handler = FathomDetokenize.__new__(FathomDetokenize)
    found = handler._validate_request(SimpleNamespace(tokens=tokens))
    assert found == (None if wrong is None else f"tokens must be integers in [0, {MOST}], got {wrong}")


def test_log_probabilities_of_tokens_that_the_tokenizer_does_not_know():
    """A model whose table is padded has them; a tokenizer in Python raises for them."""
    manager = FathomTokenizerManager.__new__(FathomTokenizerManager)
    manager.tokenizer = ByT5Tokenizer(extra_ids=0)
    (letter,), unknown = manager.tokenizer.encode("x", add_special_tokens=False), len(manager.tokenizer) + 50
    found = manager.detokenize_logprob_tokens([-1.0, -2.0], [unknown, letter], True)
    assert found == [(-1.0, unknown, ""), (-2.0, letter, "x")]
    assert manager.detokenize_logprob_tokens([-1.0], [unknown], False) == [(-1.0, unknown, None)]
    manager.tokenizer.add_tokens(["<call>"])
    last = len(manager.tokenizer) - 1
    assert manager.detokenize_logprob_tokens([-3.0], [last], True) == [(-3.0, last, "<call>")]
    assert manager.detokenize_logprob_tokens([-4.0], [last + 1], True) == [(-4.0, last + 1, "")]


def test_how_many_tokens_a_tokenizer_knows_that_raises_for_others():
    assert known_ids(SimpleNamespace(is_fast=True, vocab_size=7)) is None
    assert known_ids(SimpleNamespace(vocab_size=7)) == 7  # SGLang's own, which has no length
    assert known_ids(object()) is None
