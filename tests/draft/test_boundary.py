"""Drafting up to a slow step: a token that ends a sentence is drawn as often as the target draws it."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fathom.runtime.draft.pace import Pace
from fathom.runtime.sfi.trigger import Stretch
from fathom.runtime.sglang_host.machine import torchvision_ops

torchvision_ops.declare()

from fathom.runtime.sglang_host.draft import speculation  # noqa: E402
from fathom.runtime.sglang_host.memory.tails import Tail  # noqa: E402
from fathom.runtime.sglang_host.step.rows import RowSampler  # noqa: E402

REQUESTS, WIDTH = 4000, 3
TARGET = torch.tensor([0.4, 0.1, 0.2, 0.2, 0.1])
DRAFTS = {"the same": TARGET, "another": torch.tensor([0.3, 0.2, 0.1, 0.2, 0.2])}
TRIGGER = np.array([True, False, False, False, False])


def request_of(top_k: int) -> SimpleNamespace:
    sampling = SimpleNamespace(top_k=top_k, sampling_seed=None, ignore_eos=True)
    return SimpleNamespace(sampling_params=sampling, grammar=None, return_logprob=False, logprob=None)


def runs_of(draft: torch.Tensor, requests: int, top_k: int = 1 << 30) -> tuple[list[list[int]], list[Pace]]:
    """What each request puts out in one pass, and its pace; distributions do not depend on earlier tokens."""
    info = SimpleNamespace(
        logit_bias=None,
        temperatures=torch.ones(requests, 1),
        top_ks=torch.full((requests,), top_k),
        top_ps=torch.ones(requests),
        min_ps=torch.zeros(requests),
        sampling_seed=None,
    )
    asking = [request_of(top_k) for _ in range(requests)]
    proposals = [
        speculation.Proposal(
            place,
            Tail(one, 10, WIDTH, np.zeros(0, np.int64)),
            RowSampler(one, info, place),
            stretch=Stretch(64, 0, False, TRIGGER),
        )
        for place, one in enumerate(asking)
    ]
    states = {id(one): SimpleNamespace(pace=Pace(WIDTH, 0.1)) for one in asking}
    side = SimpleNamespace(
        lists=lambda ends: None,
        read=lambda reading, lists: draft.log().expand(len(reading), -1),
        model=SimpleNamespace(read=lambda lists, reads: draft.log().expand(len(reads), -1)),
        state=lambda one: states[id(one)],
        totals=SimpleNamespace(proposed=0, accepted=0),
    )
    speculation._draft(proposals, side)
    logits = {p.index: TARGET.log().expand(len(p.tokens) + 1, -1) for p in proposals}
    none = torch.zeros(requests, dtype=torch.int64)
    batch = SimpleNamespace(seq_lens_cpu=none, seq_lens=none, orig_seq_lens=none)
    tails = SimpleNamespace(settle=lambda tails, kept: None)
    runs = speculation.settle(batch, proposals, logits, side, tails)
    return [run.tokens for run in runs.values()], [states[id(one)].pace for one in asking]


@pytest.mark.parametrize("draft", DRAFTS.values(), ids=DRAFTS)
def test_every_place_follows_the_target(draft):
    torch.manual_seed(0)
    answers, _ = runs_of(draft, REQUESTS)
    for place in range(2):
        tokens = torch.tensor([tokens[place] for tokens in answers if len(tokens) > place])
        found = torch.bincount(tokens, minlength=len(TARGET)) / len(tokens)
        limit = 2.5 * (len(TARGET) / (2 * torch.pi * len(tokens))) ** 0.5
        assert (found - TARGET).abs().sum() / 2 < limit, (place, found)


def test_nothing_is_put_out_behind_the_end_of_a_sentence():
    torch.manual_seed(1)
    answers, paces = runs_of(TARGET, 200)
    assert all(0 not in tokens[:-1] for tokens in answers)
    # The draft is the target: what it says stands, the end of a sentence too.
    assert any(tokens[-1] == 0 for tokens in answers)
    assert all(pace.own.acceptance > 0.8 for pace in paces)


def test_a_draft_without_chance_leaves_the_end_to_the_target():
    answers, _ = runs_of(torch.tensor([0.9, 0.1, 0.0, 0.0, 0.0]), 1, top_k=1)
    assert answers == [[0]]
