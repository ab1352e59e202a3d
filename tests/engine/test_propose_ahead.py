"""What the draft said while it judged a prompt is of use in that step only."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fathom.runtime.draft.pace import Pace, shared_evidence
from fathom.runtime.sglang_host.draft import speculation
from fathom.runtime.sglang_host.draft.draft_side import DraftState
from fathom.runtime.sglang_host.draft.lookahead import Prompt
from fathom.runtime.sglang_host.memory.tails import Tail


def test_a_look_ahead_that_cannot_be_taken_up_is_dropped():
    """Where the log-probabilities of another prompt fill the step. When the request is taken back and starts again,
    it would be what follows the prompt, and not what follows the answer so far."""
    ahead = Prompt(torch.arange(5, dtype=torch.int32), 3, frozenset(), [7, 8, 9])
    state = DraftState(Pace(4, 0.1, shared_evidence()), ahead=ahead)
    batch = SimpleNamespace(
        return_logprob=True, extend_logprob_start_lens=[5, 0], extend_lens=[5, 5], reqs=["it", "another"]
    )
    states = {"it": state, "another": DraftState(Pace(4, 0.1, shared_evidence()))}
    side = SimpleNamespace(state=states.get)
    tails = SimpleNamespace(take=lambda _: [], shrink=lambda *_: [])
    assert speculation.propose_ahead(batch, side, tails) == []
    assert state.ahead is None


def test_a_look_ahead_is_taken_up_beside_the_log_probabilities_of_answers(monkeypatch):
    """No request asks for those of tokens that are in this step's prompts."""
    ahead = Prompt(torch.arange(5, dtype=torch.int32), 3, frozenset(), [7, 8, 9])
    sampling = SimpleNamespace(max_new_tokens=3, top_k=1, sampling_seed=None)
    request = SimpleNamespace(sampling_params=sampling, output_ids=[], grammar=None)
    state = DraftState(Pace(4, 0.1, shared_evidence()), ahead=ahead)
    batch = SimpleNamespace(
        return_logprob=True,
        extend_logprob_start_lens=[5],
        extend_lens=[5],
        reqs=[request],
        sampling_info=SimpleNamespace(sampling_seed=None),
    )
    side = SimpleNamespace(state=lambda _: state, model=SimpleNamespace(vocabulary=10))
    room = SimpleNamespace(
        take=lambda wanted: [Tail(one, 5, count, np.zeros(0)) for one, count in wanted],
        shrink=lambda tails, kept: tails,
    )
    monkeypatch.setattr(speculation, "drafts", lambda _: True)
    monkeypatch.setattr(speculation, "alternates", lambda _: False)
    (proposal,) = speculation.propose_ahead(batch, side, room)
    assert proposal.tokens == [7, 8] and proposal.ahead is ahead and proposal.masks == [None] * 3


def test_nothing_is_drafted_for_places_behind_the_end():
    """The target adds a token of its own to those that stand: the last one is never drafted."""
    limit = SimpleNamespace(max_new_tokens=6)
    request = SimpleNamespace(sampling_params=limit, output_ids=[1, 2], grammar=None)
    assert [speculation.room_for_output(most, request) for most in (0, 2, 3, 16)] == [0, 2, 3, 3]
    request.output_ids = [1] * 6
    assert speculation.room_for_output(16, request) == 0


@pytest.mark.parametrize(
    ("scratch", "read"),
    [
        (None, [0, 1, 2, 2]),  # drafted now: the draft has read each token but the last
        ([20, 21], [0, 1, 2, 2]),  # said while it judged the prompt: the same, copied from where that was
        ([], [0, 0, 0, 0]),  # another group has written there since
    ],
)
def test_the_draft_has_read_what_it_has_kv_of(scratch, read):
    copied, tail = [], Tail(None, 10, 3, np.arange(30, 33))
    model = SimpleNamespace(copy=lambda source, target: copied.append((source.tolist(), target.tolist())))
    side = SimpleNamespace(model=model, slots=lambda _, end: torch.arange(20, 20 + end))
    proposal = speculation.Proposal(0, tail, None, tokens=[7, 8, 9])
    if scratch is not None:
        slots = torch.tensor(scratch, dtype=torch.int32)
        proposal.ahead = Prompt(torch.arange(10), 3, frozenset(), [7, 8, 9], slots)
    assert [speculation._read_of(proposal, accepted, side) for accepted in range(4)] == read
    into = [30, 31]  # the slots of the tokens behind the first ten
    assert copied == [(scratch[:n], into[:n]) for n in read if n and scratch is not None]
