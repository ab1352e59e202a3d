"""A seed repeats a sample, whoever else is in the batch, and leaves the distribution as it was."""

import random
from concurrent.futures import ThreadPoolExecutor

import torch
import torch._dynamo
from sglang.srt.layers import sampler
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

from fathom.runtime.sglang_host import seeds

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
    """Seeded, unseeded and greedy requests arrive one by one and decode together."""
    alone = {seed: sample(server, seed, tokens=40) for seed in (1, 2, 3)}
    rng = random.Random(0)

    def ask(i):
        kind = i % 3
        if kind == 0:
            seed = rng.choice([1, 2, 3])
            return seed, sample(server, seed, tokens=40)
        if kind == 1:
            return None, sample(server, tokens=rng.randint(5, 60))
        return None, sample(server, tokens=20, temperature=0)

    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(ask, range(24)))
    assert [tokens for seed, tokens in answers if seed] == [alone[seed] for seed, _ in answers if seed]
    assert len({tuple(tokens) for seed, tokens in answers[1::3]}) == 8, "unseeded rows must differ"


def test_min_p_beside_a_seed_is_served(server):
    """SGLang's sampler cannot combine the two; the request is answered, without the seed's guarantee."""
    with ThreadPoolExecutor(4) as pool:
        mixed = [(3, {}), (None, {"min_p": 0.1}), (4, {"min_p": 0.2}), (None, {})] * 2
        assert all(pool.map(lambda case: len(sample(server, case[0], tokens=30, **case[1])) == 30, mixed))


def test_a_huge_seed_is_no_crash(server):
    assert len(sample(server, 2**62 + 11)) == 16


def test_a_seeded_draw_compiles_nothing(monkeypatch):
    """On a GPU, too, where PyTorch's compiler is on: nobody waits for it when the first seeded requests come."""
    for place, names in (
        (sampler, ("murmur_hash32", "multinomial_with_seed")),
        (SamplingBatchInfo, ("adjusted_from_schedule_batch", "merge_batch")),
    ):
        for name in names:
            monkeypatch.setattr(place, name, getattr(place, name))
    seeds.install(native=True)
    probs = torch.softmax(torch.randn(3, 50, generator=torch.Generator().manual_seed(1)), -1)
    most, all_of_it, nothing = torch.full((3,), 50), torch.ones(3), torch.zeros(3)
    seed, position = torch.tensor([7, 2**62, 7]), torch.tensor([4, 5, 4])
    monkeypatch.setattr(torch._dynamo.config, "disable", False)
    torch._dynamo.utils.counters.clear()

    def draw(rows):
        own = (x[rows] for x in (probs, most, all_of_it, nothing))
        return sampler.top_k_top_p_min_p_sampling_from_probs_torch(*own, False, seed[rows], position[rows])

    alone = torch.cat([draw([row]) for row in range(3)])
    assert torch.equal(draw([0, 1, 2]), alone)
    assert not torch._dynamo.utils.counters["frames"]
