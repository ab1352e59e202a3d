"""A model on two GPUs in name only, half of its heads on each: they choose the same tokens.

NCCL is Gloo here, and what either captures are its own operations.
"""

import interpreted
import pytest
from interpreted import POLICIES, Oracle, ask_all


@pytest.fixture(scope="module")
def server(start_nominal, ending_pair):
    return start_nominal(*ending_pair, *interpreted.FLAGS, "--cuda-graph-bs-decode", "4", "--tp-size", "2")


def test_answers_are_the_oracles(server, ending_pair, triggers):
    expected = Oracle(*ending_pair, triggers, devices=2)
    before = server.engine()
    answers = ask_all(server, list(POLICIES))
    reports = {name: expected.check(name, answer) for name, answer in answers.items()}
    dense = reports["dense"]["kept_tokens"]
    assert all(
        reports[name]["kept_tokens"] < dense for name in ("SPEED", "SpecPrefill", "FastKV", "everything")
    )
    assert reports["SFI"]["fast_steps"] and reports["drafting"]["draft_tokens"]
    after = server.engine()
    assert after["lacking"] == before["lacking"] == {}
    assert sum(after["replayed_steps"].values()) > sum(before["replayed_steps"].values())
    assert after["open_accounts"] == after["kv_pool"]["depth_pages"]["held"] == 0
