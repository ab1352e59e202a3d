"""The committed grids: budgets that are equal where they are compared, names that are unique, legal policies."""

from itertools import groupby

import pytest

from fathom.benchmarks import fidelity_grids, settings
from fathom.benchmarks.fidelity_grids import GRIDS, SFI_CONTEXT, SINK
from fathom.runtime import config


@pytest.mark.parametrize("name", GRIDS)
def test_policies_are_legal_on_the_demo_model_and_differ(name):
    points = GRIDS[name].points
    assert len({point.name for point in points} | {"exact"}) == len(points) + 1
    if {field for point in points for field in point.body} - set(config.SPECS):
        pytest.skip("asks for fields that this build does not have")
    limits = config.Limits(layers=8, span=2, tsp_layer=4)
    policies = [config.parse(point.body, config.Policy(), limits) for point in points]
    asked = {(policy, point.flags) for policy, point in zip(policies, points, strict=True)}
    assert len(asked | {(config.Policy(), ())}) == len(points) + 1


def test_controls_have_the_budget_of_what_they_control():
    rates = {}
    for point in GRIDS["specprefill"].points:
        assert point.body["prefill_keep_rate"] == point.x
        rates.setdefault(point.family, []).append(point.x)
    assert rates["SpecPrefill"] == rates["random chunks"]
    for point in GRIDS["fastkv"].points:
        if point.y is None:
            assert point.body["kv_retention_rate"] == point.x and "tsp_rate" not in point.body
        elif not point.flags:
            assert (point.body["kv_retention_rate"], point.body["tsp_rate"]) == (point.x, point.y)
            assert point.x <= point.y  # Table 9: what is kept was propagated


def test_fast_steps_of_one_budget_read_as_much_whoever_chooses():
    by_budget = sorted(GRIDS["sfi"].points, key=lambda point: point.x)
    for budget, points in groupby(by_budget, key=lambda point: point.x):
        read = [SINK + p.body["sfi_window"] + p.body.get("sfi_budget", 0) for p in points]
        assert read == [round(budget * SFI_CONTEXT)] * len(fidelity_grids.SFI_RULES)


def test_combinations_are_made_of_the_single_settings():
    for body in settings.COMBINED.values():
        parts = [part for part in settings.SINGLES.values() if part.items() <= body.items()]
        assert {name for part in parts for name in part} == set(body) and len(parts) >= 4
