"""Top-K per row against the plain reference, with ties, infinities and budgets beyond what is there.

The CPU kernel here; Triton's is run by ``interpret_sfi.py``.
"""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fathom.kernels import refresh_cpu
from fathom.kernels.stable_top_k import stable_top_k, stable_top_k_reference


@given(data=st.data(), n=st.integers(0, 40), rows=st.integers(1, 4), width=st.integers(0, 45))
@settings(max_examples=150, deadline=None)
def test_equals_reference(data, n, rows, width):
    # Few distinct values: ties are the rule.
    value = st.sampled_from([-float("inf"), -1.0, 0.0, -0.0, 0.5, 2.0])
    scores = torch.tensor(data.draw(st.lists(value, min_size=2 * rows * n, max_size=2 * rows * n)))
    scores = scores.view(rows, 2, n)
    places = [sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for _ in range(rows)]
    begin, end = torch.tensor(places).T.unsqueeze(-1)
    outside = (torch.arange(n) < begin) | (torch.arange(n) >= end)
    scores.masked_fill_(outside.unsqueeze(1), float("nan"))  # not looked at
    budget = torch.tensor(data.draw(st.lists(st.integers(0, width), min_size=rows, max_size=rows))).unsqueeze(
        -1
    )
    indices, counts = stable_top_k(scores, begin, end, budget, width)
    assert indices.shape == (rows, 2, width) and counts.shape == (rows, 2)
    want = stable_top_k_reference(scores, begin, end, budget)
    got = [row[:count].tolist() for row, count in zip(indices.flatten(0, 1), counts.flatten(), strict=True)]
    assert got == want
    padding = torch.arange(width) >= counts.unsqueeze(-1)
    assert (indices[padding] == -1).all()


@given(seed=st.integers(0, 10**6), n=st.integers(1, 5000), spread=st.sampled_from([1e-3, 1.0, 1e4]))
@settings(max_examples=40, deadline=None)
def test_many_scores_of_any_size(seed, n, spread):
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(2, n, generator=generator) * spread - spread
    low, high = sorted(torch.randint(0, n + 1, (2,), generator=generator).tolist())
    k = int(torch.randint(1, n + 1, (1,), generator=generator))
    indices, counts = stable_top_k(scores, *torch.tensor([low, high, k]), k)
    for row, got, count in zip(scores, indices, counts.tolist(), strict=True):
        best = low + torch.argsort(row[low:high], descending=True, stable=True)[:k]
        assert count == len(best)
        assert got[:count].tolist() == best.sort().values.tolist() and (got[count:] == -1).all()


near_multiples = st.builds(lambda m, d: m * 2**20 + d, st.integers(1, 8), st.integers(-3, 3))


@given(bits=st.lists(near_multiples, min_size=1, max_size=60), data=st.data())
@settings(max_examples=150, deadline=None)
def test_scores_that_differ_in_their_last_bits(bits, data):
    scores = torch.tensor([*bits, 0x7F000000], dtype=torch.int32).view(1, -1).view(torch.float32)
    k = data.draw(st.integers(1, len(bits)))
    indices, _ = stable_top_k(scores, *torch.tensor([0, scores.shape[1], k]), k)
    best = torch.argsort(scores[0], descending=True, stable=True)[:k]
    assert indices[0].tolist() == best.sort().values.tolist()


def test_one_range_may_stand_for_all_rows():
    scores = torch.tensor([[3.0, 1.0, 2.0], [0.0, 5.0, 4.0]])
    none, two, three = torch.tensor([0, 2, 3])
    indices, counts = stable_top_k(scores, none, three, two, 2)
    assert indices.tolist() == [[0, 2], [1, 2]] and counts.tolist() == [2, 2]


def test_the_cpu_kernel_is_compiled_once_for_ranges_of_all_rows_or_of_each():
    """A request would wait for another one, seconds."""
    scores, numbers = torch.rand(3, 8), torch.tensor([0, 8, 4])
    stable_top_k(scores, *numbers, 4)
    stable_top_k(scores, *(numbers.view(3, 1).expand(3, 3).contiguous()), 4)
    stable_top_k(scores[:1], *numbers, 4)
    assert len(refresh_cpu._top_k.signatures) == 1
