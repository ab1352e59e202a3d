"""A request that a more urgent one takes out comes back, whatever becomes of the other."""

import time
from concurrent.futures import ThreadPoolExecutor
from random import Random

import pytest
from greedy import body_of

FLAGS = ("--dtype", "float32", "--page-size", "8", "--max-total-tokens", "2000")
FLAGS += ("--chunked-prefill-size", "8")
FLAGS += ("--max-running-requests", "1", "--enable-priority-scheduling", "--enable-mixed-chunk")
FLAGS += ("--priority-scheduling-preemption-threshold", "1")
POLICIES = ({}, {"kv_retention_rate": 0.3}, {"depth_cutoff": 2}, {"decode": "slow_fast"})
ROUNDS = 8
KINDS = ((30, 200, 0), (60, 5, 2), (20, 30, 1), (7, 5, 3))
"""Prompt, answer and priority of a round's requests. A running request leaves no page of a chunk: who takes it
out is let in at the next look only."""
PAUSE = 0.04
"""Seconds between them."""


@pytest.fixture(scope="module")
def server(start_server, tiny_model):
    return start_server(tiny_model, *FLAGS)


def test_everybody_is_answered_as_alone(server):
    random = Random(1)

    def answer(body, delay=0.0):
        time.sleep(delay)
        reply = server.client.post("/generate", json=body, timeout=30)
        assert reply.status_code == 200, reply.text
        return reply.json()

    taken_out = 0
    for number in range(ROUNDS):
        asked = []
        for length, tokens, priority in KINDS:
            prompt = [random.randrange(6, 2000) for _ in range(length)]
            body = body_of(prompt, POLICIES[number % len(POLICIES)], tokens)
            asked.append(body | {"return_logprob": False, "priority": priority})
        with ThreadPoolExecutor(len(asked)) as pool:
            delays = [PAUSE * place for place in range(len(asked))]
            together = list(pool.map(answer, asked, delays))
        taken_out += sum(each["meta_info"]["num_retractions"] for each in together)
        assert [each["output_ids"] for each in together] == [answer(body)["output_ids"] for body in asked]
    assert taken_out >= ROUNDS / 2
    assert server.engine()["open_accounts"] == 0
