"""What the draft said is taken up as far as a request's grammar goes along, and the grammar is as before."""

import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch._dynamo
from transformers import AutoTokenizer

from fathom.runtime.draft.pace import Pace
from fathom.runtime.sfi.trigger import Stretch
from fathom.runtime.sglang_host.machine import torchvision_ops

torchvision_ops.declare()

from sglang.srt.constrained.llguidance_backend import GuidanceBackend, GuidanceGrammar  # noqa: E402
from sglang.srt.constrained.xgrammar_backend import XGrammarGrammarBackend  # noqa: E402

from fathom.runtime.sglang_host.draft import speculation  # noqa: E402
from fathom.runtime.sglang_host.memory.tails import Tail  # noqa: E402
from fathom.runtime.sglang_host.sampling import grammars  # noqa: E402
from fathom.runtime.sglang_host.step.rows import RowSampler, allows, grammar_mask  # noqa: E402

REGEX = "[0-9]{3}"
WITHOUT_END = 'root ::= "123" more\nmore ::= more "4"'
"""A grammar of which no text is."""


@pytest.fixture(autouse=True)
def not_compiled():
    """As in an engine without a GPU, where PyTorch's compiler is off: llguidance has masks applied by it."""
    with torch._dynamo.config.patch(disable=True):
        yield


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(Path(__file__).parents[2] / "demo/models/target")


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    for name in ("fill_vocab_mask", "fill_vocab_mask_batched"):
        monkeypatch.setattr(GuidanceGrammar, name, vars(GuidanceGrammar)[name])
    grammars.mask_failed()


@pytest.fixture(params=["xgrammar", "llguidance"])
def backend(request, tokenizer):
    if request.param == "xgrammar":
        return XGrammarGrammarBackend(tokenizer, len(tokenizer), [tokenizer.eos_token_id])
    return GuidanceBackend(tokenizer, n_vocab=len(tokenizer), eos_token_ids=[tokenizer.eos_token_id])


@pytest.fixture
def grammar(backend):
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
    assert proposal.ended == (taken == 3)
    assert torch.equal(grammar_mask(grammar, len(tokenizer)), before)
    check_masks(proposal, grammar, len(tokenizer))


def check_masks(proposal, grammar, vocabulary):
    """One before each token and one after the last. Ends with the grammar behind the tokens."""
    assert len(proposal.masks) == len(proposal.tokens) + 1
    for token, mask in zip([*proposal.tokens, None], proposal.masks, strict=True):
        want = grammar_mask(grammar, vocabulary)
        assert want is mask is None or torch.equal(want, mask)
        if token is not None:
            grammar.accept_token(token)


@pytest.mark.parametrize(("said", "room"), [("123<|end|>45", 5), ("123<|end|>", 3), ("123", 2), ("12", 1)])
def test_what_is_drafted_is_what_the_grammar_allows(grammar, tokenizer, said, room):
    tokens = tokenizer.encode(said, add_special_tokens=False)
    before = grammar_mask(grammar, len(tokenizer))
    proposal = drafted(grammar, tokenizer, tokens, room)
    end = tokenizer.encode("<|end|>", add_special_tokens=False)[0]
    most = tokens.index(end) + 1 if end in tokens else len(tokens)
    assert proposal.tokens == tokens[: min(room, most)]
    assert proposal.ended == (end in proposal.tokens)
    assert torch.equal(grammar_mask(grammar, len(tokenizer)), before)
    check_masks(proposal, grammar, len(tokenizer))


def test_a_token_that_is_left_to_the_target_is_forgotten_by_the_grammar(grammar, tokenizer):
    """The step after it is slow."""
    tokens = tokenizer.encode("123<|end|>", add_special_tokens=False)
    before = grammar_mask(grammar, len(tokenizer))
    stretch = Stretch(9, 0, False, np.arange(len(tokenizer)) == tokens[1])
    proposal = drafted(grammar, tokenizer, tokens, 3, stretch)
    assert proposal.tokens == tokens[:1] and not proposal.ended
    assert torch.equal(grammar_mask(grammar, len(tokenizer)), before)
    check_masks(proposal, grammar, len(tokenizer))


def test_nothing_follows_the_end_of_a_grammar(grammar, tokenizer):
    """Nor is anything put out that it forbids, however much the target would rather say it."""
    tokens = tokenizer.encode("123<|end|>", add_special_tokens=False)
    proposal = drafted(grammar, tokenizer, tokens, 5)
    assert proposal.ended
    logits = torch.nn.functional.one_hot(torch.tensor([*tokens, 0]), len(tokenizer)).float()
    logits[:, tokenizer.encode(" the", add_special_tokens=False)[0]] = 2
    tokens_put_out, kept, totals, batch = settled(proposal, logits)
    assert tokens_put_out == tokens
    # The last of them is what the target would have said itself.
    assert kept == [2] and (totals.proposed, totals.accepted) == (3, 2)
    assert batch.seq_lens_cpu.tolist() == [13]


def settled(proposal, logits):
    """What is put out after these of the target, how many of the drafted stay, the counts, and the batch."""
    proposal.sampler.request.return_logprob, proposal.sampler.request.logprob = False, None
    state, totals = SimpleNamespace(pace=Pace(5, 0.1)), SimpleNamespace(proposed=0, accepted=0)
    side = SimpleNamespace(state=lambda _: state, totals=totals)
    one = torch.tensor([11])
    batch = SimpleNamespace(seq_lens_cpu=one, seq_lens=one, orig_seq_lens=one)
    kept = []
    tails = SimpleNamespace(settle=lambda _, counts: kept.extend(counts))
    runs = speculation.settle(batch, [proposal], {0: logits}, side, tails)
    return runs[0].tokens, kept, totals, batch


@pytest.mark.parametrize("ahead", [False, True])
def test_nothing_is_drafted_where_a_grammar_allows_nothing(backend, tokenizer, ahead):
    """Nor put out: the next step finds that no token can be taken."""
    grammar = backend.dispatch_ebnf(WITHOUT_END)
    tokens = tokenizer.encode("123<|end|>4", add_special_tokens=False)
    before = grammar_mask(grammar, len(tokenizer))
    if ahead:
        sampling = SimpleNamespace(top_k=1, sampling_seed=None)
        request = SimpleNamespace(grammar=grammar, sampling_params=sampling)
        info = SimpleNamespace(logit_bias=None, sampling_seed=None)
        tail = Tail(request, 10, 4, np.zeros(0, np.int64))
        proposal = speculation.Proposal(0, tail, RowSampler(request, info, 0))
        speculation._take_up(proposal, tokens, len(tokenizer))
    else:
        proposal = drafted(grammar, tokenizer, tokens, 5)
    assert proposal.tokens == tokens[:2] and not proposal.ended
    assert torch.equal(grammar_mask(grammar, len(tokenizer)), before)
    check_masks(proposal, grammar, len(tokenizer))
    assert not proposal.masks[-1].any()
    logits = torch.nn.functional.one_hot(torch.tensor([*tokens[:2], 0]), len(tokenizer)).float()
    tokens_put_out, kept, _, batch = settled(proposal, logits)
    assert tokens_put_out == tokens[:2] and kept == [1] and batch.seq_lens_cpu.tolist() == [12]


def drafted(grammar, tokenizer, tokens, room, stretch=None):
    """What is drafted by a draft that says these tokens."""
    sampling = SimpleNamespace(top_k=1, sampling_seed=None, ignore_eos=True)
    request = SimpleNamespace(grammar=grammar, sampling_params=sampling)
    info = SimpleNamespace(logit_bias=None, sampling_seed=None)
    # What the grammar forbids is what the draft would rather say.
    rows = torch.nn.functional.one_hot(torch.tensor(tokens), len(tokenizer)).float()
    rows[:, tokenizer.encode(" the", add_special_tokens=False)[0]] = 2
    logits = iter(rows.split(1))
    model = SimpleNamespace(read=lambda *_: next(logits))
    side = SimpleNamespace(lists=lambda _: None, read=lambda *_: next(logits), model=model)
    tail = Tail(request, 10, room, np.zeros(0, np.int64))
    proposal = speculation.Proposal(0, tail, RowSampler(request, info, 0), stretch=stretch)
    speculation._draft([proposal], side)
    return proposal


def test_nothing_is_drafted_behind_the_end_of_a_grammar(grammar, tokenizer):
    """A request that ignores the ids that end an answer says one more token: SGLang then sees that its grammar has
    ended, which it must not have forgotten."""
    sampling = SimpleNamespace(max_new_tokens=20, top_k=1, sampling_seed=None, ignore_eos=True)
    request = SimpleNamespace(grammar=grammar, output_ids=[], sampling_params=sampling, kv=None)
    batch = SimpleNamespace(
        reqs=[request], sampling_info=SimpleNamespace(logit_bias=None, sampling_seed=None)
    )
    logits = torch.zeros(1, len(tokenizer))
    model = SimpleNamespace(read=lambda *_: logits, vocabulary=len(tokenizer))
    side = SimpleNamespace(width=lambda _: 4, lists=lambda _: None, read=lambda *_: logits, model=model)
    took, fast = [], SimpleNamespace(get=lambda _: None)

    def take(wanted):
        took.extend(count for _, count in wanted)
        return [Tail(request, 10, count, np.zeros(0, np.int64)) for _, count in wanted]

    tails = SimpleNamespace(take=take, shrink=lambda tails, kept: tails)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(speculation, "drafts", lambda _: True)
        for token in tokenizer.encode("123<|end|>", add_special_tokens=False):
            assert not grammar.is_terminated()
            speculation.propose(batch, side, tails, fast)
            assert took.pop() == 4
            grammar.accept_token(token)
        assert grammar.is_terminated()
        assert speculation.propose(batch, side, tails, fast) == []
    assert not took and grammar.is_terminated()


def test_a_mask_is_read_bit_by_bit(grammar, tokenizer):
    mask = grammar_mask(grammar, len(tokenizer))
    for token in range(len(tokenizer)):
        fits = re.fullmatch("[0-9]{1,3}", tokenizer.decode([token])) is not None
        assert allows(mask, token) == fits, tokenizer.decode([token])
