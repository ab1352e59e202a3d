"""FastKV through the server against Transformers with explicit masks, in float32: same greedy tokens,
log-probabilities to 1e-4.

Two servers: whole prompts, with requests that are taken back and restarted; chunks of 64 with pages of 16 and a
draft model. On each: retention, propagation and SPEED alone and together, short and long prompts, dense requests in
between, prefix hits and misses; on the second also SpecPrefill and drafted tokens with all of them, and aborts.
"""

import contextlib
import random
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from greedy import TOLERANCE, ask, check_tokens
from noisy import draft_flags
from oracles.compressed_model import CompressedModel
from oracles.drafted import Draft
from waiting import held, wait_until

PAGE = 16
LAYERS, TSP = 4, 2
TOKEN_BYTES = 2 * 2 * 32 * 4  # (keys, values) x KV heads x head_dim x float32, per layer
LENGTHS = [1, 8, 9, PAGE + 1, 200, 700]
POLICIES = [
    None,
    {"kv_retention_rate": 0.1},
    {"kv_retention_rate": 0.3, "retention_policy": "streaming"},
    {"tsp_rate": 0.2},
    {"tsp_rate": 0.2, "kv_retention_rate": 0.1},
    {"tsp_rate": 0.1, "kv_retention_rate": 0.4},
    {"tsp_rate": 0.3, "kv_retention_rate": 0.2, "depth_cutoff": 3},
]
SPEC = {"prefill_keep_rate": 0.6, "min_prompt_tokens": 64}
DRAFTED = [
    SPEC | {"kv_retention_rate": 0.1},
    SPEC | {"tsp_rate": 0.3, "kv_retention_rate": 0.2, "depth_cutoff": 3},
    SPEC | {"tsp_rate": 0.3, "kv_retention_rate": 0.2, "depth_cutoff": 3, "speculative": True},
    {"tsp_rate": 0.2, "kv_retention_rate": 0.1, "speculative": True},
    {"tsp_rate": 0.3, "depth_cutoff": 3, "speculative": True},
]
FLAGS = ("--dtype", "float32", "--max-total-tokens", "40000")


@pytest.fixture(scope="module")
def draft_model(draft_of):
    return draft_of(0.012)


@pytest.fixture(scope="module")
def oracle(tiny_model, draft_model):
    model, draft, known, entered = CompressedModel(tiny_model), Draft(draft_model), {}, {}

    def kept_by_draft(prompt, policy):
        if len(prompt) < policy.get("min_prompt_tokens", len(prompt) + 1):
            return None
        if tuple(prompt) not in entered:
            entered[tuple(prompt)] = draft.kept(prompt, policy["prefill_keep_rate"])
        return entered[tuple(prompt)]

    def log_probs(prompt, generated, policy):
        key = (tuple(prompt), tuple(generated), tuple(sorted((policy or {}).items())))
        if key not in known:
            wanted = dict(policy or {})
            known[key] = (
                model.log_probs(
                    prompt,
                    generated,
                    TSP,
                    wanted.get("tsp_rate", 1.0),
                    wanted.get("kv_retention_rate", 1.0),
                    wanted.get("retention_policy", "saliency"),
                    wanted.get("depth_cutoff"),
                    entered=kept_by_draft(prompt, wanted),
                ),
                [len(seen) for seen in model.sets],
                [len(heads[0]) for heads in model.kept],
            )
        return known[key]

    return log_probs


def check(oracle, prompt, policy, answer, page=1):
    """The answer against the oracle, fed with the answer's own tokens; the account against the oracle's sets."""
    tokens, meta = answer["output_ids"], answer["meta_info"]
    want, seen, kept = oracle(prompt, tokens[:-1], policy)
    check_tokens(answer, want, (len(prompt), policy))
    report, drafted = meta["fathom"], bool(policy and policy.get("speculative"))
    steps = {len(tokens) - 1, len(tokens) - 1 + drafted}  # a draft's last tokens may be in their places

    def held(counts):
        return {sum(-(-(count + n) // page) for count in counts) * page * TOKEN_BYTES for n in steps}

    assert report["deep_tokens"] == seen[-1] and report["kept_tokens"] == round(sum(seen) / LAYERS)
    assert report["retained_tokens"] == round(sum(kept) / LAYERS)
    assert report["propagated_tokens"] == (seen[TSP] if seen[TSP] < seen[0] else None)
    assert (report["scoring_seconds"] > 0) == (seen[TSP] < seen[0] or sum(kept) < sum(seen))
    assert report["kv_bytes"] in held(kept) and report["kv_bytes_dense"] in held([len(prompt)] * LAYERS)
    assert report["kv_bytes_peak"] >= max(report["kv_bytes"], sum(seen) * TOKEN_BYTES)


def prompts(seed):
    rng = random.Random(seed)
    return [[rng.randrange(6, 2000) for _ in range(n)] for n in LENGTHS]


def check_matrix(server, oracle, page=1, policies=POLICIES):
    """All policies and lengths, eight requests at a time, in random order."""
    cases = [(prompt, policy) for policy in policies for prompt in prompts(1)]
    random.Random(5).shuffle(cases)
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda case: ask(server, *case), cases))
    for (prompt, policy), answer in zip(cases, answers, strict=True):
        check(oracle, prompt, policy, answer, page)
    return answers


def settle(server):
    """The engine's own account once nothing runs."""
    engine = server.engine()
    pool = engine["kv_pool"]["depth_pages"]
    assert pool["held"] == 0 and pool["open_rows"] == 0
    assert pool["free"] + pool["cached"] == pool["total"]
    assert pool["evictable"] == pool["cached"]
    assert engine["fastkv"]["buffer_used"] == 0
    return engine


def test_whole_prompts_and_restarts(start_server, tiny_model, oracle):
    """SGLang takes running requests back every few steps; they start again with what they have generated."""
    env = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "2"}
    server = start_server(tiny_model, *FLAGS, "--chunked-prefill-size", "-1", env=env)
    answers = check_matrix(server, oracle)
    assert sum(answer["meta_info"]["num_retractions"] for answer in answers) > 10
    assert settle(server)["fastkv"]["buffer_peak"] == 0
    check_rates_of_one(server)
    check_one_cached_prompt(server, {}, {"kv_retention_rate": 0.1})
    check_one_cached_prompt(server, {"depth_cutoff": 3}, {"depth_cutoff": 3, "kv_retention_rate": 0.2})
    check_random_control(server)
    check_metrics(server)
    assert server.stop() == 0


def check_rates_of_one(server):
    """Rates that ask for nothing are the dense path, and leave nothing behind for it."""
    prompt = prompts(2)[-1]
    compressed = ask(server, prompt, {"tsp_rate": 0.2, "kv_retention_rate": 0.1})
    dense = ask(server, prompt, None)
    assert dense["meta_info"]["cached_tokens"] == 0
    server.flush()
    cold = ask(server, prompt, None)
    server.flush()
    neutral = ask(server, prompt, {"tsp_rate": 1.0, "kv_retention_rate": 1.0, "retention_policy": "random"})
    for answer in (dense, neutral):
        assert answer["output_ids"] == cold["output_ids"]
        assert answer["meta_info"]["output_top_logprobs"] == cold["meta_info"]["output_top_logprobs"]
    assert neutral["meta_info"]["fathom"]["policy"]["preset"] == "exact"
    assert compressed["meta_info"]["output_top_logprobs"] != cold["meta_info"]["output_top_logprobs"]


def check_one_cached_prompt(server, whole, retained):
    """What a request leaves in the prefix cache is the same to the bit with retention, and serves both."""
    prompt = prompts(4)[-1]
    found = {}
    for first in (whole, retained):
        server.flush()
        assert ask(server, prompt, first)["meta_info"]["cached_tokens"] == 0
        for policy, spared in ((whole, 1), (retained, 8)):
            answer = ask(server, prompt, policy)
            assert answer["meta_info"]["cached_tokens"] == len(prompt) - spared
            found.setdefault(tuple(policy), []).append(
                (answer["output_ids"], answer["meta_info"]["output_top_logprobs"])
            )
    assert len(found) == 2 and all(one == other for one, other in found.values())


def check_random_control(server):
    """The same seed keeps the same entries, another one others; the budget is the same."""
    prompt = prompts(3)[-1]
    policy = {"kv_retention_rate": 0.05, "retention_policy": "random"}
    one, again, other = (ask(server, prompt, policy, sampling_seed=seed) for seed in (1, 1, 2))
    tops = [
        {token: value for value, token, _ in answer["meta_info"]["output_top_logprobs"][1]}
        for answer in (one, again, other)
    ]
    assert tops[0] == pytest.approx(tops[1], abs=TOLERANCE)
    assert tops[0] != pytest.approx(tops[2], abs=100 * TOLERANCE)
    assert {answer["meta_info"]["fathom"]["retained_tokens"] for answer in (one, again, other)} == {35}


def check_metrics(server):
    """They are written a moment after an answer."""

    def totals():
        names = ("fathom:propagated_tokens_total", "fathom:retained_tokens_total")
        return [sum(server.series(name).values()) for name in names]

    wait_until(lambda: min(totals()) > 100, show=totals)


def test_chunks_pages_a_draft_and_aborts(start_server, tiny_model, draft_model, oracle):
    """Chunks of 64, pages of 16; prefill and decode rows in one batch; a buffer for prompts of up to 800 tokens."""
    flags = ("--chunked-prefill-size", "64", "--page-size", str(PAGE), "--enable-mixed-chunk")
    more = ("--propagation-buffer", "800", *draft_flags(draft_model))
    env = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "9"}
    server = start_server(tiny_model, *FLAGS, *flags, *more, env=env)
    check_matrix(server, oracle, PAGE)
    # A second time from the prefix cache: retention finds all but the window, a propagation nothing.
    answers = check_matrix(server, oracle, PAGE)
    for answer in answers:
        meta = answer["meta_info"]
        propagates = meta["fathom"]["propagated_tokens"] is not None
        expected = 0 if propagates else (meta["prompt_tokens"] - 8) // PAGE * PAGE
        assert meta["cached_tokens"] == 0 if propagates else meta["cached_tokens"] >= expected
    peak = settle(server)["fastkv"]["buffer_peak"]
    assert 640 <= peak <= 800
    answers = check_matrix(server, oracle, PAGE, DRAFTED)
    assert sum(answer["meta_info"]["fathom"]["accepted_tokens"] for answer in answers) > 10
    check_judged_together(server, oracle)
    check_long_answers(server, oracle)
    check_too_long(server, oracle)
    check_storm(server, oracle)
    settle(server)
    assert server.stop() == 0


def check_judged_together(server, oracle):
    """Prompts that the draft has read before, so that many of them end in one chunk: together they have more hidden
    states that wait for FastKV's selection than the buffer holds."""
    prompt, policy = prompts(1)[-1], DRAFTED[1]
    for answer in ask(server, [prompt] * 4, policy):
        check(oracle, prompt, policy, answer, PAGE)
        assert answer["meta_info"]["cached_tokens"] > 640


def check_long_answers(server, oracle):
    """Restarts with more generated tokens than fit into one chunk."""
    prompt = prompts(8)[-2]
    with ThreadPoolExecutor(len(POLICIES)) as pool:
        answers = list(pool.map(lambda policy: ask(server, prompt, policy, 90), POLICIES))
    assert sum(answer["meta_info"]["num_retractions"] for answer in answers) > 3
    for policy, answer in zip(POLICIES, answers, strict=True):
        check(oracle, prompt, policy, answer, PAGE)


def check_too_long(server, oracle):
    """Longer than the buffer: computed whole, and the answer says so; what else was asked for is done. The prefix
    cache has the beginning of the same prompt, without KV above the selection."""
    rng = random.Random(4)
    prompt = prompts(1)[-1] + [rng.randrange(6, 2000) for _ in range(101)]
    answer = ask(server, prompt, {"tsp_rate": 0.2, "kv_retention_rate": 0.1})
    report = answer["meta_info"]["fathom"]
    assert report["propagation_skipped"] and report["deep_tokens"] == 801
    check(oracle, prompt, {"kv_retention_rate": 0.1}, answer, PAGE)


def check_storm(server, oracle):
    """Forty mixed requests, a third of which their clients give up on."""
    rng = random.Random(6)
    policies = POLICIES + DRAFTED
    cases = [(rng.choice(prompts(7)[2:]), rng.choice(policies), rng.random() < 0.35) for _ in range(40)]

    def run(case):
        prompt, policy, gives_up = case
        if not gives_up:
            return ask(server, prompt, policy)
        body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": 400}, "fathom": policy}
        with contextlib.suppress(httpx.TimeoutException):
            httpx.post(f"{server.url}/generate", json=body, timeout=rng.choice([0.05, 0.2, 0.6]))
        return None

    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(run, cases))
    for (prompt, policy, _), answer in zip(cases, answers, strict=True):
        if answer is not None:
            check(oracle, prompt, policy, answer, PAGE)
    wait_until(lambda: held(server) == 0)


@pytest.mark.parametrize(
    ("policy", "field", "legal"),
    [
        ({"tsp_rate": 0}, "tsp_rate", "(0, 1]"),
        ({"tsp_rate": 1.5}, "tsp_rate", "(0, 1]"),
        ({"kv_retention_rate": -1}, "kv_retention_rate", "(0, 1]"),
        ({"kv_retention_rate": 0.1, "retention_policy": "best"}, "retention_policy", '"random"'),
        ({"tsp_rate": 0.2, "depth_cutoff": 2}, "tsp_rate", "a depth_cutoff above 2"),
    ],
)
def test_illegal_fields(server, policy, field, legal):
    response = server.client.post("/generate", json={"input_ids": [7, 8, 9], "fathom": policy})
    assert response.status_code == 400
    message = response.json()["error"]["message"]
    assert f"fathom.{field}" in message and legal in message


def test_prompt_log_probabilities(server):
    """Refused where tokens are not computed; with retention alone every token is."""
    body = {"input_ids": [7, 8, 9] * 40, "return_logprob": True, "logprob_start_len": 0}
    body |= {"sampling_params": {"max_new_tokens": 2, "temperature": 0}}
    assert server.client.post("/generate", json=body | {"fathom": {"tsp_rate": 0.2}}).status_code == 400
    kept = server.client.post("/generate", json=body | {"fathom": {"kv_retention_rate": 0.2}}).json()
    dense = server.client.post("/generate", json=body).json()
    values = [
        [value for value, _, _ in answer["meta_info"]["input_token_logprobs"][1:]] for answer in (kept, dense)
    ]
    assert len(values[0]) == 119 and values[0] == pytest.approx(values[1], abs=TOLERANCE)
