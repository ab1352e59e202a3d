"""The Selector against the equations, and its properties: distributions, the fusion weight, ties, empty ranges."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import sfi as oracle

from fathom.kernels.selector_scores import (
    fused_scores,
    fusion_weight,
    selector_scores,
    selector_scores_torch,
    window_max,
)
from fathom.runtime.sfi.config import SelectorConfig
from fathom.runtime.sfi.selector import candidates, select

NAMES = {
    "power": "alpha",
    "norm_decay": "gamma",
    "position_decay": "beta",
    "position_curve": "p",
    "tail_brake": "eta",
    "prior_clip": "lambda_clip",
    "nms_strength": "alpha_soft",
    "nms_radius": "radius",
    "cross_head": "alpha_cross",
    "temperature": "temperature",
    "epsilon": "eps",
}
WITHOUT_PRIOR = SelectorConfig(norm_decay=0, position_decay=0, tail_brake=0)


def by_the_book(config: SelectorConfig, k: int) -> oracle.Settings:
    return oracle.Settings(k=k, **{NAMES[name]: value for name, value in vars(config).items()})


def problem(seed, requests, kv_heads, rows, n, spread=3.0):
    """Random evidence and candidate ranges; what lies outside the ranges is NaN."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(requests, kv_heads, rows, n, generator=generator) * spread
    norms = torch.rand(requests, kv_heads, n, generator=generator) * 3 + 0.05
    begin = torch.randint(0, n // 3 + 1, (requests,), generator=generator)
    end = begin + (torch.rand(requests, generator=generator) * (n - begin + 1)).long()
    index = torch.arange(n)
    outside = ((index < begin.unsqueeze(-1)) | (index >= end.unsqueeze(-1))).unsqueeze(1)
    logits.masked_fill_(outside.unsqueeze(2), float("nan"))
    norms.masked_fill_(outside, float("nan"))
    return logits, norms, begin, end, outside


configs = st.builds(
    SelectorConfig,
    power=st.sampled_from([0.3, 0.5, 1.0]),
    norm_decay=st.sampled_from([0.0, 0.5, 2.0]),
    position_decay=st.sampled_from([0.0, 0.568, 3.0]),
    position_curve=st.sampled_from([1.0, 1.8]),
    tail_brake=st.sampled_from([0.0, 0.4]),
    prior_clip=st.sampled_from([0.0, 0.02, 0.4, 1.0]),
    nms_strength=st.sampled_from([0.0, 0.5, 1.5]),
    nms_radius=st.sampled_from([0, 1, 5, 16]),
    cross_head=st.sampled_from([0.0, 0.35, 1.0]),
    temperature=st.sampled_from([0.5, 2.0]),
)
shapes = st.tuples(st.integers(1, 3), st.integers(1, 4), st.sampled_from([1, 3, 32]), st.integers(1, 120))


@given(config=configs, shape=shapes, budget=st.integers(1, 60), seed=st.integers(0, 10**6))
@settings(max_examples=150, deadline=None)
def test_scores_and_choice_equal_algorithm_2(config, shape, budget, seed):
    logits, norms, begin, end, _ = problem(seed, *shape)
    scores = selector_scores(logits, norms, begin, end, config)
    chosen = select(logits, norms, begin, end, budget, config)
    s = by_the_book(config, budget)
    for r, (low, high) in enumerate(zip(begin.tolist(), end.tolist(), strict=True)):
        assert torch.isneginf(scores[r, :, :low]).all() and torch.isneginf(scores[r, :, high:]).all()
        assert int(chosen.counts[r]) == min(budget, high - low)
        if low == high:
            continue
        fused = [
            oracle.fused_score(logits[r, h, :, low:high], norms[r, h, low:high], s)[0]
            for h in range(shape[1])
        ]
        for h, want in enumerate(oracle.refined_scores(fused, s)):
            torch.testing.assert_close(scores[r, h, low:high], want, atol=2e-4, rtol=1e-4)
            picked = chosen.indices[r, h][: chosen.counts[r]].tolist()
            assert picked == sorted(set(picked)) and low <= picked[0] and picked[-1] < high
            # The same set by the reference, but for scores that differ by rounding alone.
            best = set(torch.argsort(want, descending=True, stable=True)[:budget].tolist())
            swapped = best ^ {j - low for j in picked}
            if swapped:
                level = [float(want[j]) for j in swapped]
                assert max(level) - min(level) < 1e-3
    assert (chosen.indices[chosen.indices < 0] == -1).all()


@pytest.mark.parametrize("radius", [0, 16, 700])
@pytest.mark.parametrize("n", [1023, 1024, 5000])
def test_blocks_of_a_long_range_meet(n, radius):
    config = SelectorConfig(nms_radius=radius)
    logits, norms, begin, end, _ = problem(n + radius, 3, 2, 4, n)
    begin[0], end[0] = 0, n
    logits[0], norms[0] = torch.randn(2, 4, n), torch.rand(2, n) + 0.1
    got = selector_scores(logits, norms, begin, end, config)
    want = selector_scores_torch(logits, norms, begin, end, config)
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("scale", [0.01, 1000])
def test_the_largest_norm_decay_stays_in_range(scale):
    config = SelectorConfig(norm_decay=4, prior_clip=1)
    logits, norms, begin, end, _ = problem(4, 2, 2, 2, 600)
    norms *= scale
    scores = selector_scores(logits, norms, begin, end, config)
    want = selector_scores_torch(logits, norms, begin, end, config)
    torch.testing.assert_close(scores, want, atol=2e-3, rtol=1e-3)
    r, (low, high) = 0, (int(begin[0]), int(end[0]))
    heads = [
        oracle.fused_score(x[:, low:high], n[low:high], by_the_book(config, 9))[0]
        for x, n in zip(logits[r], norms[r], strict=True)
    ]
    for got, book in zip(scores[r], oracle.refined_scores(heads, by_the_book(config, 9)), strict=True):
        torch.testing.assert_close(got[low:high], book, atol=2e-3, rtol=1e-3)


def test_same_choice_as_the_oracle_on_a_long_range():
    logits, norms, begin, end, _ = problem(3, 3, 4, 4, 3000)
    chosen = select(logits, norms, begin, end, 200, SelectorConfig())
    for r, (low, high) in enumerate(zip(begin.tolist(), end.tolist(), strict=True)):
        want = oracle.selector(
            list(logits[r]), list(norms[r]), range(low, high), by_the_book(SelectorConfig(), 200)
        )
        assert [head[head >= 0].tolist() for head in chosen.indices[r]] == want


@given(config=configs, shape=shapes, seed=st.integers(0, 10**6))
@settings(max_examples=80, deadline=None)
def test_fused_scores_are_a_distribution(config, shape, seed):
    logits, norms, begin, end, outside = problem(seed, *shape)
    fused = fused_scores(logits, norms, begin, end, outside, config)
    total = fused.sum(-1)[end > begin]
    torch.testing.assert_close(total, torch.ones_like(total), atol=1e-5, rtol=0)
    own = ~outside.expand(fused.shape)
    assert (fused[own] >= 0).all() and (
        fused[end > begin][outside.expand(fused.shape)[end > begin]] == 0
    ).all()


@given(clip=st.sampled_from([0.0, 0.02, 0.5, 1.0]), n=st.integers(1, 50), seed=st.integers(0, 10**6))
@settings(max_examples=100, deadline=None)
def test_fusion_weight_minimises_the_squared_norm(clip, n, seed):
    generator = torch.Generator().manual_seed(seed)
    f, r = (torch.rand(n, generator=generator, dtype=torch.float64) ** power for power in (4, 1))
    f, r = f / f.sum(), r / r.sum()
    weight = fusion_weight(f, r, clip)
    assert 0 <= weight <= clip
    grid = torch.linspace(0, clip, 201, dtype=torch.float64).unsqueeze(-1)
    best = ((1 - grid) * f + grid * r).square().sum(-1).min()
    assert ((1 - weight) * f + weight * r).square().sum() <= best + 1e-12


def test_equal_distributions_need_no_prior():
    uniform = torch.full((2, 8), 0.125)
    assert (fusion_weight(uniform, uniform, 1.0) == 0).all()


def test_ties_go_to_the_lower_index():
    logits, norms = torch.zeros(2, 3, 1, 60), torch.ones(2, 3, 60)
    chosen = select(logits, norms, torch.tensor([4, 0]), torch.tensor([50, 60]), 7, WITHOUT_PRIOR)
    assert (chosen.indices[0] == torch.arange(4, 11)).all()
    assert (chosen.indices[1] == torch.arange(7)).all()


def test_one_query_row_is_its_own_evidence():
    """With W = 1, Eq. 8 recovers the attention distribution."""
    logits, norms, begin, end, outside = problem(1, 1, 1, 1, 50)
    fused = fused_scores(logits, norms, begin, end, outside, SelectorConfig(prior_clip=0))
    low, high = int(begin), int(end)
    torch.testing.assert_close(fused[0, 0, low:high], logits[0, 0, 0, low:high].softmax(-1))


@given(n=st.integers(1, 40), radius=st.integers(0, 50), seed=st.integers(0, 1000))
@settings(max_examples=60, deadline=None)
def test_window_max(n, radius, seed):
    x = torch.randn(2, n, generator=torch.Generator().manual_seed(seed))
    want = torch.stack([x[:, max(i - radius, 0) : i + radius + 1].amax(-1) for i in range(n)], -1)
    assert torch.equal(window_max(x, radius), want)


@given(length=st.integers(0, 60), sink=st.integers(0, 8), recent=st.integers(1, 30))
def test_candidates_are_all_but_sink_and_recent(length, sink, recent):
    begin, end = candidates(np.array([length]), sink, recent)
    everything = set(range(length))
    want = everything - set(range(sink)) - set(range(max(length - recent, 0), length))
    assert set(range(*begin, *end)) == want


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"power": 0}, "power must be in"),
        ({"nms_radius": 1.5}, "nms_radius must be a number of type"),
        ({"prior_clip": 1.1}, "prior_clip"),
        ({"temperature": True}, "temperature"),
    ],
)
def test_illegal_hyper_parameters_are_refused(values, message):
    with pytest.raises(ValueError, match=message):
        SelectorConfig(**values)
