"""Retention and drafting together: a draft reads on in a prompt whose KV the cache may evict meanwhile."""

import random
from concurrent.futures import ThreadPoolExecutor

import pytest
from greedy import body_of
from noisy import draft_flags
from waiting import slowed, wait_until

POOL = 1600
RETAIN = {"kv_retention_rate": 0.5, "speculative": True}
POLICIES = [RETAIN, RETAIN | {"decode": "slow_fast"}, {"kv_retention_rate": 0.3}, {"speculative": True}, {}]
SERVERS = {"roomy": (1, 4), "tight": (4, 1)}
"""Tokens per page; virtual slots for each token that fits at all depths."""


@pytest.fixture(scope="module")
def servers(start_server, tiny_model, close_draft):
    def start(page, factor):
        flags = ("--max-total-tokens", POOL, "--page-size", page, "--shallow-factor", factor)
        flags += ("--dtype", "float32", "--chunked-prefill-size", 256, "--schedule-conservativeness", 0.2)
        flags += ("--enable-priority-scheduling", "--priority-scheduling-preemption-threshold", 0)
        return start_server(tiny_model, *map(str, flags), *draft_flags(close_draft, 0))

    return {name: start(*sizes) for name, sizes in SERVERS.items()}


@pytest.fixture(autouse=True)
def nothing_stays(servers):
    yield
    for server in servers.values():
        server.flush()
        wait_until(lambda server=server: server.engine()["kv_pool"]["held"] == 0)


def body(seed, length, policy, tokens, end=()):
    rng = random.Random(seed)
    prompt = [rng.randrange(6, 2000) for _ in range(length)]
    return body_of([*prompt, *end], policy, tokens) | {"return_logprob": False}


def ask(server, asked):
    reply = server.client.post("/generate", json=asked)
    assert reply.status_code == 200, reply.text
    return reply.json()


def said(answer, *counts):
    """The tokens, and counts of the account."""
    return answer["output_ids"], [answer["meta_info"]["fathom"][name] for name in counts]


def beside(server, long, others):
    """One that runs, and the others' answers meanwhile."""
    with ThreadPoolExecutor(1) as pool, slowed(server, 0.02):
        answer = pool.submit(ask, server, long)
        wait_until(lambda: server.engine()["kv_pool"]["depth_pages"]["evictable"])
        meanwhile = [ask(server, each) for each in others]
        assert not answer.done()
        cached = server.engine()["kv_pool"]["cached"]
        long = answer.result()
    assert long["meta_info"]["num_retractions"] == 0
    return [long, *meanwhile], cached


@pytest.mark.parametrize("policy", POLICIES[:2])
def test_the_cache_gives_way_and_the_draft_reads_on(servers, policy):
    """Beside the prompt's own KV there would be no room for the other one's, and no guess that holds without it."""
    server, asked = servers["roomy"], [body(1, 900, policy, 120), body(2, 600, {"speculative": True}, 4)]
    together, cached = beside(server, asked[0], asked[1:])
    assert cached < 1400, "all of both prompts is cached"
    server.flush()
    alone, counts = [ask(server, each) for each in asked], ("accepted_tokens", "decode_steps")
    assert alone[0]["meta_info"]["fathom"]["accepted_tokens"] > 5
    assert [said(each, *counts) for each in together] == [said(each, *counts) for each in alone]


def test_slots_come_from_where_nobody_reads(servers):
    """Of what is cached, the prompt that the draft still reads is the oldest."""
    server, asked = servers["tight"], [body(5, 900, RETAIN, 120), body(6, 300, {}, 4), body(7, 400, {}, 4)]
    together, _ = beside(server, asked[0], asked[1:])
    server.flush()
    assert list(map(said, together)) == [said(ask(server, each)) for each in asked]


def test_who_is_more_urgent_takes_one_of_two_out(servers):
    """Each holds the slots of its whole prompt, and memory for a tenth."""
    server, policy = servers["tight"], RETAIN | {"kv_retention_rate": 0.1}
    asked = [body(seed, 700, policy, 80) | {"priority": 0} for seed in (8, 9)]
    urgent = body(10, 600, {}, 4) | {"priority": 1}
    with ThreadPoolExecutor(2) as pool:
        with slowed(server, 0.05):
            longs = [pool.submit(ask, server, each) for each in asked]
            wait_until(lambda: server.engine()["kv_pool"]["depth_pages"]["evictable"] >= 1400)
            together = [ask(server, urgent)]
            assert not any(each.done() for each in longs)
        together += [each.result() for each in longs]
    assert sum(each["meta_info"]["num_retractions"] for each in together) == 1
    server.flush()
    assert list(map(said, together)) == [said(ask(server, each)) for each in (urgent, *asked)]


@pytest.mark.parametrize("name", SERVERS)
def test_a_second_question_finds_the_prompt(servers, name):
    first, second = (body(3, 600, RETAIN, 20, end) for end in ([9, 10, 11], [12, 13, 14, 15]))
    found = [ask(servers[name], each) for each in (first, second)]
    assert [each["meta_info"]["cached_tokens"] >= 590 for each in found] == [False, True]
    servers[name].flush()
    assert said(ask(servers[name], second)) == said(found[1])


@pytest.mark.parametrize("name", SERVERS)
def test_a_crowd_over_few_documents(servers, name):
    """Requests end, are given up and taken back while others lean on the same pages, in a pool that is full."""
    server, rng = servers[name], random.Random(4)
    asked = [
        body(n % 3, rng.choice([150, 400, 401]), POLICIES[n % 5], rng.choice([1, 20, 60]), [n])
        for n in range(24)
    ]

    def one(number):
        if number % 6 != 5:
            return said(ask(server, asked[number]))
        with server.client.stream("POST", "/generate", json=asked[number] | {"stream": True}) as lines:
            for count, _ in enumerate(lines.iter_lines()):
                if count >= number % 4:
                    return None

    with ThreadPoolExecutor(10) as pool:
        together = list(pool.map(one, range(len(asked))))
    server.flush()
    for each, answer in zip(asked, together, strict=True):
        assert answer is None or said(ask(server, each)) == answer
