"""What the draft expects next of several requests, each at its temperature: known with one copy from the device."""

from types import SimpleNamespace

import pytest
import torch

from fathom.runtime.draft.pace import EXPECTED, Pace
from fathom.runtime.sglang_host.draft import draft_side
from fathom.runtime.sglang_host.draft.draft_side import DraftSide, Guess, _guesses


def request(temperature, greedy=False):
    return SimpleNamespace(
        sampling_params=SimpleNamespace(temperature=temperature, top_k=1 if greedy else 50)
    )


def test_each_row_is_judged_at_its_requests_temperature(monkeypatch):
    copies, fetched = [], draft_side.fetched
    monkeypatch.setattr(draft_side, "fetched", lambda tensors: copies.append(1) or fetched(tensors))
    asked = [(request(1.0, True), 2), (request(0.5), 3), (request(1.0), 0), (request(2.0), 1)]
    logits = torch.randn(6, 151_000, generator=torch.Generator().manual_seed(0))
    got, rows = _guesses(asked, logits), iter(logits)
    assert [len(own) for own in got] == [2, 3, 0, 1] and copies == [1]
    for (own, _), guesses in zip(asked, got, strict=True):
        for guess, row in zip(guesses, rows, strict=False):
            chance, token = torch.softmax(row / own.sampling_params.temperature, -1).max(-1)
            assert guess.token == token
            assert guess.sure == (1.0 if own.sampling_params.top_k == 1 else pytest.approx(chance.item()))


def test_nobody_is_asked_for_nothing():
    assert _guesses([(request(1.0), 0), (request(1.0), 0)], torch.empty(0, 9)) == [[], []]
    assert _guesses([], torch.empty(0, 9)) == []
    (guess,) = _guesses([(request(0.7, True), 1)], torch.tensor([[0.0, 3.0, 1.0]]))[0]
    assert guess == Guess(1, 1.0)


def test_a_token_that_was_drawn_counts_as_much_as_the_draft_was_sure_of_it():
    """Eight tokens, each drawn with probability 1/4 by draft and target alike: two are all it can foresee."""
    pace = Pace(4, 0.5)
    draft_side._learn(pace, [Guess(1, 0.25)] * 8, [1, 1, 0, 0, 0, 0, 0, 0])
    for evidence in (pace.own, pace.shared):
        kept = evidence.memory**2
        assert (evidence.stood, evidence.tried) == pytest.approx((kept * EXPECTED + 2, kept + 2))


@pytest.mark.parametrize("overflown", [float("nan"), float("inf")])
def test_a_draft_that_overflows_leaves_the_evidence_of_all_requests_what_it_was(overflown):
    """No number would ever be one again after it, for as long as the engine runs."""
    logits = torch.tensor([[0.0, overflown, 5.0], [0.0, 5.0, 1.0]])
    (guesses,) = _guesses([(request(1.0), 2)], logits)
    sure = torch.softmax(torch.tensor([[0.0, 0.0, 5.0], [0.0, 5.0, 1.0]]), -1).amax(-1).tolist()
    assert [guess.token for guess in guesses] == [2, 1]
    assert [guess.sure for guess in guesses] == pytest.approx(sure)
    side = DraftSide(SimpleNamespace(step_cost=lambda: 0.5), torch.zeros(1, 1))
    pace = Pace(4, side.cost, side.evidence)
    draft_side._learn(pace, guesses, [0, 0])
    assert pace.shared is side.evidence and 0 < pace.shared.acceptance < EXPECTED


def test_the_operators_cost_stands_for_the_estimate(monkeypatch):
    model = SimpleNamespace(step_cost=lambda: 0.4)
    for cost, used in ((None, 0.4), (0.0, 0.0), (0.7, 0.7)):
        monkeypatch.setattr(draft_side.OPTIONS, "cost", cost)
        assert DraftSide(model, torch.zeros(1, 1)).cost == used


def test_the_engine_reports_kv_of_all_devices_and_no_scratch_slots():
    virtual, page, devices = 4096, 4, 2
    pool = SimpleNamespace(page_size=page, layer_num=3, get_kv_size_bytes=lambda: (1000, 24))
    config = SimpleNamespace(model_path="draft", dtype=torch.bfloat16, quantization=None)
    shared = SimpleNamespace(tp_size=devices)
    runner = SimpleNamespace(ps=shared, model_config=config, kv_cache_dtype=torch.bfloat16)
    model = SimpleNamespace(pool=pool, runner=runner, scratch=virtual + page, placed_lists=7, graphs=None)
    model.backend = SimpleNamespace(ended_rows=3)
    model.step_cost = lambda: 0.4
    side = DraftSide(model, torch.zeros(1, 1))
    side.totals.accepted, side.totals.prompt_tokens_kept = 5, 9
    found = side.report()
    assert (found["slots"], found["kv_bytes"], found["layers"]) == (virtual, 2048, 3)
    assert (found["accepted"], found["prompt_tokens_kept"], found["requests"]) == (5, 9, 0)
    assert found["ended_rows"] == 3
    assert found["replayed_steps"] == {} and found["model"] == "draft" and found["step_cost"] == 0.4
