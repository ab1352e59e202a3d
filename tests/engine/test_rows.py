"""Log-probabilities of the tokens that a step puts out: of all requests in one copy, each its own."""

from types import SimpleNamespace

import pytest
import torch

from fathom.runtime.sglang_host.rows import RowSampler, fetched

VOCABULARY = 150_000
ASKED = [  # whether at all, how many of the highest, which ids, greedy
    (True, 3, [5, 149_999], False),
    (False, 0, None, True),
    (True, 0, None, True),
    (True, 0, [7], False),
    (True, 2, None, True),
]


def samplers():
    temperatures = torch.tensor([[0.5], [1.0], [1.0], [2.0], [1.0]])
    info = SimpleNamespace(temperatures=temperatures, sampling_seed=None)
    for index, (asks, top, ids, greedy) in enumerate(ASKED):
        request = SimpleNamespace(
            return_logprob=asks,
            logprob=SimpleNamespace(top_logprobs_num=top, token_ids_logprob=ids),
            sampling_params=SimpleNamespace(top_k=1 if greedy else 40, sampling_seed=None),
        )
        yield RowSampler(request, info, index)


@pytest.mark.parametrize("original", [False, True])
def test_each_request_gets_what_it_asked_for(monkeypatch, original):
    """Where the operator wants them from before the temperature, so are those of drafted tokens."""
    monkeypatch.setattr("sglang.srt.layers.sampler.SGLANG_RETURN_ORIGINAL_LOGPROB", original)
    torch.manual_seed(0)
    own = list(samplers())
    tokens = [[149_998, 3], [4], [0, 1, 2], [149_999], [6, 7]]
    logits = [torch.randn(len(each) + 1, VOCABULARY) for each in tokens]
    asked = [x for each in zip(own, logits, tokens, strict=True) for x in each[0].asked_of(*each[1:])]
    numbers = fetched(asked)
    for sampler, rows, put_out, (asks, top, ids, greedy) in zip(own, logits, tokens, ASKED, strict=True):
        run = sampler.run(put_out, numbers)
        scale = 1.0 if greedy or original else float(sampler.info.temperatures[sampler.index])
        want = (rows[: len(put_out)] / scale).log_softmax(-1)
        assert run.tokens == put_out
        assert run.logprobs == ([want[i, token].item() for i, token in enumerate(put_out)] if asks else [])
        assert len(run.top) == (len(put_out) if top else 0)
        for row, (values, best) in zip(want, run.top, strict=False):
            assert (values, best) == tuple(x.tolist() for x in row.topk(top))
        assert run.chosen == ([(row[ids].tolist(), ids) for row in want] if ids else [])
    with pytest.raises(StopIteration):
        next(numbers)


def test_nothing_is_fetched_for_nobody():
    assert list(fetched([])) == []


@pytest.mark.parametrize("overflown", [float("nan"), float("inf")])
@pytest.mark.parametrize("greedy", [False, True])
def test_a_draft_that_overflows_decides_nothing(overflown, greedy):
    """Neither which tokens a grammar gets to see, nor what stands where none of them does."""
    sampler, allowed, wanted = list(samplers())[4 if greedy else 2], [70, 71, 90], 71
    sampler.info.temperatures = torch.ones(5, 1)
    sampler.info.top_ks = torch.full((5,), VOCABULARY)
    sampler.info.top_ps, sampler.info.min_ps = torch.ones(5), torch.zeros(5)
    sampler.greedy = greedy
    masked = torch.full((1, VOCABULARY), float("-inf"))
    masked[0, allowed] = overflown
    target = torch.full((2, VOCABULARY), float("-inf"))
    target[:, wanted] = 0
    for _ in range(20):
        token, probs = sampler.propose(masked)
        assert int(token) in allowed
        stood, *tokens = sampler.accept(target, token.tolist(), [probs], 3).tolist()
        assert stood == (int(token) == wanted)
        assert tokens[: stood + 1] == [wanted] * (stood + 1)
