"""Nobody waits for the last chunk of a long prompt: neither short prompts, nor those who decode."""

import random
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from greedy import body_of
from waiting import slowed, wait_until

from fathom.runtime.sglang_host.scheduling import short_prompts
from fathom.runtime.sglang_host.scheduling.short_prompts import Beside

CHUNK, PAGE, LONG = 64, 8, 1500
FLAGS = ("--dtype", "float32", "--page-size", str(PAGE), "--chunked-prefill-size", str(CHUNK))
FLAGS += ("--max-total-tokens", "12000", "--tsp-layer", "2", "--propagation-buffer", str(LONG))
POLICIES = ({}, {"depth_cutoff": 2}, {"tsp_rate": 0.3}, {"kv_retention_rate": 0.3}, {"decode": "slow_fast"})


@pytest.fixture(scope="module")
def server(start_server, tiny_model):
    return start_server(tiny_model, *FLAGS)


def asked(rng, policy, length, tokens):
    body = body_of([rng.randrange(6, 2000) for _ in range(length)], policy, tokens)
    return body | {"return_logprob": False}


def ask(server, body):
    reply = server.client.post("/generate", json=body, timeout=60)
    assert reply.status_code == 200, reply.text
    return reply.json()["output_ids"]


@pytest.mark.parametrize("policy", POLICIES)
def test_short_prompts_are_answered_beside_a_long_one(server, policy):
    """Also behind another long one. Each answer is what it is without the others."""
    rng = random.Random(str(policy))

    long = [asked(rng, policy, LONG, 4) for _ in range(2)]
    short = [asked(rng, policy, length, 1) for length in (5, 30, 17, 31)]
    with ThreadPoolExecutor(len(long)) as pool:
        with slowed(server, 0.3):
            first = pool.submit(ask, server, long[0])
            wait_until(lambda: first.done() or server.engine()["open_accounts"])
            second = pool.submit(ask, server, long[1])
            wait_until(lambda: first.done() or server.engine()["waiting_requests"])
            answers = [ask(server, body) for body in short]
            assert not first.done()
        answers += [first.result(), second.result()]
    server.flush()
    assert answers == [ask(server, body) for body in (*short, *long)]


@pytest.mark.parametrize("policy", POLICIES)
def test_answers_go_on_beside_a_long_prompt(server, policy):
    """By a token for each chunk, of which there are 24. Each answer is what it is without the others."""
    rng = random.Random(str(policy))
    bodies = [asked(rng, policy, length, tokens) for length, tokens in ((9, 10), (40, 12), (LONG, 4))]
    with ThreadPoolExecutor(len(bodies)) as pool:
        with slowed(server, 0.3):
            begun = [pool.submit(ask, server, body) for body in bodies[:2]]
            wait_until(lambda: any(a.done() for a in begun) or server.engine()["open_accounts"] == 2)
            long = pool.submit(ask, server, bodies[2])
            answers = [answer.result() for answer in begun]
            assert not long.done()
        answers.append(long.result())
    server.flush()
    assert answers == [ask(server, body) for body in bodies]


class Hashed(SimpleNamespace):
    __hash__ = object.__hash__
    __eq__ = object.__eq__


def paged(tokens):
    return -(-tokens // PAGE) * PAGE


def request(prompt, cached, adapter=None, taken=True, simple=True, beams=None):
    found = Hashed(
        lora_id=adapter, beam_group=beams, full_untruncated_fill_ids=[0] * prompt, taken=taken, simple=simple
    )
    hit = min(cached, prompt - 1)
    found.init_next_round_input = lambda _: setattr(found, "prefix_indices", [0] * hit)
    found.tokens = paged(prompt - hit)
    return found


TURNS = SimpleNamespace(can_schedule=lambda request: request.taken)


def drawn(rng):
    """Who waits: hardly two are alike."""
    adapter, taken = rng.choice([None, None, "a", "b"]), rng.random() < 0.8
    simple, beams = rng.random() < 0.8, rng.choice([None, None, None, "some"])
    return request(rng.randint(1, 120), rng.choice([0, 0, 40]), adapter, taken, simple, beams)


def test_what_is_left_of_a_chunk(monkeypatch):
    """No more than the share, for whole prompts that nobody judges, with a row, no beams, and an adapter that the
    batch has and that takes others; nobody is lost."""
    monkeypatch.setattr(short_prompts, "is_judged", lambda each: not each.simple)
    for seed in range(200):
        rng = random.Random(seed)
        queue = [drawn(rng) for _ in range(rng.choice([0, 1, 5, 20, 40]))]
        chunk, share = rng.randint(-3, 400), rng.choice([0, 0.25, 0.5, 0.9])
        rows, full, ordered = rng.randint(-1, 8), rng.random() < 0.1, rng.random() < 0.3
        turns, own = rng.choice([None, TURNS]), rng.choice([None, None, "a"])
        running = rng.choices([None, "a", "b"], k=rng.randrange(3))
        scheduler = SimpleNamespace(
            waiting_queue=list(queue),
            tree_cache=None,
            enable_priority_scheduling=ordered,
            get_num_allocatable_reqs=lambda running, running_batch, rows=rows: rows,
            lora_drainer=turns,
        )
        adder = SimpleNamespace(
            running_batch=SimpleNamespace(reqs=[request(9, 0, each) for each in running], batch_is_full=full),
            page_size=PAGE,
            rem_chunk_tokens=chunk,
            ceil_paged_tokens=paged,
        )
        monkeypatch.setattr(short_prompts.OPTIONS, "share", share)
        room, count = Beside(scheduler).room(adder, request(500, 0, own))
        beside, left = [], 0 if full else max(chunk * share // PAGE * PAGE, 0)
        for each in queue[: short_prompts.LOOKED_AT] if left else []:
            may = each.lora_id in {own, *running} and (each.taken or turns is None)
            fits = each.tokens <= left and len(beside) < rows - 1
            if may and fits and each.simple and each.beam_group is None:
                beside.append(each)
                left -= each.tokens
            elif ordered:
                break
        assert (room, count) == (sum(each.tokens for each in beside), len(beside)), seed
        assert scheduler.waiting_queue == [*beside, *(each for each in queue if each not in beside)], seed


@pytest.mark.parametrize("taken", [True, False])
def test_a_long_prompt_gives_way_only_to_who_is_let_in(monkeypatch, taken):
    """However urgent: an adapter that is to leave the batch may take no other request."""
    priorities = SimpleNamespace(schedule_low_priority_values_first=False)
    monkeypatch.setattr(short_prompts, "get_schedule", lambda: priorities)
    long, urgent = request(500, 0, "a"), request(30, 0, "a", taken)
    long.priority, urgent.priority = 0, 5
    scheduler = SimpleNamespace(waiting_queue=[urgent], enable_priority_preemption=True, lora_drainer=TURNS)
    adder = SimpleNamespace(
        running_batch=SimpleNamespace(reqs=[]), priority_scheduling_preemption_threshold=1
    )
    assert Beside(scheduler).takes_its_place(adder, long, 0) == taken
