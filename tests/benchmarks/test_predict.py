"""Predictions beside measurements: which pairs get them, what they are made of, and where there are none."""

import json
from dataclasses import replace

import pytest

from fathom.benchmarks import predict
from fathom.benchmarks.client import Reply
from fathom.benchmarks.measure import Turn
from fathom.benchmarks.model import BENCH, config_json
from fathom.benchmarks.prompts import Cell, Settings
from fathom.benchmarks.usage import Usage
from fathom.benchmarks.variants import FATHOM, SGLANG, VLLM, with_body, with_flags
from fathom.runtime import config, cost, presets
from fathom.runtime.cost import FastKV, SlowFast, SpecPrefill, Speed, make_plan

CELL, SETTINGS = Cell(prompt=8192, batch=4), Settings(output=32)
MODEL = cost.ModelShape.from_config(config_json(BENCH))


@pytest.fixture(autouse=True)
def every_mechanism_is_built(monkeypatch):
    known = {spec.mechanism for spec in config.SPECS.values() if spec.mechanism}
    monkeypatch.setattr(config, "MECHANISMS", frozenset(known))


def turn(name, held=50, dense=100, slow=1, fast=3, **more):
    fathom = {"kv_bytes": held, "kv_bytes_dense": dense, "slow_steps": slow, "fast_steps": fast}
    fathom |= {"fast_seconds": fast / 4, "decode_seconds": fast / 4 + slow / 2, **more}
    reply = Reply(CELL.prompt, 32, ttft=1.0, latency=2.0, events=32, text="", fathom=fathom)
    return Turn(name, 0, [reply], Usage(*[0] * len(Usage.__dataclass_fields__)))


def expected(policy, settings=SETTINGS, flags=()):
    variant = with_flags(with_body("x", policy), list(flags))
    turns = [turn("fathom", held=100, slow=9), turn("x"), turn("x")]
    found = predict.predictions([SGLANG, FATHOM, variant], BENCH, CELL, settings, turns)
    assert list(found) == ["fathom/x"]
    return found["fathom/x"]


def of_plan(**mechanisms):
    return cost.predict(MODEL, make_plan(16, CELL.prompt, **mechanisms), 32, CELL.batch)


@pytest.mark.parametrize(
    ("policy", "mechanisms"),
    [
        ({"depth_cutoff": 12}, {"speed": Speed(12)}),
        ({"tsp_rate": 0.2, "kv_retention_rate": 0.1}, {"fastkv": FastKV(8, 0.2, 0.1)}),
        # The answers counted one slow step for three fast ones.
        ({"decode": "slow_fast"}, {"slow_fast": SlowFast(slow_share=0.25)}),
        ({"depth_cutoff": 8, "decode": "slow_fast"}, {"speed": Speed(8), "slow_fast": SlowFast(0.25)}),
    ],
)
def test_predictions_are_the_cost_models(policy, mechanisms):
    want = of_plan(**mechanisms)
    counted = {"kv_reported": 2, "slow_share": 0.25, "scoring": None, "accepted": None}
    counted |= {"fast_seconds": 0.25, "slow_seconds": 0.5}
    ratios = {"ttft": want.ttft, "tpot": want.tpot, "tpot_kv": want.tpot_kv, "kv": want.kv}
    assert expected(policy) == ratios | counted | {"appendix_e": None}
    assert want.tpot < want.tpot_kv


def test_the_draft_is_counted_where_its_shape_is_known(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config_json(replace(BENCH, layers=2))))
    policy = {"prefill_keep_rate": 0.2}
    without = expected(policy)
    assert without["ttft"] is None and without["kv"] > 4
    draft = replace(MODEL, layers=2)
    found = expected(policy, flags=["--draft-model-path", str(tmp_path)])
    assert found["ttft"] == of_plan(specprefill=SpecPrefill(0.2, draft)).ttft
    assert expected(policy, flags=[f"--draft-model-path={tmp_path}"]) == found


def test_what_the_model_cannot_know_is_left_open():
    assert expected({"depth_cutoff": 12}, replace(SETTINGS, shared_prefix=0.5))["ttft"] is None
    drafting = expected({"speculative": True, "depth_cutoff": 12})
    assert drafting["tpot"] is drafting["tpot_kv"] is None and drafting["ttft"] > 1
    automatic = expected({"prefill_keep_rate": "auto"})
    assert (automatic.pop("kv_reported"), automatic.pop("slow_share")) == (2, 0.25)
    assert (automatic.pop("fast_seconds"), automatic.pop("slow_seconds")) == (0.25, 0.5)
    assert set(automatic.values()) == {None}
    trained = expected({"depth_cutoff": 12}, replace(SETTINGS, task="list"))
    assert trained["ttft"] is trained["tpot"] is None


LLAMA_8B = cost.ModelShape(32, 4096, 14336, 32, 8, 128, 128256)
LLAMA_70B = cost.ModelShape(80, 8192, 28672, 64, 8, 128, 128256)


def test_appendix_e_is_the_papers_formula(tmp_path):
    def table_5(m, s):
        share = m.kv_heads / m.heads
        each = m.layers * s * m.hidden
        return each * (3 * m.intermediate + m.hidden * (2 + 2 * share) + 2 * s) + s * m.hidden * m.vocab

    s = 31 * 1024
    base, spec = table_5(LLAMA_70B, s), table_5(LLAMA_8B, s)
    assert predict.appendix_e(LLAMA_70B, LLAMA_8B, 0.1, s) == pytest.approx(base / (spec + 0.1 * base))
    shares = predict.draft_shares(LLAMA_70B, LLAMA_8B, s)
    assert round(100 / shares["table_5"], 2) == 14.24  # Table 6
    assert shares["computed"] > shares["table_5"]
    (tmp_path / "config.json").write_text(json.dumps(config_json(replace(BENCH, layers=2))))
    flags = ["--draft-model-path", str(tmp_path)]
    found = expected({"prefill_keep_rate": 0.2}, flags=flags)["appendix_e"]
    assert found == predict.appendix_e(MODEL, replace(MODEL, layers=2), 0.2, CELL.prompt)


def test_appendix_e_says_nothing_of_a_prompt_that_is_computed_whole(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config_json(replace(BENCH, layers=2))))
    flags = ["--draft-model-path", str(tmp_path)]
    for drafting in ({}, {"speculative": True}):
        policy = {"prefill_keep_rate": 0.2, "min_prompt_tokens": CELL.prompt + 1, "kv_retention_rate": 0.2}
        assert expected(policy | drafting, flags=flags)["appendix_e"] is None
        policy["min_prompt_tokens"] = CELL.prompt
        assert expected(policy | drafting, flags=flags)["appendix_e"] > 1


def test_scoring_is_a_share_of_the_time_to_first_token():
    found = predict.predictions(
        [FATHOM, with_body("x", {"tsp_rate": 0.2})],
        BENCH,
        CELL,
        SETTINGS,
        [turn("x", scoring_seconds=0.02)] * 2,
    )
    assert found["fathom/x"]["scoring"] == pytest.approx(0.02)  # of turns whose first token came after 1 s


def test_only_policies_against_a_dense_fathom_before_them():
    half = with_body("half", {"depth_cutoff": 8})
    also_dense = with_body("exact", {"preset": "exact"})

    def pairs(*variants):
        return list(predict.predictions(list(variants), BENCH, CELL, SETTINGS, [turn("half")]))

    assert pairs(SGLANG, VLLM, FATHOM) == []
    assert pairs(SGLANG, half) == []
    assert pairs(half, FATHOM) == []
    assert pairs(FATHOM, also_dense, half) == ["fathom/half", "exact/half"]


def test_a_policy_that_no_server_would_take_is_refused(monkeypatch):
    with pytest.raises(config.PolicyError, match=r"a multiple of 4 in \[4, 16\]"):
        predict.check([FATHOM, with_body("deep", {"depth_cutoff": 17})], BENCH)
    monkeypatch.setattr(config, "MECHANISMS", frozenset())
    with pytest.raises(config.PolicyError, match="not available in this build"):
        predict.check([with_body("half", {"depth_cutoff": 8})], BENCH)


def test_a_preset_is_predicted_by_what_it_comes_to(monkeypatch):
    values = {"depth_cutoff": 0.75, "tsp_rate": 0.5, "kv_retention_rate": 0.5}
    monkeypatch.setitem(presets.PRESETS, "balanced", values)
    found = expected({"preset": "balanced"})
    want = of_plan(fastkv=FastKV(8, 0.5, 0.5), speed=Speed(12))
    assert (found["ttft"], found["tpot"], found["kv"]) == (want.ttft, want.tpot, want.kv)


def test_a_preset_may_need_a_draft():
    assert with_body("x", {"preset": "turbo"}).drafted
    assert not with_body("x", {"preset": "exact"}).drafted
    assert not with_body("x", {"preset": "turbo", "prefill_keep_rate": 1.0, "speculative": False}).drafted


def test_predictions_are_of_the_policy_that_the_server_ran_under():
    """A preset's numbers, and what the operator tuned, are the server's to say."""
    asked = with_body("x", {"preset": "balanced"})
    served = {**vars(config.Policy()), "preset": "balanced", "depth_cutoff": 4, "kv_retention_rate": 0.5}
    turns = [turn("x", policy=served)]
    found = predict.predictions([FATHOM, asked], BENCH, CELL, SETTINGS, turns)["fathom/x"]
    want = of_plan(speed=Speed(4), fastkv=FastKV(8, 1.0, 0.5))
    assert (found["ttft"], found["tpot"], found["kv"]) == (want.ttft, want.tpot, want.kv)


def test_sizes_are_those_that_the_server_was_started_with():
    flags = ["--sfi-sink", "8", "--sfi-recent", "64", "--sfi-selected", "500"]
    found = expected({"decode": "slow_fast"}, flags=flags)
    assert found["tpot"] == of_plan(slow_fast=SlowFast(0.25, 8, 64, 500)).tpot
    found = expected({"tsp_rate": 0.2, "kv_retention_rate": 0.1}, flags=["--tsp-layer", "4"])
    assert found["ttft"] == of_plan(fastkv=FastKV(4, 0.2, 0.1)).ttft
    with pytest.raises(config.PolicyError, match="multiple of 8"):
        predict.check([with_flags(with_body("half", {"depth_cutoff": 4}), ["--depth-span", "8"])], BENCH)
