"""The recommended selection layer: Eq. 3 on hand-made hidden states, and its limits."""

import pytest
import torch

from fathom.runtime.fastkv.calibrate import hidden_distance, recommend_layer


def test_distance_is_the_mean_of_relative_squared_errors():
    full = torch.tensor([[3.0, 4.0], [0.0, 2.0]])
    selected = torch.tensor([[3.0, 1.0], [1.0, 2.0]])
    assert hidden_distance(full, selected) == pytest.approx((9 / 25 + 1 / 4) / 2)
    assert hidden_distance(full, full) == 0
    assert hidden_distance(full * 7, selected * 7) == pytest.approx(hidden_distance(full, selected))


def test_recommends_the_closest_layer_that_is_allowed():
    distances = {4: 0.9, 8: 0.30, 12: 0.21, 16: 0.2, 20: 0.2, 24: 0.01}
    assert recommend_layer(distances, 20) == 16  # ties to the earlier layer
    assert recommend_layer(distances, 24) == 24
    assert recommend_layer(distances, 20, tolerance=0.011) == 12
    assert recommend_layer(distances, 4) == 4
    assert recommend_layer({4: 0.5, 8: 0.25}, 8, tolerance=0.25) == 4  # just within it
    assert recommend_layer({4: 0.5, 8: float("nan")}, 7) == 4  # not a candidate


def test_illegal_input_is_refused():
    ones = torch.ones(2, 3)
    one_zero, one_nan = (torch.tensor([[1.0, 1.0, 1.0], [value] * 3]) for value in (0.0, float("nan")))
    shapes = ((ones, ones[:1]), (ones[0], ones[0]), (ones[:0], ones[:0]))
    for full, selected in (*shapes, (ones * 0, ones), (one_zero, ones), (one_nan, ones)):
        with pytest.raises(ValueError):
            hidden_distance(full, selected)
    with pytest.raises(ValueError, match="no usable candidate"):
        recommend_layer({8: 0.1}, 7)
    with pytest.raises(ValueError, match="no usable candidate"):
        recommend_layer({8: float("nan"), 4: 0.1}, 8)
