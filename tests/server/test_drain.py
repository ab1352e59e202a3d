"""A real server under overload, with clients that leave or idle, at its end, and when its engine dies.

Three servers are started: each of them is ended by what is tested. About a minute on two cores, half of it waiting.
"""

import contextlib
import http.client
import json
import os
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from waiting import held, one_of_three, slowed, wait_until

DRAIN_SECONDS, CLIENT_SECONDS = 7, 2
SHORT = 100
"""Tokens: less than a second on the tiny model."""
LONG = {"max_new_tokens": 7000, "ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module")
def ending(start_server, tiny_model):
    """A server that takes three requests at a time and is ended by the last test that uses it."""
    options = ("--max-in-flight", "3", "--drain-seconds", str(DRAIN_SECONDS))
    options += ("--client-timeout", str(CLIENT_SECONDS))
    return start_server(tiny_model, "--dtype", "float32", "--max-total-tokens", "40000", *options)


class Idle(http.client.HTTPConnection):
    """A connection that is asked now and then."""

    def ask(self):
        self.request("GET", "/ready")
        answer = self.getresponse()
        answer.read()
        assert answer.status == 200
        self.asked = time.monotonic()
        return self.sock


@pytest.fixture(scope="module")
def idle(ending):
    """One that has been asked once; other tests run while it idles."""
    connection = Idle(ending.url.removeprefix("http://"), timeout=20)
    yield connection, connection.ask()
    connection.close()


def generate(server, tokens=7000, stream=False, **more):
    body = {
        "text": "the key of",
        "stream": stream,
        "sampling_params": {**LONG, "max_new_tokens": tokens},
        **more,
    }
    return server.client.post("/generate", json=body)


@pytest.mark.alone
@one_of_three
@pytest.mark.usefixtures("idle")
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("n", [1, 3])
def test_a_client_that_leaves_frees_everything_within_a_second(ending, stream, n):
    sampling = {**LONG, "n": n, "temperature": 1.0}
    body = {"text": "the job of", "stream": stream, "sampling_params": sampling}
    with (
        ending.client.stream("POST", "/generate", json=body, timeout=None)
        if stream
        else leaving(ending, body)
    ):
        wait_until(lambda: held(ending) > 0, 20)
    assert wait_until(lambda: held(ending) == 0) < 1.0


class leaving:
    """A request whose client reads no answer and hangs up at the end of the block.

    Args:
        missing: how many bytes of the request are never sent.
    """

    def __init__(self, server, body, missing=0):
        raw = json.dumps(body).encode()
        host, port = server.url.removeprefix("http://").split(":")
        self.socket = socket.socket()
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        self.socket.connect((host, int(port)))
        head = f"POST /generate HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        head += f"Content-Length: {len(raw)}\r\n\r\n"
        self.socket.sendall(head.encode() + raw[: len(raw) - missing])

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.socket.close()


def test_overload_is_answered_with_503(ending):
    with ThreadPoolExecutor(3) as pool:
        inside = [pool.submit(generate, ending) for _ in range(3)]
        wait_until(lambda: ending.engine()["open_accounts"] == 3, 20)
        for stream in (False, True):
            late = generate(ending, 4, stream)
            assert late.status_code == 503 and int(late.headers["retry-after"]) >= 1
            assert "the server is busy" in late.json()["error"]["message"]
        assert ending.client.get("/health").status_code == 200
        assert ending.client.post("/abort_request", json={"abort_all": True}).status_code == 200
        assert [future.result().status_code for future in inside] == [200] * 3
    assert generate(ending, 4).status_code == 200


@pytest.mark.parametrize("what", ["send nothing", "read nothing"])
def test_clients_that_stop_give_their_places_back(ending, what):
    """In the midst of a request, or of a stream of more megabytes than all buffers hold, with the socket open."""
    body = {"text": "the key of", "stream": True, "return_logprob": True, "top_logprobs_num": 100}
    body["sampling_params"] = {**LONG, "max_new_tokens": 300}
    missing = 4 if what == "send nothing" else 0

    def busy():
        return generate(ending, 1).status_code == 503

    with contextlib.ExitStack() as clients:

        def full():
            """One client more, until it is they who hold all places, and none that is just being given back."""
            clients.enter_context(leaving(ending, body, missing))
            time.sleep(0.2)
            return busy() and busy()

        wait_until(full)
        wait_until(lambda: not busy(), 40)
        wait_until(lambda: held(ending) == 0)


def test_an_idle_connection_is_left_open_for_longer_than_clients_keep_theirs(idle):
    """Two requests on one connection, with more than the usual 5 s between them."""
    connection, first = idle
    time.sleep(max(0.0, connection.asked + 6 - time.monotonic()))
    assert first is not None and connection.ask() is first


@pytest.mark.alone
def test_sigterm_lets_requests_finish_up_to_the_limit(ending):
    client = ending.client
    assert client.get("/ready").status_code == 200
    with ThreadPoolExecutor(3) as pool:
        whole = pool.submit(generate, ending)
        stream = pool.submit(generate, ending, stream=True)
        wait_until(lambda: ending.engine()["open_accounts"] == 2, 20)
        with slowed(ending, 0.2):
            short = pool.submit(generate, ending, SHORT)
            wait_until(lambda: ending.engine()["open_accounts"] == 3 or short.done(), 20)
            assert not short.done()
        begin = time.monotonic()
        ending.process.send_signal(signal.SIGTERM)
        wait_until(lambda: client.get("/ready").status_code == 503)
        assert client.get("/health").status_code == 503
        refused = generate(ending, 4)
        assert refused.status_code == 503 and int(refused.headers["retry-after"]) >= 1
        assert "shutting down" in refused.json()["error"]["message"]
        assert short.result().status_code == 200
        assert short.result().json()["meta_info"]["completion_tokens"] == SHORT
        cut = whole.result()
        took = time.monotonic() - begin
        assert cut.status_code == 503 and "cut off" in cut.json()["error"]["message"]
        assert DRAIN_SECONDS < took < DRAIN_SECONDS + 4
        assert "cut off" in stream.result().text and stream.result().text.rstrip().endswith("data: [DONE]")
    assert ending.process.wait(20) == 0
    assert f"2 generations were cut off {DRAIN_SECONDS} s after SIGTERM" in ending.log.read_text()


def test_a_dead_engine_ends_the_process_with_a_reason(start_server, tiny_model):
    server = start_server(tiny_model, "--dtype", "float32", "--max-total-tokens", "9000")
    engine = server.engine()["pid"]
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(generate, server)
        wait_until(lambda: held(server) > 0, 20)
        os.kill(engine, signal.SIGKILL)
        assert server.process.wait(20) == 1
        with pytest.raises(httpx.TransportError):
            answer.result()
    log = server.log.read_text()
    assert "crashed with exit code -9" in log
    assert log.splitlines()[-1] == "fathom serve: error: an engine process ended; its own report is above"


def test_sigterm_is_heard_when_the_engine_hangs(start_server, tiny_model):
    """As Kubernetes sends it once /health has failed: SGLang waits for the engine, and ends it."""
    flags = ("--dtype", "float32", "--max-total-tokens", "9000", "--drain-seconds", "1")
    # By default /health fails after 20 s. It asks itself past a proxy.
    proxy = {"http_proxy": "http://127.0.0.1:9", "no_proxy": "elsewhere"}
    env = proxy | {"SGLANG_HEALTH_CHECK_TIMEOUT": "3"}
    server = start_server(tiny_model, *flags, env=env, script=Path(__file__).parents[1] / "hasty.py")
    os.kill(server.engine()["pid"], signal.SIGSTOP)
    assert "\nfathom:generations_in_flight 0.0" in server.client.get("/metrics").text
    waiting = threading.Thread(
        target=lambda: server.client.post("/generate", json={"text": "a"}), daemon=True
    )
    waiting.start()
    assert server.client.get("/health").status_code == 503
    assert "\nfathom:generations_in_flight 1.0" in server.client.get("/metrics").text
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(30) == 0
