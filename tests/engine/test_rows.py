"""Log-probabilities of the tokens that a step puts out: of all requests in one copy, each its own."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch

from fathom.kernels.murmur_hash import murmur_hash32
from fathom.runtime.sampling import filtered_by_sorting
from fathom.runtime.sglang_host.sampling.seeds import draw_seeded
from fathom.runtime.sglang_host.step.rows import ROWS_AT_ONCE, RowSampler, SampledRows, fetched, grouped

VOCABULARY = 150_000
ASKED = [  # whether at all, how many of the highest, which ids, greedy
    (True, 3, [5, 149_999], False),
    (False, 0, None, True),
    (True, 0, None, True),
    (True, 0, [7], False),
    (True, 2, None, True),
]


def samplers():
    temperatures = torch.tensor([[0.5], [0.7], [3.0], [2.0], [0.3]])
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
    one, two = (SampledRows([sampler], [count], masked.device) for count in (1, 2))
    for _ in range(20):
        token, probs = one.propose(masked)
        assert int(token) in allowed
        ((stood, *tokens),) = two.accept(target, [token.tolist()], [probs], [3], 1).tolist()
        assert stood == (int(token) == wanted)
        assert tokens[: stood + 1] == [wanted] * (stood + 1)


def test_requests_that_are_sampled_together_get_what_each_would_get_alone(monkeypatch):
    """The most likely tokens, a seed's and drawn ones side by side, with biases and rules, drafted for a token, two
    or three; of chance there is none where a request's rules leave one token."""
    monkeypatch.setattr("sglang.srt.layers.sampler.murmur_hash32", murmur_hash32)
    torch.manual_seed(1)
    vocabulary, kinds = 50, ["greedy", "seeded", "sharp", "drawn", "seeded", "greedy", "sharp"]
    places = [6, 0, 3, 5, 1, 4, 2]  # in the batch
    info = SimpleNamespace(
        logit_bias=torch.randn(len(kinds), vocabulary),
        sampling_seed=torch.arange(100, 100 + len(kinds)),
        temperatures=torch.full((len(kinds), 1), 0.9),
        top_ks=torch.full((len(kinds),), 30),
        top_ps=torch.full((len(kinds),), 0.8),
        min_ps=torch.zeros(len(kinds)),
    )
    samplers = []
    for kind, place in zip(kinds, places, strict=True):
        if kind == "sharp":
            info.top_ps[place] = 1e-6
        sampling = SimpleNamespace(
            top_k=1 if kind == "greedy" else 30, sampling_seed=7 if kind == "seeded" else None
        )
        grammar = SimpleNamespace(apply_vocab_mask=partial(forbid, place))
        request = SimpleNamespace(sampling_params=sampling, grammar=grammar)
        samplers.append(RowSampler(request, info, place))

    counts = [2, 4, 3, 2, 3, 4, 2]
    logits = torch.randn(sum(counts), vocabulary) * 3
    masks = [torch.tensor([[i % vocabulary]]) if i % 3 else None for i in range(sum(counts))]
    rows = SampledRows(samplers, counts, logits.device)
    prepared = rows.prepare(logits, masks)
    owners = [place for place, count in zip(places, counts, strict=True) for _ in range(count)]
    want = logits + info.logit_bias[places].repeat_interleave(torch.tensor(counts), 0)
    for i in range(len(want)):
        if i % 3:
            want[i, (i + owners[i]) % vocabulary] = -torch.inf
    torch.testing.assert_close(prepared, want)

    own = [each.argmax(-1) for each in prepared.split(counts)]
    for i in (1, 4):  # as SGLang's step draws for this seed at these positions
        positions = torch.arange(10 * i, 10 * i + counts[i])
        probs = filtered_by_sorting(
            torch.softmax(prepared.split(counts)[i] / 0.9, -1), *rules(30, 0.8, counts[i])
        )
        seed = torch.full((counts[i],), 100 + places[i])
        own[i] = draw_seeded(probs, seed, positions)
    drafted = [tokens[:-1].tolist() for tokens in own]
    drafted[0][0] = (drafted[0][0] + 1) % vocabulary
    drafted[1][1] = (drafted[1][1] + 1) % vocabulary
    given = [[None] * len(tokens) for tokens in drafted]
    given[2] = list(torch.nn.functional.one_hot(own[2][:2], vocabulary).float().split(1))
    answers = rows.accept(prepared, drafted, given, [10 * i for i in range(len(kinds))], 3).tolist()
    for i, (stood, *tokens) in enumerate(answers):
        assert stood == {0: 0, 1: 1}.get(i, counts[i] - 1) or kinds[i] == "drawn"
        if kinds[i] != "drawn":
            assert tokens[: stood + 1] == own[i][: stood + 1].tolist()

    one_each = SampledRows(samplers, [1] * len(kinds), logits.device)
    first = prepared[rows.first]
    drawn, probs = one_each.propose(first)
    for i, kind in enumerate(kinds):
        assert (probs[i] is None) == (kind in ("greedy", "seeded"))
        assert kind == "drawn" or drawn[i] == first[i].argmax()
        if probs[i] is not None:
            left = rules(30, float(info.top_ps[places[i]]), 1)
            torch.testing.assert_close(
                probs[i], filtered_by_sorting(torch.softmax(first[i : i + 1] / 0.9, -1), *left)
            )


def rules(top_k, top_p, rows):
    return torch.full((rows,), top_k), torch.full((rows,), top_p), torch.zeros(rows)


def forbid(place, logits, mask):
    """Each request's grammar its own token."""
    logits[0, (mask[0, 0] + place) % logits.shape[1]] = -torch.inf


def test_drawn_tokens_beside_others_follow_the_target():
    """A draft that is wrong about much, one or two tokens of it, next to requests that take the most likely."""
    requests, vocabulary = 3000, 5
    target = torch.tensor([0.4, 0.1, 0.2, 0.2, 0.1])
    draft = torch.tensor([[0.1, 0.5, 0.1, 0.1, 0.2]])
    torch.manual_seed(2)
    info = SimpleNamespace(
        logit_bias=None,
        sampling_seed=None,
        temperatures=torch.ones(requests, 1),
        top_ks=torch.full((requests,), vocabulary),
        top_ps=torch.ones(requests),
        min_ps=torch.zeros(requests),
    )
    samplers = [
        RowSampler(
            SimpleNamespace(sampling_params=SimpleNamespace(top_k=top_k, sampling_seed=None)), info, place
        )
        for place, top_k in enumerate([1, vocabulary, vocabulary] * (requests // 3))
    ]
    counts = [2 + place % 2 for place in range(requests)]
    said = torch.multinomial(draft.expand(requests, -1), 2, replacement=True).tolist()
    drafted = [tokens[: count - 1] for tokens, count in zip(said, counts, strict=True)]
    given = [[draft] * len(tokens) for tokens in drafted]
    logits = target.log().expand(sum(counts), -1)
    answers = (
        SampledRows(samplers, counts, logits.device)
        .accept(logits, drafted, given, [0] * requests, 9)
        .tolist()
    )
    drawn = [tokens[: stood + 1] for place, (stood, *tokens) in enumerate(answers) if place % 3]
    assert all(tokens[0] == 0 for stood, *tokens in answers[::3])
    for place in range(2):
        tokens = torch.tensor([tokens[place] for tokens in drawn if len(tokens) > place])
        found = torch.bincount(tokens, minlength=vocabulary) / len(tokens)
        assert len(tokens) > 500 and (found - target).abs().max() < 4 * (0.25 / len(tokens)) ** 0.5


@pytest.mark.parametrize("counts", [[1], [5] * 20, [33, 2], [2, 40, 1, 1], list(range(1, 12))])
def test_groups_hold_every_request_once_and_few_rows(counts):
    parts = list(grouped(counts))
    assert [count for part in parts for count in counts[part]] == counts
    for part, following in zip(parts, [*parts[1:], None], strict=True):
        assert len(counts[part]) == 1 or sum(counts[part]) <= ROWS_AT_ONCE
        assert following is None or sum(counts[part]) + counts[following.start] > ROWS_AT_ONCE
