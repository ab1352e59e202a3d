"""The oracle of all mechanisms at once is, with some of them off, the oracles of the others."""

import random

import pytest
import torch
from oracles import combined, compressed_model, sfi

from fathom.runtime.sfi.selector import random_scores

VOCABULARY = 128
TRIGGERS = set(range(0, VOCABULARY, 11))
SETTINGS = sfi.Settings(sink=4, recent=16, k=20, t_max=9, radius=3, lambda_clip=0.2)


@pytest.fixture(scope="module")
def model(random_model):
    return random_model(4)


def make_prompt(length):
    rng = random.Random(length)
    return [rng.randrange(VOCABULARY) for _ in range(length)]


@pytest.mark.parametrize("cutoff", [None, 2])
@pytest.mark.parametrize("length", [3, 150])
def test_slow_and_fast_steps(model, length, cutoff):
    prompt = make_prompt(length)
    kept = (lambda layer: {0, length - 1} if layer >= cutoff else range(length)) if cutoff else None
    want = sfi.generate(model, prompt, 40, TRIGGERS, SETTINGS, kept)
    got = combined.generate(
        model, prompt, 40, combined.Prefill(cutoff=cutoff), combined.Decode(SETTINGS, TRIGGERS)
    )
    assert (got.tokens, got.slow) == (want.tokens, want.slow)
    torch.testing.assert_close(torch.stack(got.logits), torch.stack(want.logits), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "how",
    [
        {"retention": 0.2},
        {"retention": 0.3, "rule": "streaming", "cutoff": 3, "anchors": "none"},
        {"tsp_layer": 2, "tsp_rate": 0.3, "retention": 0.1},
        {"tsp_layer": 2, "tsp_rate": 0.3, "retention": 0.2, "cutoff": 3},
        {"entered": [0, *range(30, 120)], "retention": 0.3, "cutoff": 2},
    ],
    ids=str,
)
def test_what_prefill_leaves(model, tmp_path, how):
    model.save_pretrained(tmp_path)
    reference, prompt = compressed_model.CompressedModel(tmp_path), make_prompt(120)
    got = combined.generate(model, prompt, 10, combined.Prefill(**how))
    want = reference.log_probs(prompt, got.tokens[:-1], **how)
    torch.testing.assert_close(torch.stack(got.logits).log_softmax(-1), want, atol=1e-4, rtol=1e-4)
    assert (got.kept, got.sets) == (reference.kept, reference.sets)


def test_numbers_drawn_at_random_are_the_oracles():
    seeds, lengths = torch.tensor([5, 1 << 55]), torch.tensor([300, 70])
    layers = [random_scores(seeds, lengths, layer, 8, 40) for layer in (3, 35)]
    for layer, scores in zip((3, 35), layers, strict=True):
        for i, (seed, length) in enumerate(zip(seeds.tolist(), lengths.tolist(), strict=True)):
            for head in range(8):
                want = [combined.drawn(seed, length, layer, head, j) for j in range(40)]
                assert scores[i, head].tolist() == want
    assert torch.stack(layers).unique().numel() == 2 * 2 * 8 * 40
