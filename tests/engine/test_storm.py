"""Hundreds of requests, a third of them dropped by their clients at random moments: nothing may be left behind."""

import contextlib
import random
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import psutil
import pytest
from waiting import wait_until

REQUESTS = 300
ABORTED = 1 / 3
PROMPT = [[11 + i % 50 for i in range(700)]]


def ask(server, prompt):
    sampling = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}
    body = {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True}
    output = server.client.post("/generate", json=body).json()[0]
    return output["output_ids"], [entry[0] for entry in output["meta_info"]["output_token_logprobs"]]


def one_request(url: str, seed: int) -> str:
    """Stream one request; one that is to be aborted asks for far more than it waits for and hangs up."""
    rng = random.Random(seed)
    prompt = [rng.randrange(6, 1500) for _ in range(rng.choice([3, 40, 200, 600]))]
    patience = rng.uniform(0, 1.5) if rng.random() < ABORTED else None
    tokens = rng.randint(2, 30) if patience is None else 6000
    sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    body = {"input_ids": prompt, "sampling_params": sampling, "stream": True}
    begin = time.monotonic()
    timeout = httpx.Timeout(120, read=patience if patience is not None else 120)
    with (
        contextlib.suppress(httpx.TimeoutException),
        httpx.Client(base_url=url, timeout=timeout, verify=False) as client,
        client.stream("POST", "/generate", json=body) as response,
    ):
        assert response.status_code == 200
        for line in response.iter_lines():
            if patience is not None and time.monotonic() - begin > patience:
                return "aborted"
            if line == "data: [DONE]":
                return "finished"
    return "aborted"


def settle(server) -> dict:
    """The engine's own account once nothing runs any more."""

    def settled() -> bool:
        pool = server.engine()["kv_pool"]
        return pool["held"] == 0 and pool["free"] + pool["cached"] == pool["tokens"]

    wait_until(settled, 60, server.engine)
    return server.engine()


def storm(server, seeds) -> list[str]:
    with ThreadPoolExecutor(12) as pool:
        return list(pool.map(lambda seed: one_request(server.url, seed), seeds))


def assert_metrics_say_that_nothing_is_held(server):
    """They are written a moment after the engine has come to rest."""

    def left() -> dict[str, float]:
        series = server.series("fathom:kv_")
        holding = [name for name in series if 'state="held"' in name]
        assert len(holding) > 1
        return {name: series[name] for name in (*holding, "fathom:kv_held_bytes", "fathom:kv_dense_bytes")}

    wait_until(lambda: not any(left().values()), 10, left)


@pytest.mark.timeout(400)
def test_a_storm_of_aborted_requests_leaves_nothing_behind(server):
    want_tokens, want_logprobs = ask(server, PROMPT)
    outcomes = storm(server, range(REQUESTS // 3))
    engine = settle(server)
    process = psutil.Process(engine["pid"])
    memory = process.memory_info().rss
    outcomes += storm(server, range(REQUESTS // 3, REQUESTS))
    engine = settle(server)
    assert outcomes.count("finished") + outcomes.count("aborted") == REQUESTS
    assert outcomes.count("aborted") > REQUESTS / 4
    assert engine["pid"] == process.pid
    assert process.memory_info().rss - memory < 64 << 20
    assert engine["open_accounts"] == 0
    assert_metrics_say_that_nothing_is_held(server)
    tokens, logprobs = ask(server, PROMPT)
    assert tokens == want_tokens
    assert logprobs == pytest.approx(want_logprobs, abs=1e-4)
    log = server.log.read_text()
    assert "leak" not in log.lower()
    assert "Traceback" not in log
