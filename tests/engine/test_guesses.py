"""What the draft expects next of several requests, each at its temperature: known with one copy from the device."""

from types import SimpleNamespace

import pytest
import torch

from fathom.runtime.sglang_host import draft_side
from fathom.runtime.sglang_host.draft_side import Guess, _guesses


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
