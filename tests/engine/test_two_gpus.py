"""A model in float16 on two GPUs in name only, half of its heads on each: they choose the same tokens.

In float16 SGLang's layers for CUDA serve, which take no float32. Their compiled kernels are PyTorch here
(``nominal_machine.py``); how SGLang calls them is its own. Gloo takes NCCL's place, in captured steps too.
"""

import interpreted
import pytest
from interpreted import MECHANISMS, Oracle, ask_all

TOLERANCE = 0.06
"""Of a log-probability: eleven bits through four layers."""


@pytest.fixture(scope="module")
def server(start_nominal, tiny_model, close_draft):
    flags = "--dtype", "float16", "--cuda-graph-bs-decode", "4", "--tp-size", "2", "--sfi-evidence-mib", "8"
    return start_nominal(tiny_model, close_draft, *interpreted.FLAGS, *flags)


def test_answers_are_the_oracles_but_for_rounding(server, tiny_model, close_draft, triggers):
    expected = Oracle(tiny_model, close_draft, triggers, devices=2)
    answers = ask_all(server, list(MECHANISMS))
    reports = {name: expected.check(name, answer, tolerance=TOLERANCE) for name, answer in answers.items()}
    whole = reports["dense"]["kept_tokens"]
    assert all(reports[name]["kept_tokens"] < whole for name in ("SPEED", "SpecPrefill", "FastKV"))
    assert reports["SFI"]["fast_steps"] and reports["drafting"]["draft_tokens"]
    engine = server.engine()
    assert engine["lacking"] == {} and engine["replayed_steps"]["dense"]
    assert engine["open_accounts"] == engine["kv_pool"]["depth_pages"]["held"] == 0
