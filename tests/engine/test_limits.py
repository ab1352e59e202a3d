"""The operator's limits: of the queue, the answer, the prompt and the stream, whatever a request's policy is."""

import json
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from random import Random

import pytest
from greedy import body_of
from noisy import draft_flags
from streams import choices_of, logprobs_of
from waiting import one_of_three, slowed, wait_until

POOL, CONTEXT, LONGEST_ANSWER, INTERVAL = 600, 1600, 150, 8
FLAGS = ("--dtype", "float32", "--max-total-tokens", str(POOL), "--allow-auto-truncate")
FLAGS += ("--context-length", str(CONTEXT))
FLAGS += ("--max-queued-requests", "1", "--stream-interval", str(INTERVAL))
CHAT = "/v1/chat/completions"
ROUTES = {
    CHAT: {"model": "any", "messages": [{"role": "user", "content": "Where?"}], "max_tokens": 4},
    "/v1/completions": {"model": "any", "prompt": "Where?", "max_tokens": 4},
    "/v1/responses": {"input": "Where?", "max_output_tokens": 4},
    "/v1/messages": {"model": "any", "messages": [{"role": "user", "content": "Where?"}], "max_tokens": 4},
    "/generate": {"text": "Where?", "sampling_params": {"max_new_tokens": 4}},
}
POLICIES = (
    {},
    {"prefill_keep_rate": 0.5, "min_prompt_tokens": 0},
    {"kv_retention_rate": 0.5},
    {"depth_cutoff": 2},
    {"speculative": True},
    {"decode": "slow_fast"},
)


@pytest.fixture(scope="module")
def server(start_server, tiny_model, close_draft):
    env = {"SGLANG_MAX_NEW_TOKENS_LIMIT": str(LONGEST_ANSWER)}
    return start_server(tiny_model, *FLAGS, *draft_flags(close_draft), env=env)


def prompt_of(length, seed=0):
    random = Random(f"{length}/{seed}")
    return [random.randrange(6, 2000) for _ in range(length)]


def ask(server, prompt, policy, tokens, **sampling):
    body = body_of(prompt, policy, tokens) | {"return_logprob": False}
    body["sampling_params"] |= sampling
    reply = server.client.post("/generate", json=body, timeout=60)
    assert reply.status_code == 200, reply.text
    return reply.json()["meta_info"]


@pytest.mark.parametrize("policy", POLICIES, ids=json.dumps)
def test_a_prompt_is_cut_to_what_fits_with_its_answer(server, policy):
    server.flush()
    answer = ask(server, prompt_of(1500), policy, 30)
    assert answer["finish_reason"] == {"type": "length", "length": 30}
    assert POOL / 2 < answer["prompt_tokens"] < 1500
    account = answer["fathom"]
    assert account["prompt_tokens"] == answer["prompt_tokens"]
    shallow = "depth_cutoff" in policy or "prefill_keep_rate" in policy
    assert (answer["prompt_tokens"] > POOL) == shallow, "as much as fits, and no more"
    assert (account["kept_tokens"] < account["prompt_tokens"]) == shallow
    for more in (0, 1):  # a token more would not fit
        again = ask(server, prompt_of(1500)[: answer["prompt_tokens"] + more], policy, 30)
        assert again["prompt_tokens"] == answer["prompt_tokens"]


@pytest.mark.parametrize("wanted", [1, 2, 30, 140])
def test_a_prompt_is_cut_to_what_the_context_holds_beside_its_answer(server, wanted):
    policy = {"prefill_keep_rate": 0.1, "min_prompt_tokens": 0}  # the pool would hold more
    answer = ask(server, prompt_of(2 * CONTEXT), policy, wanted)
    assert answer["finish_reason"] == {"type": "length", "length": wanted}
    assert CONTEXT - 6 <= answer["prompt_tokens"] + max(wanted, 4) <= CONTEXT


@pytest.mark.parametrize("policy", POLICIES, ids=json.dumps)
def test_no_policy_lifts_the_limit_of_an_answer(server, policy):
    for asked in (LONGEST_ANSWER + 50, None):
        answer = ask(server, prompt_of(100), policy, asked)
        assert answer["completion_tokens"] == LONGEST_ANSWER


def test_what_an_answer_has_at_least_may_be_more_than_fits_at_all_depths(server):
    stops = list(range(0, 2048, 2))
    asked = {"min_new_tokens": LONGEST_ANSWER, "stop_token_ids": stops}
    answer = ask(server, prompt_of(POOL - 80), {"depth_cutoff": 2}, LONGEST_ANSWER, **asked)
    assert answer["completion_tokens"] == LONGEST_ANSWER


def test_a_full_queue_refuses_nobody_who_was_let_in(server):
    """Four come back at once into a queue of one."""
    server.flush()
    policies = ({}, {"kv_retention_rate": 0.5}, {"depth_cutoff": 2}, {"decode": "slow_fast"})

    def rows():
        return server.engine()["kv_pool"]["depth_pages"]["open_rows"]

    with ThreadPoolExecutor(4) as pool:
        running = []
        with slowed(server, 0.15):
            for number, policy in enumerate(policies):
                running.append(pool.submit(ask, server, prompt_of(20, number), policy, 100))
                wait_until(lambda number=number: rows() == number + 1)
            assert server.client.post("/pause_generation", json={"mode": "retract"}).status_code == 200
        assert server.client.post("/continue_generation", json={}).status_code == 200
        answers = [each.result() for each in running]
    assert [answer["finish_reason"]["type"] for answer in answers] == ["length"] * 4
    assert all(answer["num_retractions"] == 1 for answer in answers)
    wait_until(lambda: server.engine()["open_accounts"] == 0)


@pytest.mark.parametrize("route", ROUTES)
def test_a_full_queue_is_told_on_every_route(server, route):
    """Clients try again after status 503, and not after 400."""
    with slowed(server, 0.25), ThreadPoolExecutor(12) as pool:  # longer than they need to come
        late = list(pool.map(lambda _: server.client.post(route, json=ROUTES[route]), range(12)))
    assert {reply.status_code for reply in late} == {200, 503}
    for reply in late:
        if reply.status_code == 503:
            assert "queue is full" in reply.text and reply.headers["retry-after"]
    assert "Traceback" not in server.log.read_text()
    wait_until(lambda: server.engine()["open_accounts"] == 0)


def test_each_token_of_an_event_has_its_own_alternatives(server):
    body = ROUTES[CHAT] | {"max_tokens": 40, "ignore_eos": True, "logprobs": True, "top_logprobs": 3}
    body["temperature"] = 0
    whole, pieces = (choices_of(server, CHAT, body | {"stream": stream}) for stream in (False, True))
    assert len(pieces) > 3 and logprobs_of(pieces) == logprobs_of(whole)
    assert max(len(piece["logprobs"]["content"]) for piece in pieces if piece["logprobs"]) > 1


@one_of_three
def test_a_stream_never_waits_for_more_than_its_interval(server):
    """Also where steps put out several tokens and jump over the multiples. They are so slow that no two events meet
    in the HTTP process."""
    body = body_of(prompt_of(40), {"speculative": True}, 100) | {"return_logprob": False, "stream": True}
    seen = []
    with slowed(server, 0.25), server.client.stream("POST", "/generate", json=body) as stream:
        for line in stream.iter_lines():
            if line.startswith("data: {"):
                told = json.loads(line[6:])["meta_info"]
                seen.append(told["completion_tokens"])
    steps, burst = [b - a for a, b in pairwise(seen)], told["fathom"]["longest_burst"]
    assert seen[-1] == 100 and burst > 1 and len(seen) > 6
    assert all(step >= INTERVAL for step in steps[:-1])
    assert max(seen[0], *steps) < INTERVAL + burst
