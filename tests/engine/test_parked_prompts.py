"""A prompt between two chunks, beside others that decode meanwhile, in a pool that has no room for all of them."""

import random
from concurrent.futures import ThreadPoolExecutor

import pytest
from conftest import OVERLAPPING
from greedy import body_of
from noisy import draft_flags
from waiting import slowed, wait_until

POOL = 1008
PROMPTS = {1: 910, 4: 700}
"""By how many decode: a prompt that is let in beside them as they begin. Until it is computed, they need more than
is left."""
CASES = [(1, {}), (4, {"speculative": True})]
WAYS = {
    "a step between": ("--prefill-decode-interval", "1"),
    "three steps between": ("--prefill-decode-interval", "3", "--disable-radix-cache"),
    "overlap": ("--prefill-decode-interval", "1", "--num-continuous-decode-steps", "4"),
    "mixed": ("--enable-mixed-chunk",),
}


@pytest.fixture(scope="module", params=WAYS)
def server(request, start_server, tiny_model, close_draft):
    """Of running requests' tokens, hardly any are reckoned with when a prompt is let in."""
    flags = ("--max-total-tokens", str(POOL), "--chunked-prefill-size", "8", "--page-size", "4")
    flags += ("--schedule-conservativeness", "0.01", "--dtype", "float32")
    flags += (*WAYS[request.param], *draft_flags(close_draft))
    return start_server(tiny_model, *flags, script=OVERLAPPING if request.param == "overlap" else None)


def ask(server, body):
    reply = server.client.post("/generate", json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


@pytest.mark.parametrize(("others", "policy"), CASES)
def test_everybody_is_answered_as_alone(server, others, policy):
    """Nobody is ended, and no step finds the pool full."""
    rng = random.Random(f"{policy} {others}")

    def asked(length, tokens, policy):
        prompt = [rng.randrange(6, 2000) for _ in range(length)]
        return body_of(prompt, policy, tokens) | {"return_logprob": False}

    running = [asked(4, 400 if others == 1 else 180, {}) for _ in range(others)]
    long = asked(PROMPTS[others], 6, policy)
    bodies = [*running, long]
    with ThreadPoolExecutor(len(bodies)) as pool:
        with slowed(server, 0.3):
            begun = [pool.submit(ask, server, body) for body in running]
            wait_until(lambda: server.engine()["open_accounts"] == others)
            begun.append(pool.submit(ask, server, long))
            wait_until(lambda: server.engine()["open_accounts"] == others + 1)
        together = [each.result() for each in begun]
    assert together[-1]["meta_info"]["num_retractions"]
    engine = server.engine()
    assert engine["open_accounts"] == 0 and engine["kv_pool"]["held"] == 0
    server.flush()
    alone = [ask(server, body) for body in bodies]
    assert [each["output_ids"] for each in together] == [each["output_ids"] for each in alone]
