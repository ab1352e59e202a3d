"""Plans: boundaries, nesting, and which rows go on above a step."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fathom.runtime.plan import (
    PlanError,
    PrefillPlan,
    Retention,
    Step,
    build,
    choose_span,
    deep_tokens,
    default_span,
    fixed_rows,
    tokens_per_span,
)


@pytest.mark.parametrize(
    ("layers", "span"),
    [
        (32, 8),
        (16, 4),
        (8, 2),
        (4, 1),
        (28, 7),
        (36, 9),
        (24, 6),
        (40, 10),
        (80, 20),
        (22, 2),
        (26, 2),
        (30, 2),
        (2, 1),
        (1, 1),
    ],
)
def test_default_span_has_the_papers_cutoffs_on_boundaries(layers, span):
    assert default_span(layers) == span


def test_the_operators_span_must_divide_the_layers():
    assert choose_span(16, None) == 4
    assert choose_span(16, 8) == 8
    for asked in (3, 0, 32):
        with pytest.raises(
            PlanError, match=rf"--depth-span {asked} does not divide .* legal: 1, 2, 4, 8, 16$"
        ):
            choose_span(16, asked)


def test_a_policy_becomes_a_plan():
    assert build({}, 16, 4).dense
    assert build({"depth_cutoff": "full"}, 16, 4).shared_spans == 4
    assert build({"depth_cutoff": 16}, 16, 4).dense
    plan = build({"depth_cutoff": 12, "anchors": "none"}, 16, 4)
    assert plan.steps == (Step(12, "SPEED", anchor=False),)
    assert (plan.spans, plan.shared_spans, plan.step_of_span(2)) == (4, 3, None)
    assert plan.step_of_span(3) is plan.steps[0]
    assert not plan.anchored_above(0)
    assert build({"depth_cutoff": 12}, 16, 4).anchored_above(12)


def test_mechanisms_add_steps_in_the_order_of_layers():
    def scored(policy, layers):
        return Step(4, "FastKV", kind="scored", rate=policy["tsp_rate"], window=8)

    plan = build({"depth_cutoff": 12, "tsp_rate": 0.2}, 16, 4, [scored])
    assert [step.layer for step in plan.steps] == [4, 12]
    assert plan.shared_spans == 1
    assert plan.propagation is plan.steps[0]
    assert plan.step_of_span(2).mechanism == "FastKV"
    with pytest.raises(PlanError, match="at or below an earlier step"):
        build({"depth_cutoff": 4, "tsp_rate": 0.2}, 16, 4, [scored])


@pytest.mark.parametrize(("layer", "near"), [(13, "12, 16"), (3, "4"), (17, "16"), (-4, "")])
def test_a_step_off_the_boundaries_is_refused(layer, near):
    with pytest.raises(PlanError, match=f"nearest legal: {near}"):
        PrefillPlan(16, 4, (Step(layer, "SPEED"),))


@given(
    prompt=st.integers(1, 60),
    generated=st.integers(0, 20),
    cuts=st.lists(st.integers(1, 79), max_size=6),
    prefix=st.integers(0, 59),
    anchor=st.booleans(),
)
def test_chunks_add_up_to_the_same_rows(prompt, generated, cuts, prefix, anchor):
    """Whatever the chunks and the prefix hit: {0} and all positions from the last prompt token on, each once."""
    step = Step(2, "SPEED", anchor=anchor)
    total, start = prompt + generated, min(prefix, prompt - 1)
    edges = [start, *sorted({cut for cut in cuts if start < cut < total}), total]
    rows, counted = [], []
    for begin, end in itertools.pairwise(edges):
        with_anchor, first = fixed_rows(step, begin, end, prompt)
        chunk = [0] * with_anchor + list(range(first, end))
        counted.append(deep_tokens(step, end, prompt) - deep_tokens(step, begin, prompt))
        assert len(chunk) == counted[-1]
        rows += chunk
    expected = list(range(prompt - 1, total))
    assert rows == ([0] if anchor and prompt > 1 else []) + expected


def test_tokens_per_span():
    fastkv = Step(4, "FastKV", kind="scored", rate=0.2, window=8)
    chunks = Step(0, "SpecPrefill", kind="scored", rate=0.2, unit=32)
    speed = Step(12, "SPEED")
    assert tokens_per_span(PrefillPlan(16, 4, (speed,)), 1000) == [1000, 1000, 1000, 2]
    assert tokens_per_span(PrefillPlan(16, 4, (fastkv, speed)), 1001) == [1001, 201, 201, 2]
    assert tokens_per_span(PrefillPlan(16, 4, (fastkv,)), 9) == [9, 8, 8, 8]
    assert tokens_per_span(PrefillPlan(16, 4, (chunks, fastkv)), 1000) == [224, 45, 45, 45]
    assert tokens_per_span(PrefillPlan(16, 4, (speed,)), 1) == [1, 1, 1, 1]


RETAINED = Retention(0.1, 10, 8, 7, "saliency")
CHOSEN = Step(0, "SpecPrefill", "scored", anchor=False, kept=50)
PROPAGATED = Step(8, "FastKV", "scored", anchor=False, rate=0.2, window=8, kept=20)
SHALLOW = Step(12, "SPEED")


@pytest.mark.parametrize(
    ("steps", "retention", "spared"),
    [
        ((), None, 99),
        ((SHALLOW,), None, 99),
        ((CHOSEN, SHALLOW), None, 99),
        ((), RETAINED, 92),  # the window's queries judge the entries
        ((SHALLOW,), RETAINED, 92),
        ((CHOSEN, PROPAGATED), RETAINED, 99),  # the hit is the draft's alone; what was chosen is computed
        ((PROPAGATED,), None, 0),  # the cache has no hidden states
        ((PROPAGATED, SHALLOW), RETAINED, 0),
    ],
)
def test_a_hit_spares_what_nobody_needs_again(steps, retention, spared):
    plan = PrefillPlan(16, 4, steps, retention)
    assert plan.reusable_tokens(100) == spared
    assert plan.reusable_tokens(1) == 0
    assert plan.dense == (not steps and retention is None)
    assert plan.propagation is (PROPAGATED if PROPAGATED in steps else None)


def test_an_anchor_is_needed_from_its_step_down():
    plan = PrefillPlan(16, 4, (PROPAGATED, SHALLOW))
    assert [plan.anchored_above(layer) for layer in (1, 8, 12, 13)] == [True, True, True, False]
    assert not PrefillPlan(16, 4, (PROPAGATED, Step(12, "SPEED", anchor=False))).anchored_above(1)
