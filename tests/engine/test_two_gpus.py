"""A model in float16 on two GPUs in name only, half of its heads on each: they choose the same tokens.

In float16 SGLang's layers for CUDA serve, which take no float32. Their compiled kernels are PyTorch here
(``nominal_machine.py``); how SGLang calls them is its own. Gloo takes NCCL's place, in captured steps too.
"""

import interpreted
import pytest
from interpreted import MECHANISMS, NEW_TOKENS, Oracle, ask_all, prompt_of

TOLERANCE = 0.06
"""Of a log-probability: eleven bits through four layers."""


@pytest.fixture(scope="module")
def server(start_nominal, tiny_model, close_draft):
    flags = "--dtype", "float16", "--cuda-graph-bs-decode", "4", "--tp-size", "2", "--sfi-evidence-mib", "8"
    together = "--num-continuous-decode-steps", "3"  # of requests without log-probabilities
    return start_nominal(tiny_model, close_draft, *interpreted.FLAGS, *flags, *together)


@pytest.fixture(scope="module")
def answers(server):
    return ask_all(server, list(MECHANISMS))


def test_answers_are_the_oracles_but_for_rounding(server, answers, tiny_model, close_draft, triggers):
    expected = Oracle(tiny_model, close_draft, triggers, devices=2)
    reports = {name: expected.check(name, answer, tolerance=TOLERANCE) for name, answer in answers.items()}
    whole = reports["dense"]["kept_tokens"]
    assert all(reports[name]["kept_tokens"] < whole for name in ("SPEED", "SpecPrefill", "FastKV"))
    assert reports["SFI"]["fast_steps"] and reports["drafting"]["draft_tokens"]
    engine = server.engine()
    assert engine["lacking"] == {} and engine["replayed_steps"]["dense"]
    assert engine["open_accounts"] == engine["kv_pool"]["depth_pages"]["held"] == 0


def test_steps_follow_each_other_on_both(server, answers):
    before = server.engine()["moved_steps"]
    sampling = {"max_new_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True}
    for name in ("dense", "SFI"):
        body = {"input_ids": prompt_of(name), "sampling_params": sampling, "fathom": MECHANISMS[name]}
        answer = server.client.post("/generate", json=body).json()
        assert answer["output_ids"] == answers[name]["output_ids"]
    assert server.engine()["moved_steps"] - before >= 3
