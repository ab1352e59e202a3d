"""Prompts that end in one step are judged as each alone, whatever the groups in which the draft looks ahead."""

from types import SimpleNamespace

import pytest
import torch

from fathom.runtime.config import POLICY_KEY, PROTECTED_KEY, Policy
from fathom.runtime.sglang_host.machine import torchvision_ops

torchvision_ops.declare()

from fathom.runtime.sglang_host.draft import lookahead  # noqa: E402
from fathom.runtime.sglang_host.draft.draft_side import DraftSide  # noqa: E402
from fathom.runtime.specprefill.config import SpecPrefillConfig  # noqa: E402
from fathom.runtime.specprefill.select import select_prompt  # noqa: E402
from fathom.runtime.specprefill.step import random_scores  # noqa: E402

VOCABULARY, SCRATCH, LONGEST = 97, 10, 700
JUDGED = {"prefill_keep_rate": 0.3, "min_prompt_tokens": 64}


class Draft:
    """Its KV at a slot, and its query of a token, is a number made of all tokens up to there."""

    vocabulary = VOCABULARY

    def __init__(self):
        self.kv, self.rows = {}, []

    def step_cost(self):
        return 0.5

    def read(self, lists, reads, capture, every=False):
        last = []
        for read in reads:
            slots = lists.parts[read.which][: read.length].tolist()
            begin = read.length - len(read.tokens)
            known = self.kv[slots[begin - 1]] if begin else 1
            for slot, token in zip(slots[begin:], read.tokens, strict=True):
                known = self.kv[slot] = (known * 31 + token) % 99_991
            last.append(known)
        capture.queries = {0: [torch.tensor(last).float()]}
        return torch.nn.functional.one_hot(torch.tensor(last) % VOCABULARY, VOCABULARY).float()

    def scratch_slots(self, place, count):
        assert (place + 1) * count <= SCRATCH
        return torch.arange(place * count, (place + 1) * count, dtype=torch.int32) + 100_000

    def scores(self, queries, rows, prompts, scale):
        """Chance made from the queries; what lies behind a prompt's end is higher than all of it."""
        self.rows += rows
        out = torch.full((sum(rows), max(map(len, prompts))), 1e9)
        lengths = [len(slots) for slots, count in zip(prompts, rows, strict=True) for _ in range(count)]
        for line, query, length in zip(out, queries[0].tolist(), lengths, strict=True):
            line[:length] = torch.rand(length, generator=torch.Generator().manual_seed(int(query)))
        return out


def request_of(row, length, protected=(), **policy):
    sampling = SimpleNamespace(
        custom_params={POLICY_KEY: Policy(**policy).to_wire(), PROTECTED_KEY: protected}, ignore_eos=True
    )
    prompt = torch.randint(0, VOCABULARY, (length,), generator=torch.Generator().manual_seed(row)).tolist()
    kv = SimpleNamespace(req_pool_idx=row)
    return Request(sampling_params=sampling, origin_input_ids=prompt, output_ids=[], kv=kv)


class Request(SimpleNamespace):
    __hash__ = object.__hash__  # type: ignore[assignment]
    __eq__ = object.__eq__


def judged(requests):
    """Prefill of whole prompts in one batch; the draft, and what its side knows."""
    table = torch.arange(10 * LONGEST, dtype=torch.int32).view(10, LONGEST)
    draft = Draft()
    side = DraftSide(draft, table)
    lengths = [len(request.origin_input_ids) for request in requests]
    batch = SimpleNamespace(reqs=requests, decoding_reqs=None, prefix_lens=[0] * len(requests))
    batch.extend_lens = lengths
    assert side.read_prefill(batch)
    return draft, side


@pytest.fixture
def requests(monkeypatch):
    monkeypatch.setattr(lookahead, "SCRATCH_SLOTS", SCRATCH)
    return [
        request_of(0, 300, **JUDGED, lookahead=5),
        request_of(1, 200, **JUDGED, prefill_selection="random"),
        request_of(2, 640, **JUDGED, lookahead=3),
        request_of(3, 260, **JUDGED, lookahead=9),
        request_of(4, 40, **JUDGED),  # stays whole
        request_of(5, 500, ((330, 340), (480, 900)), **JUDGED, lookahead=2),
        request_of(6, 420, **JUDGED, lookahead=4),
    ]


def test_prompts_of_one_step_are_judged_as_each_alone(requests):
    draft, side = judged(requests)
    assert draft.rows == [5, 3, 9, 2, 4]
    for request in requests:
        if request.kv.req_pool_idx == 4:
            assert request not in side.states
            continue
        state, (_, alone) = side.state(request), judged([request])
        assert torch.equal(state.selection.tokens, alone.state(request).selection.tokens)
        assert getattr(state.ahead, "tokens", None) == getattr(alone.state(request).ahead, "tokens", None)


def test_random_chunks_and_protected_ones(requests):
    _, side = judged(requests)
    config, prompt = SpecPrefillConfig(0.3, min_prompt_tokens=64), requests[1].origin_input_ids
    chance = select_prompt(random_scores(prompt, config.chunk), (), config).tokens
    assert torch.equal(side.state(requests[1]).selection.tokens, chance)
    assert side.state(requests[1]).ahead is None
    kept = set(side.state(requests[5]).selection.tokens.tolist())
    assert {*range(330, 340), *range(480, 500)} <= kept


def test_the_scratch_slots_of_a_look_ahead_hold_its_own_tokens(requests):
    draft, side = judged(requests)
    scratch = {}
    for request in requests:
        if (ahead := side.states.get(request) and side.state(request).ahead) is None:
            continue
        known = draft.kv[int(side.slots(request, len(request.origin_input_ids))[-1])]
        scratch[request.kv.req_pool_idx] = len(ahead.scratch)
        for slot, token in zip(ahead.scratch.tolist(), ahead.tokens[:-1], strict=False):
            known = (known * 31 + token) % 99_991
            assert draft.kv[slot] == known
    assert scratch == {0: 0, 2: 0, 3: 0, 5: 4, 6: 4}  # one group wrote over another's
