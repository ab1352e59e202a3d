"""What the draft said is taken up as far as a request's grammar goes along, and the grammar is as before."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoTokenizer

from fathom.runtime.sglang_host import torchvision_ops

torchvision_ops.declare()

from sglang.srt.constrained.llguidance_backend import GuidanceBackend  # noqa: E402
from sglang.srt.constrained.xgrammar_backend import XGrammarGrammarBackend  # noqa: E402

from fathom.runtime.sglang_host import speculation  # noqa: E402
from fathom.runtime.sglang_host.rows import allows, grammar_mask  # noqa: E402

REGEX = "[0-9]{3}"


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(Path(__file__).parents[2] / "demo/models/target")


@pytest.fixture(params=["xgrammar", "llguidance"])
def grammar(request, tokenizer):
    if request.param == "xgrammar":
        backend = XGrammarGrammarBackend(tokenizer, len(tokenizer), [tokenizer.eos_token_id])
    else:
        backend = GuidanceBackend(tokenizer, n_vocab=len(tokenizer), eos_token_ids=[tokenizer.eos_token_id])
    return backend.dispatch_regex(REGEX)


@pytest.mark.parametrize(
    ("said", "taken"),
    [("12 the", 1), (" the 1", 0), ("123", 2), ("123<|end|>", 3), ("123<|end|>4", 3), ("1234", 1)],
)
def test_what_was_said_is_taken_up_as_far_as_it_is_allowed(grammar, tokenizer, said, taken):
    tokens = tokenizer.encode(said, add_special_tokens=False)
    before = grammar_mask(grammar, len(tokenizer))
    proposal = speculation.Proposal(0, None, SimpleNamespace(request=SimpleNamespace(grammar=grammar)))
    speculation._take_up(proposal, tokens, len(tokenizer))
    assert proposal.tokens == tokens[:taken]
    assert len(proposal.masks) == taken + 1 and proposal.ended == (taken == 3)
    assert torch.equal(grammar_mask(grammar, len(tokenizer)), before)


def test_a_mask_is_read_bit_by_bit(grammar, tokenizer):
    mask = grammar_mask(grammar, len(tokenizer))
    for token in range(len(tokenizer)):
        fits = re.fullmatch("[0-9]{1,3}", tokenizer.decode([token])) is not None
        assert allows(mask, token) == fits, tokenizer.decode([token])
