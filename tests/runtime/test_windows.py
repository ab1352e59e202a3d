"""What sliding windows leave to compute and to read, against counting."""

from dataclasses import replace

import pytest

from fathom.runtime import cost
from fathom.runtime.windows import pairs, windows_of

SHAPE = cost.ModelShape(4, 64, 128, 4, 2, 16, 100)


@pytest.mark.parametrize(("tokens", "whole"), [(1, 1), (9, 9), (9, 4), (30, 30), (30, 1), (30, 12)])
@pytest.mark.parametrize("sight", [1, 2, 9, 10, 29, 30, 50])
def test_pairs(sight, tokens, whole):
    assert pairs(sight, tokens, whole) == sum(min(n, sight) for n in range(tokens - whole + 1, tokens + 1))


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"model_type": "gemma3_text"}, (512, 512, 512, 512, 512, 0, 512)),
        ({"model_type": "gemma3_text", "sliding_window_pattern": 2}, (512, 0, 512, 0, 512, 0, 512)),
        ({"model_type": "cohere2"}, (512, 512, 512, 0, 512, 512, 512)),
        (
            {"model_type": "olmo3", "layer_types": ["sliding_attention"] + ["full_attention"] * 6},
            (512,) + (0,) * 6,
        ),
        ({"model_type": "olmo3", "sliding_window": None}, ()),
        ({"model_type": "mistral"}, ()),  # SGLang's has none
        ({}, ()),
    ],
)
def test_which_layers_have_one(changes, windows):
    assert windows_of({"num_hidden_layers": 7, "sliding_window": 512} | changes) == windows


@pytest.mark.parametrize(
    "changes", [{"sliding_window": 0}, {"sliding_window": "4"}, {"layer_types": ["a"] * 3}]
)
def test_windows_that_are_none(changes):
    config = {"num_hidden_layers": 7, "sliding_window": 512, "model_type": "olmo3"}
    with pytest.raises(ValueError, match=r"sliding_window must be|layer_types has 3 entries for 7 layers"):
        windows_of(config | changes)


def test_a_windows_layers_are_computed_and_read_within_it():
    windowed = replace(SHAPE, windows=(0, 8, 0, 8))
    dense = cost.make_plan(4, 100)
    # The first steps still see the prompt's end; a window behind them sees nothing of it.
    assert [dense.read(generated, windowed)[1] for generated in (1, 7, 8, 30)] == [8] * 4
    assert dense.read(30, windowed)[::2] == (130, 130)
    whole, part = (cost.prefill_flops(shape, dense) for shape in (SHAPE, windowed))
    spared = sum(max(n - 8, 0) for n in range(1, 101))
    assert whole - part == 2 * spared * 4 * SHAPE.heads * SHAPE.head_dim


def test_a_window_sees_its_share_of_what_was_kept():
    """Half of the prompt entered, spread evenly: half of a window's positions have entries. The last ones stay."""
    windowed = replace(SHAPE, windows=(0, 8, 8, 8))
    plan = cost.CostPlan(100, (50, 50, 50, 2), (50, 50, 3, 2), budget=10, packed=6, slow_share=0.5)
    assert plan.read(2, windowed) == (0.5 * 52 + 0.5 * 10, 2 + 3, 2 + 3, 2 + 0.02 * 6)
    assert plan.read(1, windowed)[1:3] == (1 + 3.5, 1 + 3)
    assert cost.packed_bytes(windowed, plan) == cost.packed_bytes(SHAPE, plan) / 4
    assert cost.kv_bytes(windowed, plan) == cost.kv_bytes(SHAPE, plan)
