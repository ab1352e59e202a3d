"""Which requests are drafted for: those whose grammar can take tokens back, among others."""

from types import SimpleNamespace

import pytest
import torch

from fathom.runtime.sglang_host.machine import torchvision_ops

torchvision_ops.declare()

from sglang.srt.constrained.llguidance_backend import GuidanceGrammar  # noqa: E402
from sglang.srt.constrained.outlines_backend import OutlinesGrammar  # noqa: E402
from sglang.srt.constrained.reasoner_grammar_backend import ReasonerGrammarObject  # noqa: E402
from sglang.srt.constrained.xgrammar_backend import XGrammarGrammar  # noqa: E402

from fathom.runtime.sglang_host.step.rows import allows, alone, drafts, grammar_mask  # noqa: E402


def request_with(grammar):
    sampling = SimpleNamespace(
        frequency_penalty=0,
        presence_penalty=0,
        repetition_penalty=1,
        min_new_tokens=0,
        custom_params={"fathom": {"speculative": True}},
    )
    return SimpleNamespace(
        sampling_params=sampling,
        return_hidden_states=False,
        return_sampling_mask=False,
        custom_logit_processor=None,
        beam_group=None,
        grammar=grammar,
    )


@pytest.mark.parametrize(
    ("kind", "can"), [(XGrammarGrammar, True), (GuidanceGrammar, True), (OutlinesGrammar, False)]
)
def test_a_grammar_that_cannot_take_tokens_back_is_not_drafted_for(kind, can):
    grammar = kind.__new__(kind)
    assert drafts(request_with(grammar)) == can
    # A reasoning model's grammar begins behind its thoughts.
    assert drafts(request_with(ReasonerGrammarObject(grammar, [1]))) == can


def test_without_a_grammar():
    assert drafts(request_with(None))
    assert drafts(request_with(ReasonerGrammarObject(None, [1])))


@pytest.mark.parametrize(
    "said",
    [
        {"return_hidden_states": True},
        {"return_sampling_mask": True},
        {"custom_logit_processor": "some"},
        {"beam_group": "some"},
        {"min_new_tokens": 3},
        {"presence_penalty": -1},
    ],
)
def test_who_asks_more_of_a_step_is_not_drafted_for(said):
    request = request_with(None)
    assert alone(request)
    for name, value in said.items():
        setattr(request.sampling_params if hasattr(request.sampling_params, name) else request, name, value)
    assert not alone(request) and not drafts(request)


def test_what_a_grammars_mask_allows():
    """Bit by bit as XGrammar lays it out, the highest of a word among them; all of it once the grammar is over."""
    tokens = [0, 3, 31, 32, 62, 70]
    words = torch.zeros(1, 3, dtype=torch.int64)
    for token in tokens:
        words[0, token // 32] |= 1 << token % 32
    words = words.to(torch.int32)  # the highest bit is the sign
    grammar = SimpleNamespace(
        finished=False,
        is_terminated=lambda: False,
        allocate_vocab_mask=lambda vocab_size, batch_size, device: torch.zeros_like(words),
        fill_vocab_mask=lambda mask, index: mask[index : index + 1].copy_(words),
    )
    mask = grammar_mask(grammar, 96)
    assert [token for token in range(96) if allows(mask, token)] == tokens
    for over in ({"finished": True}, {"is_terminated": lambda: True}):
        assert grammar_mask(SimpleNamespace(**vars(grammar) | over), 96) is None
    assert grammar_mask(None, 96) is None and allows(None, 5)
