"""Where FastKV narrows a plan, and how many tokens and entries that leaves."""

import itertools

import pytest
import torch

from fathom.runtime.fastkv.select import Sizes, propagated_tokens
from fathom.runtime.fastkv.step import config_of, propagated_count, propagation_step, retention
from fathom.runtime.plan import PlanError, PrefillPlan, Step, choose_tsp_layer

POLICY = {"tsp_rate": 0.2, "kv_retention_rate": 0.1, "retention_policy": "saliency"}


@pytest.mark.parametrize(
    ("layers", "span", "layer"), [(32, 8, 16), (36, 9, 18), (16, 4, 8), (10, 4, 4), (4, 1, 2), (4, 4, None)]
)
def test_the_default_layer_is_nearest_to_the_papers(layers, span, layer):
    assert choose_tsp_layer(layers, span, None) == layer


@pytest.mark.parametrize("layers", [32, 36])
def test_the_default_layer_computes_what_the_paper_says(layers):
    """60 % of the prefill of Llama-3.1-8B and of Ministral-8B, at a rate of 20 % (section 5.1)."""
    layer = choose_tsp_layer(layers, 1, None)
    assert layer + 0.2 * (layers - layer) == pytest.approx(0.6 * layers)


@pytest.mark.parametrize(("asked", "near"), [(0, "4, 8"), (6, "4, 8"), (16, "8, 12"), (40, "8, 12")])
def test_another_layer_must_be_a_boundary(asked, near):
    assert choose_tsp_layer(16, 4, 12) == 12
    with pytest.raises(PlanError, match=f"--tsp-layer {asked} .*; nearest: {near}$"):
        choose_tsp_layer(16, 4, asked)


def test_counts_of_a_plan():
    """500 tokens, T = 8 of 16, SPEED at 12: 500, 500, 100 and 2 tokens; 50, 50, 50 and 2 entries."""
    config = config_of(POLICY, 8)
    plan = PrefillPlan(
        16, 4, (propagation_step(config, 500, True), Step(12, "SPEED")), retention(config, 500)
    )
    assert [plan.present_tokens(span, 500) for span in range(4)] == [500, 500, 100, 2]
    assert [plan.retained_tokens(span, 500) for span in range(4)] == [50, 50, 50, 2]
    assert plan.compacted_spans(500) == range(3)
    assert plan.shared_spans == 2 and plan.reusable_tokens(500) == 0 and plan.window == 8


def test_what_drops_nothing_is_no_step():
    config = config_of(POLICY, 8)
    for few in (0, 8):
        assert propagation_step(config, few, False) is None and retention(config, few) is None
    assert propagation_step(config, 9, True) is None and propagation_step(config, 9, False).kept == 8
    neutral = config_of(POLICY | {"tsp_rate": 1.0, "kv_retention_rate": 1.0}, 8)
    assert propagation_step(neutral, 500, False) is None and retention(neutral, 500) is None
    assert config_of({}, 8).tsp_rate == 1.0
    alone = PrefillPlan(16, 4, (), retention(config, 500))
    assert not alone.dense and alone.reusable_tokens(500) == 492 and alone.shared_spans == 4


def test_the_number_of_propagated_tokens_is_known_before_the_scores():
    for entered, rate, anchored in itertools.product((1, 7, 8, 9, 10, 40, 41, 500), (0.02, 0.2, 0.9), (0, 1)):
        sizes = Sizes(entered, entered, 8)
        forced = torch.zeros(1, dtype=torch.int64) if anchored else None
        kept = propagated_tokens(torch.rand(sizes.ranked), sizes, rate, forced)
        assert propagated_count(rate, 8, entered, bool(anchored)) == len(kept)
