"""Beam searches beside others: what they find is what they find alone, and nobody pays for them."""

import random
from concurrent.futures import ThreadPoolExecutor

import pytest
from noisy import draft_flags
from waiting import held, slowed, wait_until

ROWS, WIDTH, TOKENS = 4, 3, 40
FLAGS = ("--dtype", "float32", "--max-total-tokens", "4000", "--max-running-requests", str(ROWS))
FLAGS += ("--enable-priority-scheduling",)
SEARCH = {"beam_width": WIDTH, "max_new_tokens": TOKENS, "ignore_eos": True}
PLAIN = {"max_new_tokens": TOKENS, "ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module")
def server(start_server, tiny_model, close_draft):
    return start_server(tiny_model, *FLAGS, *draft_flags(close_draft))


def prompt_of(seed):
    draw = random.Random(seed)
    return [draw.randrange(6, 2000) for _ in range(50)]


def ask(server, prompts, sampling, policy=None, priority=0):
    body = {"input_ids": prompts, "sampling_params": sampling, "fathom": policy or {}, "priority": priority}
    reply = server.client.post("/generate", json=body, timeout=60)
    assert reply.status_code == 200, reply.text
    return reply.json()


def found(answer):
    """What the beams of an answer say."""
    beams = [beam["output_ids"] for beam in answer["meta_info"]["beam_results"]]
    assert all(len(beam) == TOKENS for beam in beams)
    return beams


@pytest.fixture(scope="module")
def alone(server):
    """A beam search on a server that does nothing else."""
    return found(ask(server, prompt_of(0), SEARCH))


def test_beside_requests_that_draft(server, alone):
    """Their tokens are verified in steps that have rows of all beams."""
    prompts = [prompt_of(seed) for seed in range(2)]
    plain = ask(server, prompts[1], PLAIN)
    search, drafted = ask(server, prompts, [SEARCH, PLAIN], {"speculative": True})
    assert found(search) == alone
    assert drafted["output_ids"] == plain["output_ids"]
    assert drafted["meta_info"]["fathom"]["accepted_tokens"] > 0
    wait_until(lambda: held(server) == 0)


def test_beside_as_many_as_there_are_rows(server, alone):
    """All come at once, and the beams take rows that the others would have had."""
    prompts = [prompt_of(seed) for seed in range(ROWS)]
    search, *others = ask(server, prompts, [SEARCH] + [PLAIN] * (ROWS - 1))
    assert found(search) == alone
    for prompt, other in zip(prompts[1:], others, strict=True):
        assert other["output_ids"] == ask(server, prompt, PLAIN)["output_ids"]
    wait_until(lambda: held(server) == 0)


@pytest.mark.parametrize("by", ["a pause", "somebody more urgent"])
def test_taken_back(server, alone, by):
    """It begins anew and has kept no rows."""
    with ThreadPoolExecutor(2) as pool:
        with slowed(server, 0.3):
            search = pool.submit(ask, server, prompt_of(0), SEARCH)
            wait_until(lambda: server.engine()["kv_pool"]["held"] > len(prompt_of(0)) + 3 * WIDTH)
            if by == "a pause":
                assert server.client.post("/pause_generation", json={"mode": "retract"}).status_code == 200
                assert server.engine()["kv_pool"]["held"] == 0
            else:
                before, prompts = server.engine()["open_accounts"], [prompt_of(seed) for seed in range(ROWS)]
                urgent = pool.submit(ask, server, prompts, PLAIN, priority=20)
                wait_until(lambda: server.engine()["open_accounts"] > before)
        if by == "a pause":
            assert server.client.post("/continue_generation", json={}).status_code == 200
        else:
            urgent.result()
        answer = search.result()
    assert found(answer) == alone
    assert answer["meta_info"]["num_retractions"] == 1
    wait_until(lambda: held(server) == 0)


def test_takes_nobody_out_where_rows_are_missing_then(server, alone):
    """One row is free, and of those that are held only one is somebody's who is less urgent."""
    prompts = [prompt_of(seed) for seed in range(3)]
    with ThreadPoolExecutor(3) as pool:
        with slowed(server, 0.1):
            others = []
            for prompt, priority in zip(prompts, (0, 20, 20), strict=True):
                others.append(pool.submit(ask, server, prompt, PLAIN, priority=priority))
                wait_until(lambda: server.engine()["open_accounts"] == len(others))
            search = ask(server, prompt_of(0), SEARCH, priority=20)
        answers = [other.result() for other in others]
    assert [answer["meta_info"]["num_retractions"] for answer in answers] == [0, 0, 0]
    assert found(search) == alone
    wait_until(lambda: held(server) == 0)
