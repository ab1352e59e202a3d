"""A seed repeats a sample, whoever else is in the batch, and leaves the distribution as it was."""

import random
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
import torch._dynamo
from sglang.srt.layers import sampler
from sglang.srt.runtime_context import _ConfigBag
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

from fathom.runtime.sglang_host.sampling import seeds

PROMPT = [17, 33, 250, 12, 99]


def sample(server, seed=None, tokens=16, prompt=PROMPT, **params):
    sampling = {"temperature": 1.0, "max_new_tokens": tokens, "ignore_eos": True, **params}
    if seed is not None:
        sampling["sampling_seed"] = seed
    answer = server.client.post("/generate", json={"input_ids": prompt, "sampling_params": sampling})
    assert answer.status_code == 200, answer.text
    return answer.json()["output_ids"]


def test_a_seed_repeats_the_sample(server):
    assert sample(server, 7) == sample(server, 7)
    assert sample(server, 7) != sample(server, 8)
    assert sample(server) != sample(server)


def test_a_seed_holds_in_a_mixed_batch(server):
    """Seeded, unseeded and greedy requests, some of which have a min-p, arrive one by one and decode together."""
    seeded = {1: {}, 2: {"min_p": 0.3}, 3: {"top_k": 20, "min_p": 0.05}, 4: {"top_p": 0.9}}
    alone = {seed: sample(server, seed, tokens=40, **params) for seed, params in seeded.items()}
    assert alone[2] != sample(server, 2, tokens=40)
    rng = random.Random(0)

    def ask(i):
        kind = i % 3
        if kind == 0:
            seed = rng.choice(list(seeded))
            return seed, sample(server, seed, tokens=40, **seeded[seed])
        if kind == 1:
            return None, sample(server, tokens=rng.randint(5, 60), min_p=rng.choice([0, 0.02]))
        return None, sample(server, tokens=20, temperature=0)

    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(ask, range(24)))
    assert [tokens for seed, tokens in answers if seed] == [alone[seed] for seed, _ in answers if seed]
    assert len({tuple(tokens) for seed, tokens in answers[1::3]}) == 8, "unseeded rows must differ"


@pytest.fixture
def installed(monkeypatch):
    """Our functions in SGLang's places, for one test."""
    for place, names in (
        (
            sampler,
            (
                "murmur_hash32",
                "multinomial_with_seed",
                "top_k_top_p_min_p_sampling_from_probs_torch",
                "sampling_from_probs_torch",
            ),
        ),
        (SamplingBatchInfo, ("adjusted_from_schedule_batch", "merge_batch")),
    ):
        for name in names:
            monkeypatch.setattr(place, name, getattr(place, name))
    monkeypatch.setattr(sampler, "_CUSTOM_SAMPLER_FACTORIES", {})
    seeds.install(native=True)


@pytest.mark.parametrize("backend", seeds.BACKENDS)
def test_draws_with_seeds_follow_the_distribution(installed, monkeypatch, backend):
    """Top-k, top-p and min-p as the rule for them says, over many seeds; rows beside each other do not meet."""
    kernel = _ConfigBag("exec.kernel")
    kernel._set("sampling_backend", backend)
    for place in (sampler, seeds):
        monkeypatch.setattr(place, "get_exec", lambda: SimpleNamespace(kernel=kernel))
    draws, vocabulary = 20_000, 8
    base = torch.softmax(torch.randn(vocabulary, generator=torch.Generator().manual_seed(3)), -1)
    rules = [(vocabulary, 1.0, 0.0), (vocabulary, 1.0, 0.25), (4, 1.0, 0.1), (vocabulary, 0.7, 0.2)]
    top_ks, top_ps, min_ps = (torch.tensor(column).repeat(draws) for column in zip(*rules, strict=True))
    info = SimpleNamespace(
        sampling_seed=torch.arange(draws).repeat_interleave(len(rules)),
        top_ks=top_ks,
        top_ps=top_ps,
        min_ps=min_ps,
        need_min_p_sampling=True,
        sampling_mask_batch_indices=None,
    )
    positions = torch.full((len(top_ks),), 5)
    drawing = seeds.SeededSampler.__new__(seeds.SeededSampler)
    probs = base.repeat(len(top_ks), 1)
    tokens, _ = drawing._sample_from_probs(probs, info, positions, False)
    assert torch.equal(probs, base.repeat(len(top_ks), 1)) and info.need_min_p_sampling
    assert kernel.sampling_backend == backend
    order = sorted(range(vocabulary), key=lambda token: -base[token])
    for row, (top_k, top_p, min_p) in enumerate(rules):
        before = [sum(float(base[t]) for t in order[:place]) for place in range(vocabulary)]
        stays = {
            token
            for place, token in enumerate(order)
            if place < top_k and before[place] <= top_p and base[token] >= min_p * base[order[0]]
        }
        assert 1 < len(stays) < vocabulary or row == 0
        want = torch.tensor([float(base[t]) if t in stays else 0.0 for t in range(vocabulary)])
        got = torch.bincount(tokens[row :: len(rules)], minlength=vocabulary) / draws
        assert set(got.nonzero().flatten().tolist()) == stays
        assert (got - want / want.sum()).abs().max() < 4 * (0.25 / draws) ** 0.5


@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_a_seed_draws_the_same_where_rounding_changes_who_is_likelier(installed, top_p):
    """Many tokens of a vocabulary are nearly as likely as the next; which of two is so decides no draw."""
    draws, vocabulary = 500, 4000
    logits = torch.randn(draws, vocabulary, generator=torch.Generator().manual_seed(5))
    other = logits + 1e-4 * torch.randn(logits.shape, generator=torch.Generator().manual_seed(6))
    assert (logits.argsort(-1) != other.argsort(-1)).any(-1).all()
    rules = (torch.full((draws,), vocabulary), torch.full((draws,), top_p), torch.zeros(draws), False)
    seed, positions = torch.arange(draws), torch.full((draws,), 7)
    draw = sampler.top_k_top_p_min_p_sampling_from_probs_torch
    tokens, again = (draw(torch.softmax(each, -1), *rules, seed, positions) for each in (logits, other))
    assert len(set(tokens.tolist())) > draws / 2
    assert (tokens != again).sum() <= 1
    ids = draw(torch.softmax(logits, -1), *rules, seed, positions, return_filtered_probs=True)
    chosen, weights, places, weight = ids
    assert torch.equal(chosen, tokens) and torch.equal(weights, weights.sort(-1, descending=True)[0])
    assert torch.equal(weights[places == tokens.view(-1, 1)], weight)
    assert torch.equal(places.sort(-1)[0][0], torch.arange(vocabulary, dtype=torch.int32))
    assert (weights > 0).sum(-1).float().mean() == pytest.approx(
        (vocabulary if top_p == 1 else 0.67 * vocabulary), rel=0.1
    )


@pytest.mark.parametrize("seeded", [False, True])
@pytest.mark.parametrize("top_k", [5, 1 << 30])
def test_a_request_that_asks_what_could_have_been_drawn_is_told(installed, monkeypatch, seeded, top_k):
    """Ids of what the rules left, the likeliest first, and the log-probability of the drawn one among them."""
    kernel = _ConfigBag("exec.kernel")
    kernel._set("sampling_backend", "pytorch")
    for place in (sampler, seeds):
        monkeypatch.setattr(place, "get_exec", lambda: SimpleNamespace(kernel=kernel))
    asking = torch.tensor([2, 0])
    info = SimpleNamespace(
        sampling_seed=torch.arange(3) if seeded else None,
        top_ks=torch.full((3,), top_k),
        top_ps=torch.ones(3),
        min_ps=torch.zeros(3),
        need_min_p_sampling=False,
        sampling_mask_batch_indices=asking,
    )
    drawing = seeds.SeededSampler.__new__(seeds.SeededSampler)
    drawing.sampling_mask_max_tokens, vocabulary = 8, 8
    probs = torch.softmax(torch.randn(3, vocabulary, generator=torch.Generator().manual_seed(4)), -1)
    simple = top_k > vocabulary and not seeded
    tokens, captured = drawing._sample_from_probs(probs, info, torch.arange(3), simple)
    told = drawing._build_sampling_mask_output(tokens, captured)
    for i, row in enumerate(asking.tolist()):
        left = probs[row].argsort(descending=True)[:top_k]
        assert told.lengths[i] == len(left) and told.statuses[i] == sampler.SamplingMaskStatus.OK
        assert told.token_ids[i, : len(left)].tolist() == left.tolist()
        assert tokens[row] in left
        want = (probs[row, tokens[row].long()] / probs[row, left].sum()).log()
        torch.testing.assert_close(told.selected_logprobs[i], want)


@pytest.mark.parametrize("rule", ["top_k", "top_p", "min_p"])
def test_a_draw_from_what_is_no_number_leaves_the_engine_and_its_neighbours_alone(
    installed, monkeypatch, rule
):
    kernel = _ConfigBag("exec.kernel")
    kernel._set("sampling_backend", "pytorch")
    monkeypatch.setattr(sampler, "get_exec", lambda: SimpleNamespace(kernel=kernel))
    probs = torch.full((3, 8), 1 / 8)
    probs[1], probs[2] = torch.nan, torch.eye(8)[5]
    info = SimpleNamespace(
        sampling_seed=None,
        top_ks=torch.full((3,), 4 if rule == "top_k" else 8),
        top_ps=torch.full((3,), 0.7 if rule == "top_p" else 1.0),
        min_ps=torch.full((3,), 0.2 if rule == "min_p" else 0.0),
        need_min_p_sampling=rule == "min_p",
        sampling_mask_batch_indices=None,
    )
    drawing = seeds.SeededSampler.__new__(seeds.SeededSampler)
    tokens, _ = drawing._sample_from_probs(probs, info, torch.zeros(3), False)
    assert ((tokens >= 0) & (tokens < 8)).all() and tokens[2] == 5
    assert probs[1].isnan().all(), "what is told of it is no number either"


def with_logprobs(server, *several):
    """Answers of one batch, and of each token (log-probability, id) of the most likely ones."""
    sampling = [{"max_new_tokens": 6, "ignore_eos": True, **each} for each in several]
    body = {"input_ids": [PROMPT] * len(several), "sampling_params": sampling}
    body |= {"return_logprob": True, "top_logprobs_num": 5}
    answers = server.client.post("/generate", json=body).json()
    meta = [answer["meta_info"] for answer in answers]
    return [[[entry[:2] for entry in token] for token in each["output_top_logprobs"]] for each in meta]


def test_logprobs_at_a_low_temperature_are_of_the_most_likely_tokens(server):
    """A thousand times as far apart as without a temperature, which is beyond what probabilities hold."""
    cold, plain = with_logprobs(server, {"temperature": 0.001}, {"temperature": 0})
    assert cold[0][-1][0] < -110
    for low, high in zip(cold, plain, strict=True):
        assert [token for _, token in low] == [token for _, token in high]
        gaps = [0.001 * (value - low[0][0]) for value, _ in low]
        assert gaps == pytest.approx([value - high[0][0] for value, _ in high], abs=1e-4)


def test_logprobs_of_the_most_likely_token_do_not_depend_on_who_samples_beside_it(server):
    """A temperature says nothing where there is no chance; SGLang takes it if a neighbour samples."""
    best = {"top_k": 1, "temperature": 0.3}
    alone, plain = with_logprobs(server, best)[0], with_logprobs(server, {"temperature": 0})[0]
    beside = with_logprobs(server, best, {"temperature": 1.0})[0]
    for other in (plain, beside):
        for token, entries in zip(alone, other, strict=True):
            assert [t for _, t in token] == [t for _, t in entries]
            assert [v for v, _ in token] == pytest.approx([v for v, _ in entries], abs=1e-4)


def test_a_huge_seed_is_no_crash(server):
    assert len(sample(server, 2**62 + 11)) == 16


@torch._dynamo.config.patch(disable=False)
def test_a_seeded_draw_compiles_nothing(installed):
    """On a GPU, too, where PyTorch's compiler is on: nobody waits for it when the first seeded requests come."""
    probs = torch.softmax(torch.randn(3, 50, generator=torch.Generator().manual_seed(1)), -1)
    most, all_of_it, nothing = torch.full((3,), 50), torch.ones(3), torch.zeros(3)
    seed, position = torch.tensor([7, 2**62, 7]), torch.tensor([4, 5, 4])
    torch._dynamo.utils.counters.clear()

    def draw(rows):
        own = (x[rows] for x in (probs, most, all_of_it, nothing))
        return sampler.top_k_top_p_min_p_sampling_from_probs_torch(*own, False, seed[rows], position[rows])

    alone = torch.cat([draw([row]) for row in range(3)])
    assert torch.equal(draw([0, 1, 2]), alone)
    assert not torch._dynamo.utils.counters["frames"]
