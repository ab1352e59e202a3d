"""The comparison of single mechanisms with their combination, and the named measurements."""

import json
import math

import pytest

from fathom.benchmarks import args, cli, combined, studies
from fathom.server.page.picture import can_draw_png

A, B = {"depth_cutoff": 6}, {"tsp_rate": 0.2, "kv_retention_rate": 0.2}
BODIES = {"fathom": {}, "a": A, "b": B, "both": A | B, "more": A | B | {"speculative": True}}
TTFT = {"vllm": (9.0, 9.0), "fathom": (8.0, 16.0), "a": (4.0, 4.0), "b": (2.0, 2.0), "both": (1.0, 1.0)}
TTFT |= {"more": (1.0, 1.0)}


def known(**bodies):
    shares = {"share": 0.75, "low": 0.5, "high": 0.9}
    return {
        "cells": [["single", 1024]],
        "policies": {name: shares | {"body": body} for name, body in bodies.items()},
    }


def run_of(fidelity):
    turns = [
        {"variant": name, "round": i, "ttft": first, "tpot": 0.1, "e2e": first + 1}
        | {"requests": [{"fathom": {"kv_bytes": 100} if name != "vllm" else None}]}
        for name, times in TTFT.items()
        for i, first in enumerate(times)
    ]
    summary = {
        name: {metric: {"median": times[0]} for metric in combined.RATIOS} for name, times in TTFT.items()
    }
    variants = [{"name": "vllm", "body": {}, "identity": {"version": "1"}}]
    for name, body in BODIES.items():
        fathom = {"fathom": body} if body else {}
        variants.append({"name": name, "body": fathom, "identity": {"engine": []}})
    cell = {"prompt_tokens": 64, "batch": 1, "turns": turns, "summary": summary}
    head = {"command": "fathom bench --all", "date": "2026-01-01", "hardware": {"cpu": "x", "cores": 2}}
    details = {"model": "demo", "command": "fathom fidelity", "date": "2026-01-01", "git": None}
    return head | {"variants": variants, "cells": [cell], "fidelity": fidelity | details}


def test_ratios_are_within_rounds_and_products_are_of_the_parts():
    rows = {row.variant: row for row in combined.rows(run_of(known(exact={"preset": "exact"}, x=A | B)))}
    assert rows["fathom"].ratios == {}
    assert rows["a"].ratios["ttft"] == pytest.approx((8 / 4 + 16 / 4) / 2)
    assert rows["vllm"].ratios["ttft"] == pytest.approx((8 / 9 + 16 / 9) / 2)
    assert rows["both"].parts == ("a", "b") and rows["a"].parts == rows["more"].parts == ()
    assert rows["both"].product["ttft"] == pytest.approx(3 * 6)
    assert math.isclose(rows["both"].ratios["ttft"], 12)
    assert rows["vllm"].kv_bytes is None and rows["b"].kv_bytes == 100


def test_fidelity_stands_beside_exactly_the_same_policy():
    result = run_of(known(exact={"preset": "exact"}, x=A | B, y={"depth_cutoff": 4}))
    exact = {row.variant: row.exact for row in combined.rows(result)}
    assert exact == {"vllm": None, "fathom": 0.75, "a": None, "b": None, "both": 0.75, "more": None}


def test_the_page_and_the_picture_show_every_policy(tmp_path):
    result = run_of(known(exact={"preset": "exact"}, x=A | B))
    rows = combined.rows(result)
    page = combined.page(result, rows)
    assert "| 64 | both | 1.00 | 1000.0 | 1.00 | 0.0 | 12.00 (18.00) |" in page
    assert "75.0 [50, 90]" in page and json.dumps(A | B) in page
    if can_draw_png():
        paths = combined.plot(rows, tmp_path / "x.png")
        assert paths[0].read_bytes().startswith(b"\x89PNG")


def test_dense_may_be_asked_for_by_name():
    result = run_of(known(exact={"preset": "exact"}))
    result["variants"][1]["body"] = {"fathom": {"preset": "exact"}}
    rows = {row.variant: row for row in combined.rows(result)}
    assert rows["fathom"].ratios == {} and rows["fathom"].exact == 0.75
    assert rows["a"].ratios["ttft"] == pytest.approx((8 / 4 + 16 / 4) / 2)


def test_a_run_without_dense_fathom_compares_nothing():
    result = run_of(known())
    result["variants"] = result["variants"][:1]
    with pytest.raises(ValueError, match="no dense Fathom"):
        combined.rows(result)


FILE = {"date": "2026-01-01", "command": "fathom fidelity", "model": "demo", "git": None}
FILE |= {"policies": {"exact": {"preset": "exact"}}}
FILE |= {"rows": [{"policy": "exact", "task": task, "context": 64} for task in ("single", "list", "all")]}


def test_a_file_of_fidelity_is_read_whole_before_anything_is_measured(tmp_path, capsys):
    path = tmp_path / "f.json"
    path.write_text(json.dumps(FILE))
    assert combined.fidelity_of(str(path), tmp_path)["cells"] == [["single", 64], ["list", 64]]
    path.write_text(json.dumps({key: value for key, value in FILE.items() if key != "date"}))
    assert cli.main(["--fidelity", str(path)]) == 2
    assert f"{path} is no file of fathom fidelity: KeyError 'date'" in capsys.readouterr().err


def test_fidelity_needs_a_dense_fathom_to_compare_with(tmp_path, capsys):
    for flags in (["--variants", "sglang"], ["--variants", "sglang", "--policy", 'x={"depth_cutoff": 8}']):
        assert cli.main([*flags, "--fidelity", "run", "--cache", str(tmp_path)]) == 2
        assert "--fidelity compares with dense Fathom; add fathom" in capsys.readouterr().err


def test_the_name_of_the_file_is_one():
    result = run_of(known()) | {"date": "2026-01-02T03:04:05+00:00"}
    name = cli.default_out(result, None).name
    assert name == "2026-01-02-0304-vllm-fathom-a-b-both-more.json"
    assert cli.default_out(result, "a/../b c").name == "2026-01-02-0304-a_.._b_c.json"
    assert len(cli.default_out(result, "long" * 99).name) < 120


@pytest.mark.parametrize("name", studies.STUDIES)
def test_each_study_is_a_legal_command(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # from anywhere
    found = args.parser().parse_args(studies.expand(["--study", name, "--rounds", "7"]))
    assert found.rounds == 7 and found.variants == "fathom" and found.policy
    shape, cells, settings = args.plan(found)
    assert settings.rounds == 7 and cells
    assert shape.layers == 8  # as the demo target: one set of policies fits both


def test_all_is_a_study():
    for words in (["--all"], ["--study", "all"], ["--study=all"]):
        assert studies.expand([*words, "--seed", "1"]) == [*studies.STUDIES["all"], "--seed", "1"]
    with pytest.raises(SystemExit):
        args.parser().parse_args(studies.expand(["--stud", "all"]))  # which nothing would heed
    with pytest.raises(ValueError, match="unknown study ''"):
        studies.expand(["--study"])
