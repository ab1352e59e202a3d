"""Which requests are drafted for: those whose grammar can take tokens back, among others."""

from types import SimpleNamespace

import pytest

from fathom.runtime.sglang_host import torchvision_ops

torchvision_ops.declare()

from sglang.srt.constrained.llguidance_backend import GuidanceGrammar  # noqa: E402
from sglang.srt.constrained.outlines_backend import OutlinesGrammar  # noqa: E402
from sglang.srt.constrained.reasoner_grammar_backend import ReasonerGrammarObject  # noqa: E402
from sglang.srt.constrained.xgrammar_backend import XGrammarGrammar  # noqa: E402

from fathom.runtime.sglang_host.rows import drafts  # noqa: E402


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
