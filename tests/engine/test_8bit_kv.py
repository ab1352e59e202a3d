"""Keys and values of 8 bits, on a GPU in name only: every mechanism against an oracle that rounds them too.

The last bits of the oracle's float32 are not the engine's, so that a number half way between two of 8 bits may be
rounded the other way. That moves log-probabilities by up to a hundredth here; rounding altogether, by tenths.
"""

import interpreted
import pytest
import torch
from greedy import ask
from interpreted import NEW_TOKENS, POLICIES, Oracle, ask_all, prompt_of

E4M3, E5M2 = {"fp8_e4m3": torch.float8_e4m3fn}, {"fp8_e5m2": torch.float8_e5m2}
TOLERANCE = 0.02


def oracle_of(pair, triggers, name):
    return Oracle(*pair, triggers, kv_dtype=(E4M3 | E5M2)[name])


@pytest.fixture(scope="module")
def server(start_nominal, ending_pair):
    """With captured steps; prefill by Triton's kernels."""
    captured = "--cuda-graph-bs-decode", "1", "4", "--sfi-evidence-mib", "8"
    return start_nominal(*ending_pair, *interpreted.FLAGS, *captured, "--kv-cache-dtype", *E4M3)


@pytest.fixture(scope="module")
def answers(server):
    return ask_all(server, POLICIES)


@pytest.fixture(scope="module")
def expected(ending_pair, triggers):
    return oracle_of(ending_pair, triggers, *E4M3)


@pytest.mark.parametrize("name", POLICIES)
def test_answers_are_the_oracles(answers, expected, name):
    report, asked = expected.check(name, answers[name], tolerance=TOLERANCE), POLICIES[name]
    assert (report["fast_steps"] > 0) == ("decode" in asked)
    assert (report["draft_tokens"] > 0) == ("speculative" in asked)
    assert (report["kept_tokens"] < 69) == bool(
        {"depth_cutoff", "prefill_keep_rate", "tsp_rate"} & set(asked)
    )


def test_they_are_not_those_of_float32(answers, ending_pair, triggers):
    exact = Oracle(*ending_pair, triggers)
    with pytest.raises(AssertionError):
        exact.check("dense", answers["dense"], tolerance=10 * TOLERANCE)


def numbers(model):
    """Of one token's keys and values."""
    config = model.config
    return 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim


def test_a_number_takes_a_byte(server, answers, expected):
    """The draft's too."""
    report, engine = answers["dense"]["meta_info"]["fathom"], server.engine()
    assert report["kv_bytes"] == 72 * numbers(expected.model)  # pages of 4 tokens
    assert 1 < engine["draft"]["kv_bytes"] / engine["draft"]["slots"] / numbers(expected.draft.model) < 1.5
    assert engine["replayed_steps"]["dense"] > 0


def test_flashinfer_reads_copies_and_prompts_the_prefix_cache(start_nominal, ending_pair, triggers):
    server = start_nominal(
        *(
            *ending_pair,
            *interpreted.FLAGS,
            "--kv-cache-dtype",
            *E5M2,
            "--cuda-graph-backend-decode",
            "disabled",
        ),
        script="nominal_flashinfer.py",
    )
    expected = oracle_of(ending_pair, triggers, *E5M2)
    for cached in (0, 64):
        answers = ask_all(server, ("dense", "FastKV", "everything"))
        for name, answer in answers.items():
            expected.check(name, answer, tolerance=TOLERANCE)
        assert answers["dense"]["meta_info"]["cached_tokens"] >= cached
    before = server.engine()
    ask(server, [9, *prompt_of("alone")], {}, NEW_TOKENS)
    engine = server.engine()
    plans = engine["gathered_plans"] - before["gathered_plans"]
    assert plans == engine["flashinfer_plans"] - before["flashinfer_plans"] > 0
