"""Depth pages in a running engine: what fits at once, what never fits, and that nothing is left behind."""

import contextlib
import random
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.managers.scheduler import Scheduler
from waiting import slowed, wait_until

from fathom.runtime.sglang_host.memory.kv_pool import Layout
from fathom.runtime.sglang_host.scheduler import FathomScheduler

PAGE = 16
LONG, ANSWER = 4096, 120
LAYERS = 4


def generate(server, prompt, policy, new_tokens=ANSWER):
    sampling = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
    body = {"input_ids": prompt, "sampling_params": sampling} | ({"fathom": policy} if policy else {})
    return server.client.post("/generate", json=body)


def random_prompts(count, length, seed):
    rng = random.Random(seed)
    return [[rng.randrange(6, 2000) for _ in range(length)] for _ in range(count)]


def pages(server):
    return server.engine()["kv_pool"]["depth_pages"]


def idle(server):
    """The pages once nothing runs any more."""
    wait_until(lambda: (now := pages(server))["open_rows"] == now["held"] == 0, 60, lambda: pages(server))
    found = pages(server)
    assert found["free"] + found["cached"] == found["total"]
    assert found["evictable"] == found["cached"]
    return found


def most_at_once(server, prompts, policy, expected):
    """Answers to all prompts, which arrive together, and the largest number that held pages at one time.

    Args:
        expected: the number until which steps are slow, so that it is seen.
    """
    most = 0
    with ThreadPoolExecutor(1) as pool, contextlib.ExitStack() as slow:
        slow.enter_context(slowed(server, 0.1))
        answers = pool.submit(generate, server, prompts, policy)
        while not answers.done():
            most = max(most, pages(server)["open_rows"])
            if most == expected:
                slow.close()
    return answers.result().json(), most


@pytest.mark.parametrize(("policy", "fit"), [(None, 4), ({"depth_cutoff": 3}, 5), ({"depth_cutoff": 2}, 7)])
def test_shallow_requests_fit_in_larger_numbers(roomy_server, policy, fit):
    """A pool for M = 4 dense requests of 4,096 tokens takes floor(M / 0.75) = 5 at 3/4 of the layers.

    At half of the layers floor(M / 0.5) = 8 would need room for no generated token at all: 7 fit.
    """
    roomy_server.flush()
    answers, most = most_at_once(roomy_server, random_prompts(fit + 1, LONG, seed=fit), policy, fit)
    assert most == fit
    for answer in answers:
        meta = answer["meta_info"]
        assert meta["num_retractions"] == 0
        cutoff = policy["depth_cutoff"] if policy else LAYERS
        tokens = LONG + ANSWER - 1
        deep = LONG if policy is None else 2
        expected = cutoff * -(-tokens // PAGE) + (LAYERS - cutoff) * -(-(deep + ANSWER - 1) // PAGE)
        assert meta["fathom"]["kv_bytes"] == expected * pages(roomy_server)["page_bytes"]
    idle(roomy_server)


def kv_series(server):
    """From /metrics: pages held and cached per span, of the pool, bytes held, and bytes that dense tokens hold."""
    found = server.series("fathom:kv_")
    held, cached = (
        tuple(found[f'fathom:kv_pages{{span="{span + 1}",state="{state}"}}'] for span in range(LAYERS))
        for state in ("held", "cached")
    )
    names = ("fathom:kv_pool_pages", "fathom:kv_held_bytes", "fathom:kv_dense_bytes")
    return held, cached, *(found[name] for name in names)


def test_metrics_have_what_each_span_holds(roomy_server):
    """Of a prompt at half of the layers, the spans above hold two tokens; once it has ended, none holds any."""
    roomy_server.flush()
    tokens = 400
    size = pages(roomy_server)["page_bytes"]
    total = pages(roomy_server)["total"]
    running = set()
    for generated in range(tokens):
        low, high = -(-(LONG + generated) // PAGE), -(-(2 + generated) // PAGE)
        held = (low, low, high, high)
        running.add((held, (0,) * LAYERS, total, sum(held) * size, LAYERS * low * size))
    (prompt,) = random_prompts(1, LONG, seed=5)
    with ThreadPoolExecutor(1) as pool, slowed(roomy_server, 0.05):
        answer = pool.submit(generate, roomy_server, prompt, {"depth_cutoff": 2}, tokens)
        wait_until(lambda: kv_series(roomy_server) in running, show=lambda: kv_series(roomy_server))
    assert answer.result().json()["meta_info"]["fathom"]["kv_bytes"] in {item[3] for item in running}

    at_rest = idle(roomy_server)
    wait_until(lambda: kv_series(roomy_server) == ((0,) * LAYERS, tuple(at_rest["per_span"]), total, 0, 0))
    assert at_rest["per_span"][0] >= LONG // PAGE and at_rest["per_span"][2:] == [0, 0]
    roomy_server.flush()
    wait_until(lambda: kv_series(roomy_server) == ((0,) * LAYERS, (0,) * LAYERS, total, 0, 0))


def test_a_prompt_that_can_never_fit_is_refused_in_pages(pressed_server):
    (prompt,) = random_prompts(1, 5000, seed=1)
    refusal = generate(pressed_server, prompt, None, 4)
    assert refusal.status_code == 400
    needed, held = LAYERS * -(-5001 // PAGE) + LAYERS + 1, LAYERS * 4000 // PAGE
    message = refusal.json()["error"]["message"]
    assert f"5000 tokens needs {needed} KV pages" in message
    assert f"the pool has {held}" in message
    # The same prompt at half of the layers fits, and so do as many generated tokens as are left.
    answer = generate(pressed_server, prompt, {"depth_cutoff": 2}, 8).json()
    assert len(answer["output_ids"]) == 8
    (longer,) = random_prompts(1, 8000, seed=2)
    assert "KV pages" in generate(pressed_server, longer, {"depth_cutoff": 2}, 8).json()["error"]["message"]
    idle(pressed_server)


def test_a_full_pool_takes_requests_back_and_answers_the_same(pressed_server):
    """Twelve requests of 400 tokens and 120 generated ones in a pool for seven: some are taken back."""
    policies = [None, {"depth_cutoff": 3}, {"depth_cutoff": 2, "anchors": "none"}]
    prompts = random_prompts(12, 400, seed=4)
    cases = [(prompt, policies[i % 3]) for i, prompt in enumerate(prompts)]
    with ThreadPoolExecutor(12) as pool:
        together = list(pool.map(lambda case: generate(pressed_server, *case).json(), cases))
    alone = [generate(pressed_server, *case).json() for case in cases]
    assert [a["output_ids"] for a in together] == [a["output_ids"] for a in alone]
    idle(pressed_server)


def test_a_storm_of_mixed_depths_leaves_nothing_behind(pressed_server):
    """Streams of all depths, a third dropped by their clients at random moments."""

    def one(seed):
        rng = random.Random(seed)
        policy = rng.choice(
            [None, {"depth_cutoff": 1}, {"depth_cutoff": 2}, {"depth_cutoff": 3, "anchors": "none"}]
        )
        shared = random_prompts(1, 200, seed=rng.randrange(3))[0]
        prompt = shared[: rng.choice([3, 64, 200])] + random_prompts(1, rng.choice([1, 40, 500]), seed)[0]
        sampling = {"max_new_tokens": rng.randint(2, 60), "ignore_eos": True}
        body = {"input_ids": prompt, "sampling_params": sampling, "stream": True}
        leaves = seed % 3 == 0
        patience = rng.uniform(0, 1.0) if leaves else 60
        most = rng.randrange(sampling["max_new_tokens"]) if leaves else 1000
        limits = httpx.Timeout(60, read=patience)
        try:
            with (
                httpx.Client(base_url=pressed_server.url, timeout=limits, verify=False) as client,
                client.stream(
                    "POST", "/generate", json=body | ({"fathom": policy} if policy else {})
                ) as stream,
            ):
                for events, line in enumerate(filter(None, stream.iter_lines())):
                    if line == "data: [DONE]":
                        return "finished"
                    if events >= most:
                        return "dropped"
        except httpx.TimeoutException:
            pass
        return "dropped"

    with ThreadPoolExecutor(12) as pool:
        outcomes = list(pool.map(one, range(120)))
    assert outcomes.count("finished") >= 70
    assert outcomes.count("dropped") >= 10
    found = idle(pressed_server)
    assert found["cached"] > 0
    pressed_server.flush()
    assert idle(pressed_server)["free"] == found["total"]
    assert pressed_server.process.poll() is None


def test_no_more_shallow_requests_are_let_in_than_dense_ones(narrow_server):
    """At half of the layers seven would fit in the same memory."""
    answers, most = most_at_once(narrow_server, random_prompts(7, LONG, seed=1), {"depth_cutoff": 2}, 4)
    assert most == 4
    assert [answer["meta_info"]["completion_tokens"] for answer in answers] == [ANSWER] * 7
    idle(narrow_server)


def test_a_full_pool_answers_the_same(narrow_server):
    """Shallow, pruned and dense requests, cached prefixes among them, in turns that virtual slots decide."""
    policies = [{"depth_cutoff": 1}, {"tsp_rate": 0.3, "kv_retention_rate": 0.1}, {"depth_cutoff": 2}, None]
    prompts = random_prompts(6, 2500, seed=2)
    cases = [(prompts[i % 6], policies[i % 4]) for i in range(24)]
    with ThreadPoolExecutor(24) as pool:
        together = list(pool.map(lambda case: generate(narrow_server, *case, 60).json(), cases))
    alone = [generate(narrow_server, *case, 60).json() for case in cases[:12]]
    assert [a["output_ids"] for a in together[:12]] == [a["output_ids"] for a in alone]
    assert [a["output_ids"] for a in together[12:]] == [a["output_ids"] for a in alone]
    found = idle(narrow_server)
    narrow_server.flush()
    assert idle(narrow_server)["free"] == found["total"]


def test_the_longest_shallow_answers_are_let_in(start_server, tiny_model):
    """Of a pool of 40 pages SGLang's admission wants one to spare, of those that requests are known by too."""
    pool = ("--max-total-tokens", "640", "--page-size", str(PAGE), "--shallow-factor", "1")
    server = start_server(tiny_model, "--dtype", "float32", *pool)
    for length in (300, 607):
        (prompt,) = random_prompts(1, length, seed=length)
        answer = generate(server, prompt, {"depth_cutoff": 1}, 2000).json()
        assert length + len(answer["output_ids"]) == 38 * PAGE
    refusal = generate(server, [*prompt, 7], {"depth_cutoff": 1}, 1)
    assert refusal.status_code == 400
    assert "needs 41 virtual KV pages of 16 tokens; the pool has 40" in refusal.json()["error"]["message"]
    idle(server)


def test_an_empty_batch_is_never_full(monkeypatch):
    """Or nobody is let in again, once a request that found no room has left the queue."""
    monkeypatch.setattr(Scheduler, "get_next_batch_to_run", lambda self, running, last: running)
    scheduler = object.__new__(FathomScheduler)
    scheduler.enable_overlap = False
    assert not scheduler.get_next_batch_to_run(ScheduleBatch(reqs=[], batch_is_full=True), None).batch_is_full


def test_a_prompt_without_room_for_its_name_is_refused(narrow_server):
    (prompt,) = random_prompts(1, 18000, seed=3)
    refusal = generate(narrow_server, prompt, {"depth_cutoff": 1}, 4)
    assert refusal.status_code == 400 and "18000 tokens" in refusal.json()["error"]["message"]


def test_a_draft_on_a_gpu_has_kv_for_twice_the_dense_tokens():
    asked = Layout(shallow_factor=3)
    assert (Layout().virtual_slots(8, False), Layout().virtual_slots(8, True)) == (8, 2)
    assert asked.virtual_slots(8, False) == asked.virtual_slots(8, True) == 3
    assert Layout(shallow_factor=9).virtual_slots(4, True) == 4
