"""Nobody waits for the last chunk of a long prompt: neither short prompts, nor those who decode."""

import random
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from greedy import body_of
from hypothesis import given
from hypothesis import strategies as st
from waiting import slowed, wait_until

from fathom.runtime.sglang_host import short_prompts
from fathom.runtime.sglang_host.short_prompts import Beside

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


def request(prompt, cached, adapter=None, taken=True):
    found = Hashed(lora_id=adapter, beam_group=None, full_untruncated_fill_ids=[0] * prompt, taken=taken)
    found.init_next_round_input = lambda _: setattr(found, "prefix_indices", [0] * min(cached, prompt - 1))
    return found


REQUESTS = st.builds(
    request,
    st.integers(1, 200),
    st.sampled_from([0, 0, 40]),
    st.sampled_from([None, None, "a"]),
    st.sampled_from([True, True, False]),
)
TURNS = SimpleNamespace(can_schedule=lambda request: request.taken)


@given(
    queue=st.lists(REQUESTS, max_size=40),
    chunk=st.integers(-3, 160),
    share=st.sampled_from([0, 0.25, 0.5, 0.9]),
    rows=st.integers(-1, 8),
    full=st.booleans(),
    ordered=st.booleans(),
    turns=st.sampled_from([None, TURNS]),
)
def test_what_is_left_of_a_chunk(queue, chunk, share, rows, full, ordered, turns):
    """No more than the share, for whole prompts with a row, whose adapter the batch has and that takes others;
    nobody is lost."""
    scheduler = SimpleNamespace(
        waiting_queue=list(queue),
        tree_cache=None,
        enable_priority_scheduling=ordered,
        get_num_allocatable_reqs=lambda running, running_batch: rows,
        lora_drainer=turns,
    )
    adder = SimpleNamespace(
        running_batch=SimpleNamespace(reqs=[], batch_is_full=full), page_size=PAGE, rem_chunk_tokens=chunk
    )
    adder.ceil_paged_tokens = lambda tokens: -(-tokens // PAGE) * PAGE
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(short_prompts.OPTIONS, "share", share)
        patch.setattr(short_prompts, "is_judged", lambda _: False)
        room, count = Beside(scheduler).room(adder, request(500, 0))
    assert room % PAGE == 0 and 0 <= room <= max(chunk * share, 0)
    assert set(scheduler.waiting_queue) == set(queue) and len(scheduler.waiting_queue) == len(queue)
    beside, rest = [], room
    for each in scheduler.waiting_queue:
        if rest == 0:
            break
        rest -= adder.ceil_paged_tokens(len(each.full_untruncated_fill_ids) - len(each.prefix_indices))
        beside.append(each)
    assert (
        rest == 0 and len(beside) == count <= max(rows - 1, 0) and {each.lora_id for each in beside} <= {None}
    )
    assert turns is None or all(each.taken for each in beside)
    assert not (room and full)
    assert [each for each in queue if each not in beside] == scheduler.waiting_queue[len(beside) :]
    if ordered:
        assert scheduler.waiting_queue == queue


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
