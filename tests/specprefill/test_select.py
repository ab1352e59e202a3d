"""SpecPrefill's choice of chunks against the oracle, and its promises as properties."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import specprefill as oracle

from fathom.kernels.window_scores import pooled_max_scores, window_of
from fathom.runtime.specprefill.config import SpecPrefillConfig
from fathom.runtime.specprefill.select import (
    auto_count,
    chunk_scores,
    forced_chunks,
    select_prompt,
    whole_prompt,
)

RATES = [0.07, 0.1, 0.3, 0.5, 0.9]


def draft(lengths, rows, layers=3, heads=4, kv_heads=2, dim=16, dtype=torch.float32):
    """Queries and key pools of a draft's layers, and the slot table: each prompt's keys lie in random slots."""
    torch.manual_seed(sum(lengths) + sum(rows))
    table = torch.randperm(sum(lengths) + 3)[: sum(lengths)].int()
    slots = torch.zeros(len(lengths), max(lengths), dtype=torch.int32)
    for row, part in enumerate(table.split(lengths)):
        slots[row, : len(part)] = part
    queries = [(torch.randn(sum(rows), heads, dim) * 2).to(dtype) for _ in range(layers)]
    pools = [torch.randn(sum(lengths) + 3, kv_heads, dim).to(dtype) for _ in range(layers)]
    return queries, pools, slots


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("lengths", "rows"),
    [([1], [1]), ([31], [8]), ([32], [8]), ([33], [2]), ([1000, 320, 7, 517], [8, 3, 1, 8]), ([2000], [8])],
)
def test_kept_tokens_are_the_oracles(lengths, rows, dtype):
    queries, pools, slots = draft(lengths, rows, dtype=dtype)
    window, scores = window_of(rows, lengths, slots, causal=False), None
    for query, keys in zip(queries, pools, strict=True):
        scores = pooled_max_scores(query, keys, window, 0.25, out=scores)
    spans = [[(n // 3, n // 3 + 2)] if n > 40 else [] for n in lengths]
    for rate in RATES:
        config = SpecPrefillConfig(keep_rate=rate, min_prompt_tokens=0)
        for (index, own, length), protected in zip(window.requests(), spans, strict=True):
            selection = select_prompt(scores[own, :length], protected, config)
            clear = [keys[slots[index, :length].long()] for keys in pools]
            want = oracle.token_scores([query[own] for query in queries], clear, 0.25)
            assert selection.tokens.tolist() == oracle.kept_tokens(want, protected, rate)
            assert selection.prompt_tokens == length


@given(
    data=st.data(),
    n=st.integers(1, 400),
    chunk=st.integers(1, 40),
    rate=st.integers(1, 100),
    levels=st.integers(1, 4),
)
@settings(max_examples=150, deadline=None)
def test_ties_and_forced_chunks_as_in_the_oracle(data, n, chunk, rate, levels):
    """Scores on a few exact levels: almost every border is a tie."""
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    per_chunk = torch.randint(0, levels, (-(-n // chunk),), generator=generator).float()
    scores = per_chunk.repeat_interleave(chunk)[:n].repeat(2, 1)
    start = data.draw(st.integers(0, n))
    spans = [(start, data.draw(st.integers(start, n)))]
    config = SpecPrefillConfig(keep_rate=rate / 100, chunk=chunk, min_prompt_tokens=0)
    got = select_prompt(scores, spans, config)
    assert got.tokens.tolist() == oracle.kept_tokens(scores, spans, rate / 100, chunk)
    assert got.kept_chunks == max(got.forced_chunks, oracle.budget(rate / 100, got.chunks))
    kept = set(got.tokens.tolist())
    assert {0, n - 1} <= kept and set(range(*spans[0])) <= kept
    assert kept == {t for t in range(n) if any(s in kept for s in range(t // chunk * chunk, t + 1))}


@given(
    seed=st.integers(0, 10_000),
    n=st.integers(1, 900),
    rates=st.tuples(st.integers(1, 99), st.integers(1, 99)),
)
@settings(max_examples=60, deadline=None)
def test_a_higher_rate_keeps_all_that_a_lower_one_keeps(seed, n, rates):
    scores = torch.rand(3, n, generator=torch.Generator().manual_seed(seed))
    low, high = (
        set(select_prompt(scores, [], SpecPrefillConfig(rate / 100, min_prompt_tokens=0)).tokens.tolist())
        for rate in sorted(rates)
    )
    assert low <= high


@given(
    seed=st.integers(0, 10_000),
    n=st.integers(1, 700),
    share=st.sampled_from([0.3, 0.8, 0.95, 1.0]),
    floor=st.sampled_from([0.05, 0.3]),
    levels=st.sampled_from([2, 1000]),
)
@settings(max_examples=100, deadline=None)
def test_auto_is_the_smallest_count_that_holds_the_share(seed, n, share, floor, levels):
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randint(1, levels, (1, n), generator=generator).float() ** 3
    forced = forced_chunks(n, [(n // 2, n // 2 + 1)])
    means = chunk_scores(scores)
    sizes = torch.tensor([min(32, n - i) for i in range(0, n, 32)])
    got = auto_count(means, sizes, forced, share, floor)
    want = oracle.smallest_count(means.tolist(), sizes.tolist(), set(forced.tolist()), share, floor)
    assert max(got, len(forced)) == want
    config = SpecPrefillConfig("auto", min_prompt_tokens=0, auto_share=share, auto_min_rate=floor)
    selection = select_prompt(scores, [(n // 2, n // 2 + 1)], config)
    assert selection.kept_chunks == want and floor <= selection.rate <= 1
    assert selection.rate == got / selection.chunks


def test_all_of_the_mass_is_in_all_of_the_chunks():
    """Though a sum of it depends on the order in its last bits."""
    for seed in range(50):
        means = torch.randn(60, generator=torch.Generator().manual_seed(seed)).mul(5).exp()
        assert auto_count(means, torch.full((60,), 32), torch.tensor([0, 59]), 1.0, 0.05) <= 60


@given(seed=st.integers(0, 10_000), n=st.integers(1, 200), chunk=st.integers(1, 40), rows=st.integers(1, 3))
@settings(max_examples=60)
def test_a_chunks_score_is_the_mean_of_its_own_tokens(seed, n, chunk, rows):
    scores = torch.rand(rows, n, generator=torch.Generator().manual_seed(seed))
    want = oracle.chunk_means(scores.double().mean(0).tolist(), chunk)
    assert chunk_scores(scores, chunk).tolist() == pytest.approx(want, rel=1e-5)


def test_auto_follows_the_prompt():
    """Mass in one place needs few chunks, mass everywhere needs nearly all, no mass at all decides nothing."""
    config = SpecPrefillConfig("auto", min_prompt_tokens=0)
    peaked = torch.full((1, 3200), 1e-6)
    peaked[0, 1600:1632] = 1.0
    assert select_prompt(peaked, [], config).kept_chunks == 5  # 5 % of 100 chunks
    assert select_prompt(torch.ones(1, 3200), [], config).kept_chunks == 95
    assert select_prompt(torch.zeros(1, 3200), [], config).whole
    assert select_prompt(torch.full((1, 3200), float("nan")), [], config).whole


def test_short_prompts_and_full_rates_stay_whole():
    scores = torch.rand(8, 5000)
    assert select_prompt(scores[:, :4095], [], SpecPrefillConfig(0.1)).whole
    assert not select_prompt(scores[:, :4096], [], SpecPrefillConfig(0.1)).whole
    whole = select_prompt(scores, [], SpecPrefillConfig(1.0))
    assert whole.whole and whole.rate == 1.0
    assert torch.equal(whole.tokens, whole_prompt(5000).tokens)
    short = select_prompt(scores[:, :20], [], SpecPrefillConfig(0.1, chunk=8))
    assert short.chunks == short.kept_chunks == 3
    assert not SpecPrefillConfig(1.0).applies_to(10**6) and SpecPrefillConfig("auto").applies_to(4096)


def test_forced_chunks_alone_may_exceed_the_budget():
    config = SpecPrefillConfig(0.1, min_prompt_tokens=0)
    selection = select_prompt(torch.rand(8, 640), [(0, 320)], config)  # 20 chunks, budget 2
    assert selection.forced_chunks == selection.kept_chunks == 11
    assert selection.tokens.tolist() == [*range(320), *range(608, 640)]


def test_illegal_input_is_refused():
    for span in ((-1, 3), (5, 11), (4, 3)):
        with pytest.raises(ValueError, match="span"):
            forced_chunks(10, [span])
        with pytest.raises(ValueError, match="span"):  # whether the prompt is judged or not
            select_prompt(torch.rand(1, 10), [span], SpecPrefillConfig())
    rates = ({"keep_rate": 0}, {"keep_rate": "best"}, {"auto_share": 1.5}, {"auto_share": "auto"})
    sizes = ({"pool": 4}, {"pool": -1}, {"chunk": 0}, {"lookahead": 0}, {"min_prompt_tokens": -1})
    for values in (*rates, {"auto_min_rate": 0}, *sizes):
        with pytest.raises(ValueError):
            SpecPrefillConfig(**values)
