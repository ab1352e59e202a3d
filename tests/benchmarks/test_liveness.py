"""An answer that left out a part of its policy is no measurement of it."""

from types import SimpleNamespace

import pytest

from fathom.benchmarks import liveness
from fathom.benchmarks.args import least_tokens
from fathom.benchmarks.client import BenchError, Reply
from fathom.benchmarks.prompts import TAIL, Cell, Settings
from fathom.benchmarks.variants import with_body

DONE = {"prompt_tokens": 100, "kept_tokens": 50, "kv_bytes": 5, "kv_bytes_dense": 10}
DONE |= {"fast_steps": 3, "draft_read_tokens": 0, "draft_tokens": 0, "cached_tokens": 84}


def check(policy, operators=None, **counters):
    asked = {"decode": "full", "speculative": False} | (operators or {}) | policy
    server = SimpleNamespace(variant=with_body("x", policy))
    reply = Reply(100, 8, 1.0, 2.0, 8, "", {**DONE, "policy": asked, **counters})
    liveness.check_reply(server, reply)
    liveness.check_cached(server, reply, 84)


@pytest.mark.parametrize(
    ("policy", "counters", "message"),
    [
        (
            {"tsp_rate": 0.2, "kv_retention_rate": 0.2},
            {"propagation_skipped": True},
            "buffer of hidden states",
        ),
        ({"decode": "slow_fast"}, {"dense_fallbacks": 1}, "no compact buffer"),
        ({"decode": "slow_fast", "depth_cutoff": 6}, {"fast_steps": 0}, "no step was fast"),
        ({"speculative": True, "depth_cutoff": 6}, {}, "the draft has read nothing"),
        ({"depth_cutoff": 6}, {"cached_tokens": 83}, "83 tokens of the document"),
        ({"prefill_keep_rate": 0.5, "kv_retention_rate": 0.2}, {}, "the draft has read nothing"),
        (
            {"prefill_keep_rate": 0.5, "min_prompt_tokens": 4096, "speculative": True},
            {"draft_read_tokens": 99},
            "below min_prompt_tokens 4096 whole",
        ),
        (
            {"prefill_keep_rate": 0.99, "kv_retention_rate": 0.2},
            {"draft_read_tokens": 99, "kept_tokens": 100},
            "SpecPrefill kept the whole prompt",
        ),
        ({"tsp_rate": 0.2, "depth_cutoff": 6}, {"propagated_tokens": None}, "FastKV let the whole"),
        ({"kv_retention_rate": 0.2, "depth_cutoff": 6}, {"retained_tokens": 100}, "all KV was retained"),
        ({"depth_cutoff": 8, "kv_retention_rate": 0.2}, {"deep_tokens": 100}, "at the last layer"),
    ],
)
def test_a_part_that_was_left_out_ends_the_run(policy, counters, message):
    with pytest.raises(BenchError, match=message):
        check(policy, **counters)


@pytest.mark.parametrize(
    ("policy", "counters"),
    [
        ({"decode": "slow_fast"}, {}),
        ({"decode": "slow_fast", "speculative": True}, {"fast_steps": 0, "draft_read_tokens": 9}),
        ({"tsp_rate": 0.2}, {"propagation_skipped": False, "fast_steps": 0}),
        ({"tsp_rate": 0.2}, {"propagated_tokens": 20}),
        ({"prefill_keep_rate": 0.5, "min_prompt_tokens": 100}, {"draft_read_tokens": 108}),
        (
            {"prefill_keep_rate": "auto", "kv_retention_rate": 0.2},
            {"draft_read_tokens": 9, "kept_tokens": 100},
        ),
    ],
)
def test_a_policy_that_was_carried_out_counts(policy, counters):
    check(policy, **counters)


def test_what_the_servers_operator_adds_is_had_where_it_is():
    """Not so what the variant's own preset fills in."""
    operators = {"prefill_keep_rate": 0.5, "min_prompt_tokens": 4096, "kv_retention_rate": 0.2}
    check({"decode": "slow_fast"}, operators, retained_tokens=100)
    with pytest.raises(BenchError, match="below min_prompt_tokens 4096 whole"):
        check({"preset": "balanced"}, operators)


def test_a_pool_too_small_for_the_documents_ends_the_run_before_they_are_read():
    settings = Settings(output=130, documents=3)
    tokens = least_tokens([Cell(32768, 1), Cell(32768, 8), Cell(4096, 8)], settings)
    assert tokens == 3 * 32768 + 8 * (TAIL + 130)
    dense = SimpleNamespace(variant=with_body("x", {}))
    narrow = SimpleNamespace(variant=with_body("x", {"depth_cutoff": 6}))
    liveness.check_room(dense, {"max_total_num_tokens": tokens}, tokens)
    liveness.check_room(narrow, {"max_total_num_tokens": tokens - 1}, tokens)
    liveness.check_room(dense, {"version": "vLLM says nothing of it"}, tokens)
    with pytest.raises(BenchError, match=f"holds {tokens - 1} tokens.*take {tokens}.*fewer --documents"):
        liveness.check_room(dense, {"max_total_num_tokens": tokens - 1}, tokens)
