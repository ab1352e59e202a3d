"""The committed grids: budgets that are equal where they are compared, names that are unique, legal policies."""

from itertools import groupby

import pytest

from fathom.benchmarks import fidelity_grids, plot_grids, settings
from fathom.benchmarks.fidelity_grids import GRIDS, SFI_CONTEXT, SINK
from fathom.benchmarks.fidelity_report import Row
from fathom.runtime import config


@pytest.mark.parametrize("name", GRIDS)
def test_policies_are_legal_on_the_demo_model_and_differ(name):
    points = GRIDS[name].points
    assert len({point.name for point in points} | {"exact"}) == len(points) + 1
    if {field for point in points for field in point.body} - set(config.SPECS):
        pytest.skip("asks for fields that this build does not have")
    limits = config.Limits(layers=8, span=2, tsp_layer=4)
    policies = [config.choose(point.body, limits=limits).policy for point in points]
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


def rows_of(name, tasks, contexts):
    cells = [(task, context) for task in tasks for context in contexts] + [("all", None)]
    policies = ["exact", *(point.name for point in GRIDS[name].points)]
    return [
        Row(task, context, policy, 4, 2, 0.5, 0.1, 0.9, *(1.0,) * 9)
        for task, context in cells
        for policy in policies
    ]


@pytest.mark.parametrize("name", ["sfi", "fastkv"])
def test_each_length_has_a_panel_of_its_own(name, tmp_path, monkeypatch):
    figures = []
    make = plot_grids._figure

    def kept(*sizes):
        figures.append(make(*sizes))
        return figures[-1]

    monkeypatch.setattr(plot_grids, "_figure", kept)
    for contexts, titles in [
        ((256, 512), ["list, 256 tokens", "list, 512 tokens", "all"]),
        ((256,), ["list"]),
    ]:
        plot_grids.plot(GRIDS[name], rows_of(name, ["list"], contexts), tmp_path / "x.png", "any")
        panels = [axis.get_title() for axis in figures[-1][1]]
        panels = panels[2::3] if name == "fastkv" else panels[:-1]
        assert panels == [f"{title} (n = 4)" for title in titles]
