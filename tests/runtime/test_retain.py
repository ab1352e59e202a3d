"""The shared selection step: exact counts, ties to the lower index, forced entries inside the budget."""

import math
import random
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fathom.runtime.retain import kept_count, top_indices

# Few different values, so that most rows have ties at the border.
VALUES = (0.0, 0.25, 0.5, 1.0, -1.0, float("inf"), float("-inf"), float("nan"))


@given(rate=st.integers(1, 1000), total=st.integers(0, 200_000))
@settings(max_examples=200, deadline=None)
def test_kept_count_rounds_up_the_written_decimal(rate, total):
    assert kept_count(rate / 1000, total) == math.ceil(Fraction(rate, 1000) * total)


def test_kept_count_is_not_fooled_by_binary_fractions():
    assert math.ceil(0.07 * 100) == 8 and kept_count(0.07, 100) == 7
    assert kept_count(1, 5) == 5 and kept_count(1e-9, 5) == 1 and kept_count(0.1, 0) == 0
    for illegal in (0, -0.1, 1.01, float("nan")):
        with pytest.raises(ValueError, match="rate"):
            kept_count(illegal, 5)


@given(n=st.integers(1, 40), seed=st.integers(0, 1 << 30))
@settings(max_examples=300, deadline=None)
def test_top_indices_sort_as_python_does(n, seed):
    draw = random.Random(seed)  # Hypothesis hardly ever found a count between none and all
    scores, count = draw.choices(VALUES, k=n), draw.randint(-2, n + 2)
    forced = set(draw.sample(range(n), min(draw.randint(0, 5), n)))

    def rank(i):
        score = -math.inf if math.isnan(scores[i]) else max(scores[i], -3e38)
        return (i not in forced, -score, i)

    want = sorted(sorted(range(n), key=rank)[: max(count, len(forced), 0)])
    tensor = torch.tensor([scores, scores[::-1]])
    pinned = torch.tensor(sorted(forced), dtype=torch.int64) if forced else None
    got = top_indices(tensor, count, pinned)
    assert got.shape == (2, len(want)) and got.dtype == torch.int64
    assert got[0].tolist() == want
    assert top_indices(tensor[0], count, pinned).tolist() == want


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_any_float_type_and_no_change_of_the_scores(dtype):
    scores = torch.tensor([[1.0, float("inf"), 2.0, float("nan")]], dtype=dtype)
    before = scores.clone()
    assert top_indices(scores, 2, torch.tensor([0])).tolist() == [[0, 1]]
    assert torch.equal(scores.nan_to_num(5), before.nan_to_num(5))


def test_more_leading_dimensions():
    scores = torch.rand(3, 4, 30, generator=torch.Generator().manual_seed(0))
    got = top_indices(scores, 7)
    want = scores.topk(7).indices.sort(-1).values
    assert torch.equal(got, want)
    assert top_indices(scores, 0).shape == (3, 4, 0) and top_indices(scores, 30).shape == (3, 4, 30)
    assert top_indices(scores[..., :0], 5).shape == (3, 4, 0)
