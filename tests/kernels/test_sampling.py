"""Top-k, top-p and min-p without sorting, and draws from what they leave, against a sort in float64."""

import numpy as np
import pytest
import torch

from fathom.kernels.murmur_hash import murmur_hash32
from fathom.kernels.sampling_cpu import BLOCK, draw_cpu, draw_seeded_cpu, filtered_cpu
from fathom.runtime.sampling import draw, filtered_by_sorting

GENERATOR = torch.Generator()


def distributions(kind: str, rows: int, vocabulary: int) -> torch.Tensor:
    logits = torch.randn(rows, vocabulary, generator=GENERATOR.manual_seed(vocabulary))
    if kind == "flat":
        logits /= 8
    if kind == "sharp":
        logits *= 12
    if kind == "ties":  # as logits of bfloat16 have them, a few values in all
        logits = (logits * 2).round().bfloat16().float()
    if kind == "masked":
        logits[:, vocabulary // 5 + 1 :] = -torch.inf
    return torch.softmax(logits, -1)


def what_stays(row: np.ndarray, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """By the rules' own words, ties to the lower id."""
    order = np.argsort(-row, kind="stable")
    before = np.concatenate([[0.0], np.cumsum(row[order], dtype=np.float64)[:-1]])
    stays = np.arange(len(row)) < top_k
    if top_p < 1:
        stays &= before <= top_p
    stays &= row[order] >= np.float32(row.max() * np.float32(min_p))
    kept = np.zeros(len(row))
    kept[order[stays]] = row[order[stays]]
    return kept / kept.sum()


@pytest.mark.parametrize("kind", ["plain", "flat", "sharp", "ties", "masked"])
@pytest.mark.parametrize("vocabulary", [1, 2, 50, 3_000, 128_256])
def test_what_the_rules_leave_is_what_a_sort_leaves(kind, vocabulary):
    probs = distributions(kind, 24, vocabulary)
    top_ks = torch.randint(1, vocabulary + 2, (24,), generator=GENERATOR)
    top_ks[::4], top_ks[1::4] = 1 << 30, torch.randint(1, 60, (6,), generator=GENERATOR)
    top_ps, min_ps = torch.rand(2, 24, generator=GENERATOR)
    top_ps[::3] = 1.0
    min_ps[::2] = 0
    min_ps /= 3
    got = filtered_cpu(probs, top_ks, top_ps, min_ps)
    for row, left, *rules in zip(probs, got, top_ks.tolist(), top_ps.tolist(), min_ps.tolist(), strict=True):
        want = what_stays(row.numpy(), *rules)
        assert np.array_equal(left.numpy() > 0, want > 0), rules
        np.testing.assert_allclose(left.numpy(), want, rtol=1e-5, atol=0)
    assert (got > 0).sum() < probs.numel() or vocabulary == 1


def test_at_their_limits_the_rules_mean_the_same_to_both():
    """Probabilities and limits without rounding, which often coincide."""
    probs = torch.tensor([[0.5, 0.25, 0.125, 0.125]]).repeat(200, 1)
    top_ks = torch.randint(1, 6, (200,), generator=GENERATOR.manual_seed(0))
    top_ps, min_ps = (torch.randint(1, 9, (200,), generator=GENERATOR) / 8 for _ in range(2))
    assert torch.equal(
        filtered_cpu(probs, top_ks, top_ps, min_ps) > 0,
        filtered_by_sorting(probs, top_ks, top_ps, min_ps) > 0,
    )


def test_what_is_no_probability_is_left_out_and_stays_in_its_row():
    probs = torch.full((4, 600), 1 / 600)
    probs[0, 7], probs[1], probs[2] = torch.nan, torch.nan, 0
    for top_k, top_p, min_p in ((1 << 30, 1.0, 0.0), (5, 1.0, 0.0), (1 << 30, 0.5, 0.0), (600, 1.0, 0.3)):
        rules = torch.full((4,), top_k), torch.full((4,), top_p), torch.full((4,), min_p)
        left = filtered_cpu(probs, *rules)
        assert left.isfinite().all() and not left[0, 7] and not left[1].any() and not left[2].any()
        assert torch.equal(left[3], filtered_cpu(probs[3:], *(rule[3:] for rule in rules))[0])
        for tokens in (draw(left), draw_seeded_cpu(left, torch.arange(4), torch.arange(4))):
            assert (tokens >= 0).all() and (tokens < 600).all() and tokens[0] != 7
    assert draw(torch.full((2, 600), torch.nan)).tolist() == [0, 0]


@pytest.mark.parametrize("vocabulary", [1, 7, BLOCK, 3 * BLOCK - 1, 5_000])
def test_a_draw_is_the_token_at_a_chance_s_place_in_the_sum(vocabulary):
    weights = torch.rand(400, vocabulary, generator=GENERATOR.manual_seed(vocabulary))
    weights[:, torch.rand(vocabulary, generator=GENERATOR) < 0.6] = 0
    weights[:, vocabulary // 2] = 0.5
    chances = torch.rand(400, dtype=torch.double, generator=GENERATOR)
    chances[0], chances[1] = 0, 1 - 2.0**-53
    tokens = draw_cpu(weights, chances)
    assert (weights.gather(1, tokens.view(-1, 1)) > 0).all()
    sums = weights.double().cumsum(-1)
    wanted = chances * sums[:, -1]
    before = sums.gather(1, tokens.view(-1, 1))[:, 0] - weights.gather(1, tokens.view(-1, 1))[:, 0]
    after = sums.gather(1, tokens.view(-1, 1))[:, 0]
    assert (before <= wanted + 1e-9).all() and (wanted < after + 1e-9).all()
    assert len(set(tokens.tolist())) > min(vocabulary // 5, 100) or vocabulary <= 7


def test_a_seeded_draw_is_the_most_of_weight_and_noise():
    weights = torch.softmax(torch.randn(500, 3_000, generator=GENERATOR.manual_seed(1)), -1)
    weights[::2, 40:] = 0
    seeds = torch.randint(-(1 << 63), (1 << 63) - 1, (500,), generator=GENERATOR)
    positions = torch.randint(0, 1 << 20, (500,), generator=GENERATOR)
    uniform = murmur_hash32(seeds, positions, torch.arange(3_000)).double() / 0xFFFFFFFF
    noise = -(-uniform.log()).clamp(2.0**-32, torch.finfo(torch.double).max).log()
    want = (weights.double().log() + noise).argmax(-1)
    assert torch.equal(draw_seeded_cpu(weights, seeds, positions), want)
    assert len(set(want.tolist())) > 200
