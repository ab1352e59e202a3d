"""Which accounts prove that a policy was carried out, and which end the run."""

import pytest

from fathom.benchmarks.client import BenchError
from fathom.benchmarks.fidelity_checks import check
from fathom.runtime.config import Policy

OUTPUT = 40


def account(policy=None, **counters):
    """A dense answer's account under `policy`, with some counters replaced."""
    dense = {"prompt_tokens": 1000, "kept_tokens": 1000, "cached_tokens": 0, "prefill_steps": 1}
    steps = {"decode_steps": 39, "slow_steps": 39, "fast_steps": 0}
    steps |= dict.fromkeys(("draft_read_tokens", "draft_tokens", "accepted_tokens"), 0)
    held = {"kv_bytes": 104000, "kv_bytes_dense": 104000}
    return {"policy": {**Policy().to_wire(), **(policy or {})}, **dense, **steps, **held, **counters}


READ = {"draft_read_tokens": 1030}
HONEST = {
    "exact": ({"preset": "exact"}, {}),
    "prefill": ({"prefill_keep_rate": 0.2}, {"kept_tokens": 200, "kv_bytes": 24000, "draft_tokens": 8}),
    "cutoff": ({"depth_cutoff": 6}, {"kv_bytes": 80000}),
    "retention": ({"kv_retention_rate": 0.2}, {"kv_bytes": 24000}),
    "random": ({"kv_retention_rate": 0.2, "retention_policy": "random"}, {"kv_bytes": 24000}),
    "slow fast": ({"decode": "slow_fast"}, {"slow_steps": 8, "fast_steps": 31}),
    "drafting": ({"speculative": True}, {**READ, "draft_tokens": 30, "accepted_tokens": 20}),
    "drafted in few steps": (
        {"decode": "slow_fast", "speculative": True},
        {**READ, "decode_steps": 3, "slow_steps": 3, "draft_tokens": 40, "accepted_tokens": 37},
    ),
    "auto": ({"prefill_keep_rate": "auto"}, {}),
}


@pytest.mark.parametrize("name", HONEST)
def test_what_was_asked_for_and_done_passes(name):
    asked, counters = HONEST[name]
    checked = check(name, asked, account(asked, **counters), OUTPUT)
    assert checked["prompt_tokens"] == 1000 and "policy" not in checked


@pytest.mark.parametrize("name", [name for name in HONEST if name not in ("exact", "auto")])
def test_a_policy_that_was_served_dense_is_an_error(name):
    asked, _ = HONEST[name]
    with pytest.raises(BenchError, match=f"{name}: asked for"):
        check(name, asked, account(asked), OUTPUT)


@pytest.mark.parametrize("name", [name for name in HONEST if name not in ("exact", "auto")])
def test_a_dense_request_that_was_not_served_dense_is_an_error(name):
    _, counters = HONEST[name]
    with pytest.raises(BenchError, match=r"nothing was asked to go|none were asked for"):
        check("exact", {"preset": "exact"}, account(**counters), OUTPUT)


@pytest.mark.parametrize(
    ("asked", "ran", "counters", "message"),
    [
        ({"depth_cutoff": 6}, {}, {}, "depth_cutoff was 6 in the request and 'full' in the scheduler"),
        ({"preset": "exact"}, {"preset": "custom"}, {}, "preset was 'exact'"),
        ({"prefill_keep_rate": 0.2}, None, {"kept_tokens": 700, "kv_bytes": 70000}, "700 of 1000 prompt"),
        ({"kv_retention_rate": 0.2}, None, {"kv_bytes": 90000}, "90000 of 104000 KV bytes"),
        ({"speculative": True}, None, {**READ, "draft_tokens": 3, "accepted_tokens": 4}, "4 of 3 drafted"),
    ],
)
def test_an_account_that_contradicts_the_request_is_an_error(asked, ran, counters, message):
    with pytest.raises(BenchError, match=message):
        check("p", asked, account(asked if ran is None else ran, **counters), OUTPUT)


def test_a_short_answer_need_not_show_a_fast_step():
    asked, _ = HONEST["slow fast"]
    check("slow fast", asked, account(asked), 3)


def test_an_answer_without_an_account_is_an_error():
    with pytest.raises(BenchError, match="without the fathom object"):
        check("exact", {}, None, OUTPUT)
    with pytest.raises(BenchError, match="lacks kv_bytes"):
        check("exact", {}, {k: v for k, v in account().items() if k != "kv_bytes"}, OUTPUT)


def test_a_draft_that_reads_and_proposes_nothing_has_run():
    """Where drafting does not pay nothing is proposed; what the draft has read shows that it was there."""
    check("p", {"speculative": True}, account({"speculative": True}, **READ), OUTPUT)
