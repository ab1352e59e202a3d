"""FastKV's propagation and retention against the oracle, and their promises as properties."""

import re
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import fastkv as oracle

from fathom.kernels.window_scores import pool_saliency, row_mean_scores, window_of
from fathom.runtime.fastkv.config import FastKVConfig
from fathom.runtime.fastkv.policies import RETENTION_POLICIES, RetentionContext, load_policy
from fathom.runtime.fastkv.select import Sizes, propagated_tokens, retain, retained_entries

WINDOW = 8
ROOT = Path(__file__).resolve().parents[2]


def layer(lengths, heads=4, kv_heads=2, dim=16, dtype=torch.float32):
    """One layer's queries per request, its pool and slot table."""
    torch.manual_seed(sum(lengths))
    slots = torch.zeros(len(lengths), max(lengths), dtype=torch.int32)
    for row, part in enumerate(torch.randperm(sum(lengths) + 3)[: sum(lengths)].int().split(lengths)):
        slots[row, : len(part)] = part
    queries = [(torch.randn(n, heads, dim) * 2).to(dtype) for n in lengths]
    return queries, torch.randn(sum(lengths) + 3, kv_heads, dim).to(dtype), slots


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lengths", [[1], [5], [8], [9], [12, 300, 3, 77], [700]])
def test_kept_sets_are_the_oracles(lengths, dtype):
    queries, keys, slots = layer(lengths, dtype=dtype)
    rows = [min(n, WINDOW) for n in lengths]
    packed = torch.cat([query[-count:] for query, count in zip(queries, rows, strict=True)])
    means = row_mean_scores(packed, keys, window_of(rows, lengths, slots, causal=True), 0.25)
    for index, (n, query) in enumerate(zip(lengths, queries, strict=True)):
        matrix = oracle.attention(query, keys[slots[index, :n].long()], 0.25)
        # Above the selection layer fewer tokens are present than entered the model.
        for entered in (n, 3 * n):
            sizes = Sizes(entered, n, WINDOW)
            one = pool_saliency(means[index], sizes.ranked, groups=1)
            each = pool_saliency(means[index], sizes.ranked, groups=2)
            (want_one,), want_each = oracle.saliency(matrix, 1), oracle.saliency(matrix, 2)
            for rate in (0.03, 0.1, 0.2, 0.55, 1.0):
                for forced in ([], [0], [0, n - 1]):
                    pinned = torch.tensor(sorted(set(forced))) if forced else None
                    got = propagated_tokens(one, sizes, rate, pinned)
                    assert got.tolist() == oracle.keep(want_one, n, entered, rate, forced=forced)
                kept = retained_entries(each, sizes, rate)
                assert kept.tolist() == [oracle.keep(scores, n, entered, rate) for scores in want_each]


@given(data=st.data(), present=st.integers(1, 60), more=st.integers(0, 100), rate=st.integers(1, 100))
@settings(max_examples=200, deadline=None)
def test_ties_and_budgets_as_in_the_oracle(data, present, more, rate):
    """Scores on three exact levels: almost every border is a tie."""
    window = data.draw(st.integers(1, 12))
    sizes = Sizes(present + more, present, window)
    level = st.sampled_from([0.0, 0.25, 1.0])
    row = st.lists(level, min_size=sizes.ranked, max_size=sizes.ranked)
    scores = [data.draw(row), data.draw(row)]
    forced = sorted(data.draw(st.sets(st.integers(0, present - 1), max_size=3)))
    want = [oracle.keep(s, present, present + more, rate / 100, window) for s in scores]
    tensor = torch.tensor(scores).view(2, sizes.ranked)
    assert retained_entries(tensor, sizes, rate / 100).tolist() == want
    got = propagated_tokens(tensor[0], sizes, rate / 100, torch.tensor(forced, dtype=torch.int64))
    assert got.tolist() == oracle.keep(scores[0], present, present + more, rate / 100, window, forced)
    # What must be there, and no more than the budget unless that alone exceeds it.
    must = set(range(sizes.ranked, present)) | set(forced)
    assert must <= set(got.tolist())
    assert len(got) == max(min(oracle.budget(rate / 100, present + more), present), len(must))


@given(
    seed=st.integers(0, 10_000),
    present=st.integers(1, 200),
    rates=st.tuples(st.integers(1, 100), st.integers(1, 100)),
)
@settings(max_examples=60, deadline=None)
def test_a_higher_rate_keeps_all_that_a_lower_one_keeps(seed, present, rates):
    sizes = Sizes(present, present, WINDOW)
    scores = torch.rand(2, sizes.ranked, generator=torch.Generator().manual_seed(seed))
    low, high = (retained_entries(scores, sizes, rate / 100).tolist() for rate in sorted(rates))
    assert all(set(a) <= set(b) for a, b in zip(low, high, strict=True))


@pytest.mark.parametrize("name", RETENTION_POLICIES)
def test_every_policy_keeps_the_budget_and_the_window(name):
    policy = load_policy(name)
    assert FastKVConfig(retention_policy=name).retention_policy == name
    for entered, present in ((300, 300), (300, 90), (10, 10), (3, 3), (300, 2)):
        sizes = Sizes(entered, present, WINDOW)
        saliency = torch.rand(2, sizes.ranked) if policy.needs_saliency else None
        context = RetentionContext(torch.arange(sizes.ranked), 2, layer=1, seed=3, saliency=saliency)
        kept = retain(policy, context, sizes, 0.1)
        assert kept.shape == (2, min(present, max(entered // 10, WINDOW)))
        assert torch.equal(kept, kept.sort(-1).values) and all(
            len(set(row)) == len(row) for row in kept.tolist()
        )
        tail = torch.arange(sizes.ranked, present)
        assert torch.equal(kept[:, -len(tail) :], tail.expand(2, -1))
        assert torch.equal(kept, retain(policy, context, sizes, 0.1))  # pure


@given(
    present=st.integers(1, 60), more=st.integers(0, 60), window=st.integers(1, 12), rate=st.integers(1, 100)
)
def test_a_budget_is_what_stays(present, more, window, rate):
    sizes = Sizes(present + more, present, window)
    kept = oracle.keep([0.0] * sizes.ranked, present, present + more, rate / 100, window)
    assert (
        sizes.budget(rate / 100)
        == len(kept)
        == retained_entries(torch.zeros(2, sizes.ranked), sizes, rate / 100).shape[1]
    )


def test_forced_tokens_of_the_window_take_no_other_tokens_place():
    scores = torch.arange(12.0)
    free = propagated_tokens(scores, Sizes(20, 20, WINDOW), 0.5)
    assert free.tolist() == [10, 11, *range(12, 20)]
    for token in range(12, 20):
        assert torch.equal(propagated_tokens(scores, Sizes(20, 20, WINDOW), 0.5, torch.tensor([token])), free)
    both = propagated_tokens(scores, Sizes(20, 20, WINDOW), 0.5, torch.tensor([3, 12]))
    assert both.tolist() == [3, 11, *range(12, 20)]


@pytest.mark.parametrize("name", RETENTION_POLICIES)
def test_a_policy_asks_for_the_windows_attention_just_where_its_scores_depend_on_it(name):
    """The attention of every prompt's window costs time; a policy that does not look at it must not pay."""
    policy = load_policy(name)
    one, other = (policy.scores(context_of(30, saliency=torch.full((2, 30), level))) for level in (0.1, 0.9))
    assert policy.needs_saliency == (not torch.equal(one, other))


def context_of(ranked, **changes):
    values = {"kv_heads": 2, "layer": 0, "seed": 0} | changes
    return RetentionContext(torch.arange(ranked), **values)


def test_streaming_keeps_sinks_and_the_latest():
    kept = retain(load_policy("streaming"), context_of(92), Sizes(100, 100, WINDOW), 0.2)
    assert kept.tolist() == [[0, 1, 2, 3, *range(84, 100)]] * 2
    # No room for all four sinks: the first ones.
    assert (
        retain(load_policy("streaming"), context_of(92), Sizes(100, 100, WINDOW), 0.1).tolist()
        == [[0, 1, *range(92, 100)]] * 2
    )


def test_the_checklist_shows_a_policy_as_it_is():
    checklist = (ROOT / "docs" / "add-a-retention-policy.md").read_text()
    shown = re.search(r"```python\n(.*?)```", checklist, re.S).group(1)
    source = (ROOT / "runtime" / "fastkv" / "streaming.py").read_text().splitlines()
    lines = [line.removeprefix("   ") for line in shown.splitlines() if line.strip()]
    assert len(lines) > 8 and set(lines) <= set(source)


def test_random_depends_on_seed_layer_and_head_only():
    sizes, policy = Sizes(100, 100, WINDOW), load_policy("random")
    kept = retain(policy, context_of(92), sizes, 0.3)
    assert kept[0].tolist() != kept[1].tolist()
    assert not torch.equal(kept, retain(policy, context_of(92, seed=1), sizes, 0.3))
    assert not torch.equal(kept, retain(policy, context_of(92, layer=1), sizes, 0.3))
    drawn = {tuple(retain(policy, context_of(92, seed=seed, layer=index), sizes, 0.3)[0].tolist())
             for seed in range(5) for index in range(5)}  # fmt: skip
    assert len(drawn) == 25
    # Not tied to a part of the prompt: over many layers every token is kept about equally often.
    counts = torch.zeros(92)
    for index in range(300):
        chosen = retain(policy, context_of(92, layer=index), sizes, 0.3)[:, :-WINDOW]
        counts += torch.bincount(chosen.reshape(-1), minlength=92)
    share = counts / 600
    assert abs(float(share.mean()) - 22 / 92) < 1e-6 and float((share - 22 / 92).abs().max()) < 0.08


@pytest.mark.parametrize("seed", [-(2**63), -1, 2**62, 2**63 - 1])
def test_random_takes_any_seed_that_a_request_may_have(seed):
    assert load_policy("random").scores(context_of(5, seed=seed, layer=126)).shape == (2, 5)


def test_illegal_input_is_refused():
    for scores in (5, 13):
        with pytest.raises(ValueError, match="before the window"):
            retained_entries(torch.rand(2, scores), Sizes(20, 20, WINDOW), 0.5)
    for sizes in ((10, 11, WINDOW), (10, 0, WINDOW), (10, 10, 0)):
        with pytest.raises(ValueError, match="present"):
            Sizes(*sizes)
    with pytest.raises(ValueError, match="no retention policy"):
        load_policy("best")
    for values in (
        {"tsp_rate": 0},
        {"retention_rate": 1.1},
        {"tsp_layer": 0},
        {"pool": 2},
        {"pool": -1},
        {"window": 0},
        {"retention_policy": "x"},
    ):
        with pytest.raises(ValueError):
            FastKVConfig(**values)
