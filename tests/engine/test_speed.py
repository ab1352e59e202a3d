"""SPEED against Transformers with explicit masks, in float32: same greedy tokens, log-probabilities to 1e-4.

Three servers (conftest.py): whole prompts; chunks of 64 in a small pool; chunks of 256 with requests that are taken
back and started again. On each: every cutoff, both kinds of anchors, short and long prompts, dense requests in
between, prefix hits and misses, three turns of a conversation.
"""

import importlib.util
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from greedy import ask, check_tokens

PAGE = 16
TOKEN_BYTES = 4 * 2 * 2 * 32 * 4  # layers x (keys, values) x KV heads x head_dim x float32
LENGTHS = [1, 2, PAGE - 1, PAGE, PAGE + 1, 200, 700]
POLICIES = [None, *({"depth_cutoff": k, "anchors": a} for k in (1, 2, 3) for a in ("bos", "none"))]


def oracle_module():
    path = Path(__file__).parents[1] / "oracles" / "narrowed_model.py"
    spec = importlib.util.spec_from_file_location("narrowed_model", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


ORACLES = oracle_module()


@pytest.fixture(scope="module")
def oracle(tiny_model):
    return ORACLES.NarrowedModel(tiny_model)


def check(oracle, prompt, policy, answer, page=1):
    """The answer against the oracle, fed with the answer's own tokens."""
    policy = policy or {"depth_cutoff": "full"}
    kept = ORACLES.speed(policy["depth_cutoff"], policy.get("anchors", "bos"))
    tokens, meta = answer["output_ids"], answer["meta_info"]
    want = oracle.log_probs(prompt, tokens[:-1], kept)
    check_tokens(answer, want, (len(prompt), policy))
    report = meta["fathom"]
    deep = len(kept(3, len(prompt)))
    assert report["deep_tokens"] == deep
    assert report["prompt_tokens"] == len(prompt)
    steps = len(tokens) - 1
    cutoff = 4 if policy["depth_cutoff"] == "full" else policy["depth_cutoff"]
    lower, upper = -(-(len(prompt) + steps) // page), -(-(deep + steps) // page)
    assert report["kv_bytes_dense"] == lower * page * TOKEN_BYTES
    assert report["kv_bytes"] == (cutoff * lower + (4 - cutoff) * upper) * page * TOKEN_BYTES // 4


def prompts(seed):
    rng = random.Random(seed)
    return [[rng.randrange(6, 2000) for _ in range(n)] for n in LENGTHS]


def check_matrix(server, oracle, page=1):
    """All policies and lengths, eight requests at a time, in random order."""
    cases = [(prompt, policy) for policy in POLICIES for prompt in prompts(1)]
    random.Random(5).shuffle(cases)
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda case: ask(server, *case), cases))
    for (prompt, policy), answer in zip(cases, answers, strict=True):
        check(oracle, prompt, policy, answer, page)
    return answers


def check_conversations(server, oracle, page=1):
    """Each turn is prompt, answer and something new; a policy finds its own turns and no other policy's."""
    rng = random.Random(9)
    first = [rng.randrange(6, 2000) for _ in range(300)]
    for policy in (None, {"depth_cutoff": 3}, {"depth_cutoff": 2, "anchors": "none"}):
        prompt, before = list(first), 0
        for turn in range(3):
            answer = ask(server, prompt, policy)
            check(oracle, prompt, policy, answer, page)
            cached = answer["meta_info"]["cached_tokens"]
            assert (cached == 0) if turn == 0 else (before - page < cached <= before)
            prompt = prompt + answer["output_ids"] + [rng.randrange(6, 2000) for _ in range(11)]
            before = len(prompt) - 11 - 1


def settle(server):
    """The engine's own account of its pages once nothing runs."""
    pool = server.engine()["kv_pool"]["depth_pages"]
    assert pool["held"] == 0 and pool["open_rows"] == 0
    assert pool["free"] + pool["cached"] == pool["total"]
    assert pool["evictable"] == pool["cached"]
    return pool


def test_whole_prompts(roomy_server, oracle):
    check_matrix(roomy_server, oracle, PAGE)
    check_conversations(roomy_server, oracle, PAGE)
    # A second time, from the prefix cache.
    answers = check_matrix(roomy_server, oracle, PAGE)
    assert sum(answer["meta_info"]["cached_tokens"] for answer in answers) > 3000
    settle(roomy_server)


def test_chunks_in_a_small_pool(pressed_server, oracle):
    check_matrix(pressed_server, oracle, PAGE)
    check_conversations(pressed_server, oracle, PAGE)
    settle(pressed_server)


def test_more_tokens_at_once_than_fit_at_all_depths(start_server, tiny_model, oracle):
    """A prompt that is longer than the pool's dense tokens, computed whole."""
    flags = ("--dtype", "float32", "--chunked-prefill-size", "-1", "--max-total-tokens", "500")
    server = start_server(tiny_model, *flags)
    prompt = prompts(4)[-1]
    assert len(prompt) > server.engine()["kv_pool"]["tokens"]
    for policy in POLICIES[1:5]:
        check(oracle, prompt, policy, ask(server, prompt, policy))
    settle(server)


def test_retractions(retracting_server, oracle):
    answers = check_matrix(retracting_server, oracle)
    assert sum(answer["meta_info"]["num_retractions"] for answer in answers) > 10
    settle(retracting_server)


@pytest.mark.parametrize("new_tokens", [1, 40])
def test_full_depth_is_dense_to_the_last_bit(roomy_server, new_tokens):
    """Asked for in words or as the number of layers, alone and beside requests that are narrowed."""
    prompt = prompts(3)[-1]
    roomy_server.flush()

    def tokens_and_logprobs(policy):
        meta = ask(roomy_server, prompt, policy, new_tokens)["meta_info"]
        roomy_server.flush()
        return meta["output_top_logprobs"]

    dense = tokens_and_logprobs(None)
    assert tokens_and_logprobs({"depth_cutoff": "full"}) == dense
    assert tokens_and_logprobs({"depth_cutoff": 4, "anchors": "none"}) == dense
