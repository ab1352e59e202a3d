"""A request that a more urgent one takes out comes back, whatever becomes of the other, and of those behind it."""

import json
import re
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from random import Random

import pytest
from greedy import body_of
from waiting import slowed, wait_until

KINDS = ((30, 100, 0), (60, 5, 2), (20, 30, 1), (7, 5, 3))
"""Prompt, answer and priority of a round's requests. A running request leaves no page of a chunk: who takes it
out is let in at the next look only."""
QUEUED = len(KINDS)
"""All of a round may come before the first of it runs."""
FLAGS = ("--dtype", "float32", "--page-size", "8", "--max-total-tokens", "2000")
FLAGS += ("--chunked-prefill-size", "8")
FLAGS += ("--max-running-requests", "1", "--enable-priority-scheduling", "--enable-mixed-chunk")
FLAGS += ("--priority-scheduling-preemption-threshold", "1", "--max-queued-requests", str(QUEUED))
STATUS = {"SGLANG_LOG_SCHEDULER_STATUS_TARGET": "stdout", "SGLANG_LOG_SCHEDULER_STATUS_INTERVAL": "0"}
"""Lines on who runs and who waits."""
POLICIES = ({}, {"kv_retention_rate": 0.3}, {"depth_cutoff": 2}, {"decode": "slow_fast"})
ROUNDS = 8
PAUSE = 0.04
"""Seconds between them, once the first is let in."""


@pytest.fixture(scope="module")
def server(start_server, tiny_model):
    return start_server(tiny_model, *FLAGS, env=STATUS)


def test_a_line_on_who_runs_is_json(server):
    """At a first decode step, and every 40th."""
    body = body_of([6, 7, 8], {}, 90) | {"return_logprob": False, "rid": "told"}
    assert server.client.post("/generate", json=body).status_code == 200
    lines = [line for line in server.log.read_text().splitlines() if "scheduler.status" in line]
    assert {"told"} in [set(json.loads(line)["running_rids"]) for line in lines]


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
            first = pool.submit(answer, asked[0])
            wait_until(lambda first=first: first.done() or server.engine()["open_accounts"])
            delays = [PAUSE * place for place in range(1, len(asked))]
            others = list(pool.map(answer, asked[1:], delays))
            together = [first.result(), *others]
        taken_out += sum(each["meta_info"]["num_retractions"] for each in together)
        assert [each["output_ids"] for each in together] == [answer(body)["output_ids"] for body in asked]
    assert taken_out >= ROUNDS / 2
    assert server.engine()["open_accounts"] == 0


@pytest.mark.parametrize("policy", POLICIES)
def test_a_long_prompt_gives_way_between_two_chunks(server, policy):
    """To who is so much more urgent that it would take a running request out, and to nobody else."""
    random = Random(str(policy))

    def body(length, tokens, priority):
        asked = body_of([random.randrange(6, 2000) for _ in range(length)], policy, tokens)
        return asked | {"return_logprob": False, "priority": priority}

    def ask(asked):
        reply = server.client.post("/generate", json=asked, timeout=60)
        assert reply.status_code == 200, reply.text
        return reply.json()

    def computed():
        series = re.findall(
            r'realtime_tokens_total\{.*mode="prefill_compute".*\} (.+)', server.client.get("/metrics").text
        )
        return sum(map(float, series))

    server.flush()
    before = computed()
    long, later, urgent = body(400, 4, 0), body(30, 4, 1), body(30, 4, 2)
    with ThreadPoolExecutor(2) as pool:
        with slowed(server, 0.2):
            first = pool.submit(ask, long)
            wait_until(lambda: first.done() or server.engine()["kv_pool"]["held"] > 100)
            second = pool.submit(ask, later)
            together = [ask(urgent)]
            assert not first.done() and not second.done()
        together = [first.result(), second.result(), *together]
    assert [each["meta_info"]["num_retractions"] for each in together] == [1, 0, 0]
    assert 0 < computed() - before < 400 + 30 + 30 + 30, "what it had computed is still in the cache"
    server.flush()
    assert [each["output_ids"] for each in together] == [
        ask(each)["output_ids"] for each in (long, later, urgent)
    ]
    assert server.engine()["open_accounts"] == 0


def test_a_full_queue_ends_nobody_who_has_run(server):
    """Who has not makes room for the next that is more urgent; where all have, even the most urgent is refused."""

    def ask(priority, tokens):
        body = body_of([6 + priority, 7, 8], {}, tokens) | {"return_logprob": False}
        return server.client.post("/generate", json=body | {"priority": priority}, timeout=60)

    def let_in(priority):
        begun.append(pool.submit(ask, priority, 150))
        wait_until(
            lambda: server.engine()["open_accounts"] == len(begun) or any(each.done() for each in begun)
        )

    begun = []
    with ThreadPoolExecutor(QUEUED + 3) as pool:
        with slowed(server, 0.1):
            for priority in range(0, 2 * QUEUED, 2):
                let_in(priority)
            late = pool.submit(ask, 0, 4)
            wait_until(lambda: server.engine()["waiting_requests"] == QUEUED)
            urgent = pool.submit(ask, 1, 4)
            wait_until(late.done)
            refused = ask(1, 4)  # no more urgent than who waits and has not run
            let_in(2 * QUEUED)
            most_urgent = ask(2 * QUEUED + 2, 4)
        answers = [each.result() for each in begun]
    assert [answer.status_code for answer in answers] == [200] * (QUEUED + 1), [
        answer.text for answer in answers
    ]
    assert [answer.json()["meta_info"]["num_retractions"] for answer in answers] == [1] * QUEUED + [0]
    turned_away = [(reply, "queue is full") for reply in (refused, most_urgent)]
    turned_away += [(each.result(), "aborted by a higher priority request") for each in (late, urgent)]
    for reply, reason in turned_away:
        assert reply.status_code == 503 and reply.headers["retry-after"] and reason in reply.text
    assert server.engine()["open_accounts"] == 0


@pytest.fixture(scope="module")
def two_rows(start_server, tiny_model):
    flags = ("--chunked-prefill-size", "16", "--max-running-requests", "2", "--short-prompt-share", "0")
    return start_server(tiny_model, *FLAGS, *flags)


def bodies_of(asked, policy):
    """Of (prompt tokens, output tokens, priority); prompts of a length are the same text."""
    random, texts, bodies = Random(2), {}, []
    for length, tokens, priority in asked:
        text = texts.setdefault(length, [random.randrange(6, 2000) for _ in range(length)])
        bodies.append(body_of(text, policy, tokens) | {"return_logprob": False, "priority": priority})
    return bodies


def answer_of(server, body):
    reply = server.client.post("/generate", json=body, timeout=60)
    assert reply.status_code == 200, reply.text
    return reply.json()


@contextmanager
def in_turn(server, bodies, pace):
    """Answers to come, each asked for when the request before has come in; when the last has, none of those
    before it has ended.
    """

    def came():
        engine = server.engine()
        return engine["waiting_requests"] + engine["open_accounts"]

    with ThreadPoolExecutor(len(bodies)) as pool, slowed(server, pace):
        begun = []
        for body in bodies:
            begun.append(pool.submit(answer_of, server, body))
            wait_until(lambda: begun[-1].done() or came() == len(begun))
        assert not any(each.done() for each in begun[:-1])
        yield begun


def told(begun, server, bodies):
    """How often each was taken out; its tokens are those of the request alone."""
    together = [each.result() for each in begun]
    server.flush()
    alone = [answer_of(server, body)["output_ids"] for body in bodies]
    assert [each["output_ids"] for each in together] == alone
    assert server.engine()["open_accounts"] == 0
    return [each["meta_info"]["num_retractions"] for each in together]


def test_nobody_makes_room_for_who_waits_for_a_long_prompt(two_rows):
    """Both rows are taken, one by a prompt in chunks: an urgent request that comes has to wait for its last one."""
    bodies = bodies_of([(4, 20, 0), (400, 4, 2), (30, 4, 2)], {})
    two_rows.flush()
    with in_turn(two_rows, bodies, 0.1) as begun:
        begun[0].result()
        assert not begun[1].done() and not begun[2].done()
    assert told(begun, two_rows, bodies) == [0, 0, 0]


@pytest.mark.parametrize(
    ("asked", "policy", "taken_out"),
    [
        # There is a row, and the less urgent one holds the memory.
        ([(1200, 150, 0), (900, 4, 2)], {}, [1, 0]),
        ([(1200, 150, 0), (1500, 4, 2)], {"depth_cutoff": 2}, [0, 0]),
        # There is neither, and who is less urgent has both.
        ([(1200, 150, 0), (400, 60, 2), (700, 4, 2)], {}, [1, 0, 0]),
        # Two read the same text, of which each alone would leave nothing.
        ([(1200, 150, 0), (1200, 150, 0), (900, 4, 2)], {}, [1, 1, 0]),
        # There is neither, and who is as urgent holds the memory.
        ([(1700, 60, 2), (8, 50, 0), (600, 4, 2)], {}, [0, 0, 0]),
    ],
)
def test_room_is_made_for_who_fits_then_and_for_nobody_else(two_rows, asked, policy, taken_out):
    bodies = bodies_of(asked, policy)
    two_rows.flush()
    answer_of(two_rows, body_of(bodies[0]["input_ids"], policy, 1))  # the first is no longer in chunks
    with in_turn(two_rows, bodies, 0.05) as begun:
        pass
    assert told(begun, two_rows, bodies) == taken_out
