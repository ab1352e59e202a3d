"""Top-K per row against the plain reference, with ties, infinities and budgets beyond what is there.

float32 takes the CPU kernel, float64 the plain path that a GPU takes.
"""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fathom.kernels.stable_top_k import stable_top_k, stable_top_k_reference


@given(
    data=st.data(),
    n=st.integers(0, 40),
    rows=st.integers(1, 4),
    width=st.integers(0, 45),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
@settings(max_examples=150, deadline=None)
def test_equals_reference(data, n, rows, width, dtype):
    # Few distinct values: ties are the rule.
    value = st.sampled_from([-float("inf"), -1.0, 0.0, -0.0, 0.5, 2.0])
    scores = torch.tensor(data.draw(st.lists(value, min_size=2 * rows * n, max_size=2 * rows * n)))
    scores = scores.to(dtype).view(rows, 2, n)
    flags = data.draw(st.lists(st.booleans(), min_size=rows * n, max_size=rows * n))
    valid = torch.tensor(flags, dtype=torch.bool).view(rows, 1, n)
    budget = torch.tensor(data.draw(st.lists(st.integers(0, width), min_size=rows, max_size=rows))).unsqueeze(
        -1
    )
    indices, counts = stable_top_k(scores, valid, budget, width)
    assert indices.shape == (rows, 2, width) and counts.shape == (rows, 2)
    want = stable_top_k_reference(scores, valid.expand(scores.shape), budget.expand(rows, 2))
    got = [row[:count].tolist() for row, count in zip(indices.flatten(0, 1), counts.flatten(), strict=True)]
    assert got == want
    padding = torch.arange(width) >= counts.unsqueeze(-1)
    assert (indices[padding] == -1).all()


@given(seed=st.integers(0, 10**6), n=st.integers(1, 5000), spread=st.sampled_from([1e-3, 1.0, 1e4]))
@settings(max_examples=40, deadline=None)
def test_many_scores_of_any_size(seed, n, spread):
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(2, n, generator=generator) * spread - spread
    valid = torch.rand(n, generator=generator) < 0.9
    k = int(torch.randint(1, n + 1, (1,), generator=generator))
    indices, counts = stable_top_k(scores, valid, torch.tensor(k), k)
    for row, got, count in zip(scores, indices, counts.tolist(), strict=True):
        order = torch.argsort(row, descending=True, stable=True)
        best = order[valid[order]][:k]
        assert count == len(best)
        assert got[:count].tolist() == best.sort().values.tolist() and (got[count:] == -1).all()


def test_one_flag_may_stand_for_all_candidates():
    scores = torch.tensor([[3.0, 1.0, 2.0], [0.0, 5.0, 4.0]])
    for dtype in (torch.float32, torch.float64):
        for flag in (torch.ones(1, dtype=torch.bool), torch.ones(2, 1, dtype=torch.bool)):
            indices, counts = stable_top_k(scores.to(dtype), flag, torch.tensor(2), 2)
            assert indices.tolist() == [[0, 2], [1, 2]] and counts.tolist() == [2, 2]
