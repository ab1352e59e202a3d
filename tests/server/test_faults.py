"""One running server under what clients do to it: they vanish, send nonsense, and read slowly.

After each test nothing is held and the next request is answered as before; the last test ends the server, which
takes long where the HTTP process still waits for anything. About two minutes on two cores, 40 s of
them for the 10,000 requests.
"""

import asyncio
import http.client
import itertools
import json
import random
import re
import signal
import socket
import struct
import threading
import time
import traceback
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
from fastapi import FastAPI
from waiting import held, wait_until

from fathom.runtime.config import SPECS
from fathom.server.answers import errors
from fathom.server.middleware import PolicyMiddleware
from fathom.server.requests.context import Face

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES, GENERATE = "/v1/responses", "/v1/messages", "/generate"
ROUTES = [CHAT, COMPLETIONS, RESPONSES, MESSAGES, GENERATE]
ASK = {"text": "the key of", "sampling_params": {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True}}
MODEL = "tiny"


@pytest.fixture(scope="module")
def faulty(start_server, tiny_model):
    """The server that all tests of this file use, and that the last one ends."""
    options = ("--max-total-tokens", "100000", "--served-model-name", MODEL, "--drain-seconds", "60")
    return start_server(tiny_model, "--dtype", "float32", *options)


@pytest.fixture(autouse=True)
def nothing_leaks(faulty):
    """Around each test: the same answer, empty pools, and no connection, process or memory left behind."""
    process, expected = psutil.Process(faulty.process.pid), answer(faulty)
    before, memory, files = processes(process), process.memory_info().rss, process.num_fds()
    yield
    if faulty.process.poll() is not None:
        return
    assert answer(faulty) == expected
    wait_until(lambda: held(faulty) == 0)
    pages = faulty.engine()["kv_pool"]["depth_pages"]
    assert pages["held"] == 0 and pages["free"] + pages["cached"] == pages["total"], pages
    assert processes(process) == before
    wait_until(lambda: process.num_fds() <= files + 8)
    assert process.memory_info().rss - memory < 300 << 20


def processes(parent):
    return sorted([parent.pid, *(child.pid for child in parent.children(recursive=True))])


def answer(server):
    """A greedy answer with its log-probabilities, rounded to what rounding in another batch leaves alone."""
    got = server.client.post("/generate", json={**ASK, "return_logprob": True})
    assert got.status_code == 200, got.text
    meta = got.json()["meta_info"]
    return got.json()["text"], [round(entry[0], 3) for entry in meta["output_token_logprobs"]]


def counted(server, outcome):
    found = re.findall(
        rf'fathom:requests_total{{[^}}]*outcome="{outcome}"[^}}]*}} (\S+)', server.client.get("/metrics").text
    )
    return sum(map(float, found))


def address(server):
    host, port = server.url.removeprefix("http://").split(":")
    return host, int(port)


def raw(path, body: bytes, headers="Content-Type: application/json") -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: here\r\n{headers}\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


VANISHING = 200
LONG = 480
"""Tokens of an answer, none of which may end before the last client has had an event; the pool holds them all."""


def test_200_clients_that_vanish_in_mid_stream(faulty):
    """Half of them close properly, half reset the connection; all at once, when each has had an event."""
    aborted = counted(faulty, "abort")
    body = {"stream": True, "sampling_params": {"max_new_tokens": LONG, "ignore_eos": True, "temperature": 1}}

    async def one(number, everyone):
        reader, writer = await asyncio.open_connection(*address(faulty))
        text = json.dumps({**body, "text": f"the job of {number}"}).encode()
        writer.write(raw(GENERATE, text))
        seen = b""
        while b"data:" not in seen:
            seen += await reader.read(1024)
        everyone.release()
        await everyone.gone.wait()
        if number % 2:
            linger = struct.pack("ii", 1, 0)
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        writer.close()

    async def crowd():
        everyone = asyncio.Semaphore(0)
        everyone.gone = asyncio.Event()
        clients = [asyncio.ensure_future(one(number, everyone)) for number in range(VANISHING)]
        for _ in clients:
            await asyncio.wait_for(everyone.acquire(), 120)
        assert faulty.engine()["open_accounts"] == VANISHING
        everyone.gone.set()
        await asyncio.gather(*clients)

    asyncio.run(crowd())
    assert wait_until(lambda: held(faulty) == 0) < 10
    wait_until(lambda: counted(faulty, "abort") - aborted == VANISHING)


def test_clients_that_vanish_before_they_have_sent_everything(faulty):
    whole = raw(GENERATE, json.dumps(ASK).encode())
    for length in range(1, len(whole), 7):
        with socket.create_connection(address(faulty)) as connection:
            connection.sendall(whole[:length])


NOT_A_REQUEST = {
    "nothing": b"",
    "half": b'{"text": "a", "sampl',
    "text": b"hello",
    "a list": b"[]",
    "null": b"null",
    "a number": b"1e999",
    "two values": b'{"text": "a"}{"text": "b"}',
    "a comma too many": b'{"text": "a",}',
    "not a number": b'{"temperature": NaN}',
    "infinity": b'{"temperature": 1e999}',
    "not UTF-8": b'{"text": "\xff\xfe"}',
    "half a character": b'{"text": "\\ud800"}',
    "a byte order mark": b'\xef\xbb\xbf{"text": "a"}',
    "zero bytes": b"\x00" * 64,
    "depth": b'{"a":' * 20_000 + b"1" + b"}" * 20_000,
    "an open depth": b"[" * 100_000,
    "a form": b"text=hello&max_new_tokens=3",
}


@pytest.mark.parametrize("route", ROUTES)
def test_what_is_no_json_object_is_refused(faulty, route):
    for name, body in NOT_A_REQUEST.items():
        got = faulty.client.post(route, content=body, headers={"content-type": "application/json"})
        assert got.status_code == 400, (name, got.status_code, got.text)
        assert problems(route, 400, got.content) == "", name


@pytest.mark.parametrize(
    "head",
    [
        "POST /generate HTTP/1.1\r\nHost: here\r\nContent-Length: many\r\n\r\n",
        "POST /generate HTTP/1.1\r\nHost: here\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        "POST /generate HTTP/9.9\r\n\r\n",
        "\x00\x01\x02\x03\r\n\r\n",
        "POST /generate HTTP/1.1\r\nHost: here\r\nX: " + "a" * 200_000 + "\r\n\r\n",
    ],
    ids=["length", "chunk", "version", "binary", "long header"],
)
def test_what_is_no_http_is_refused(faulty, head):
    with socket.create_connection(address(faulty), timeout=20) as connection:
        got = b""
        try:
            connection.sendall(head.encode())
            connection.shutdown(socket.SHUT_WR)
            got = connection.recv(4096)
        except TimeoutError:
            raise
        except OSError:  # it hung up before it had heard all
            pass
    assert got == b"" or re.match(rb"HTTP/1\.1 4\d\d ", got), got


FUZZED, SENDERS, SEED = 10_000, 8, 1
MESSAGE = [{"role": "user", "content": "Where?"}]
BASE = {
    CHAT: {"model": MODEL, "messages": MESSAGE, "max_tokens": 1},
    COMPLETIONS: {"model": MODEL, "prompt": "Where?", "max_tokens": 1},
    RESPONSES: {"model": MODEL, "input": "Where?", "max_output_tokens": 1},
    MESSAGES: {"model": MODEL, "messages": MESSAGE, "max_tokens": 1},
    GENERATE: {"text": "Where?", "sampling_params": {"max_new_tokens": 1}},
}
LENGTHS = {
    "max_tokens",
    "max_completion_tokens",
    "max_output_tokens",
    "max_new_tokens",
    "min_tokens",
    "min_new_tokens",
}
"""How much work a request is: only illegal or small values, or 10,000 requests would take hours."""
NUMBERS = [
    -(2**63),
    -(2**31),
    -1,
    0,
    1,
    2,
    65,
    4096,
    2**31,
    2**53 + 1,
    2**63 - 1,
    2**63,
    -1.5,
    0.5,
    1.0,
    1e300,
]
TEXTS = [
    "",
    "x",
    "((",
    "a" * 3000,
    "\x00",
    "\N{PILE OF POO}",
    "../../etc/passwd",
    "http://127.0.0.1:9/x",
    "{{7*7}}",
]
LISTS = [[], [[]], [0], [1, 2], [-1], [2**40], ["x"], [None], [{}], [[0.5]], [[1], [2]], [True, "x", 0.5]]
OBJECTS = [
    {},
    {"x": 1},
    {"0": 1.5},
    {"99999999": 5},
    {"-1": 5},
    {"a": {"b": {"c": []}}},
    {"type": "json_object"},
]
ILLEGAL_LENGTHS = [-1, -(2**63), 0.5, "x", [], {}, True, [1]]

KINDS = ([None, True, False, *NUMBERS], TEXTS, LISTS, OBJECTS)
POLICY_FIELDS = [*SPECS, "unheard_of"]
SAMPLING_FIELDS = [
    *("max_new_tokens", "stop", "stop_token_ids", "stop_regex", "temperature", "top_p", "top_k", "min_p"),
    *("frequency_penalty", "presence_penalty", "repetition_penalty", "min_new_tokens", "n", "beam_width"),
    *("json_schema", "regex", "ebnf", "structural_tag", "ignore_eos", "skip_special_tokens", "no_stop_trim"),
    *("spaces_between_special_tokens", "stream_interval", "logit_bias", "sampling_seed", "custom_params"),
    *(
        "stop_strs",
        "stop_regex_strs",
        "stop_str_max_len",
        "is_normalized",
        "ebnf_full_assistant",
        "unheard_of",
    ),
]


@pytest.fixture(scope="module")
def fields(faulty):
    """The members of each route's request, by the server's own OpenAPI document."""
    document = faulty.client.get("/openapi.json").json()
    found = {}
    for route in ROUTES:
        content = document["paths"][route]["post"]["requestBody"]["content"]
        name = content["application/json"]["schema"]["$ref"].rsplit("/", 1)[1]
        found[route] = [*document["components"]["schemas"][name]["properties"], "unheard_of"]
    assert min(map(len, found.values())) > 10
    return found


def replaced(draw, names):
    """One or two members with values they were not made for."""
    chosen = draw.sample(names, draw.choice([1, 1, 2]))
    return {name: draw.choice(ILLEGAL_LENGTHS if name in LENGTHS else draw.choice(KINDS)) for name in chosen}


def fuzzed(draw, fields):
    """Route and body: a good request with some members replaced, on its top level or deeper."""
    route = draw.choice(ROUTES)
    place = draw.choice(["", "", "fathom", *(["sampling_params"] * 2 if route == GENERATE else [])])
    if place == "fathom":
        return route, BASE[route] | {place: replaced(draw, POLICY_FIELDS)}
    if place:
        return route, BASE[route] | {place: BASE[route][place] | replaced(draw, SAMPLING_FIELDS)}
    return route, BASE[route] | replaced(draw, fields[route])


def problems(route, status, body: bytes) -> str:
    """What is wrong with an answer; empty when it is as documented."""
    if status not in (
        200,
        400,
        *([404] if route == RESPONSES else []),
    ):  # an earlier response that there is not
        return f"status {status}"
    if b"Traceback" in body or b"site-packages" in body:
        return "shows the server's insides"
    if status == 200:
        return ""
    content = json.loads(body)
    if route == MESSAGES:
        well_formed = content.get("type") == "error" and content["error"].get("message")
    elif route in (RESPONSES, GENERATE):
        well_formed = content.get("error", {}).get("code") == status and content["error"].get("message")
    else:
        well_formed = (
            content.get("object") == "error" and content.get("code") == status and content.get("message")
        )
    return "" if well_formed else "not in the route's format"


class Sender(threading.local):
    """One kept-alive connection per thread."""

    connection = None

    def post(self, place, route, body):
        """Status and body of the answer."""
        if self.connection is None:
            self.connection = http.client.HTTPConnection(*place, timeout=60)
        self.connection.request("POST", route, json.dumps(body), {"Content-Type": "application/json"})
        got = self.connection.getresponse()
        content = got.read()
        if got.status >= 500:  # the server closes it after an exception
            self.connection.close()
            self.connection = None
        return got.status, content


ONCE_FATAL = [
    (GENERATE, {"custom_labels": {"tenant": "a"}}, "custom_labels are not configured"),
    (GENERATE, {"return_hidden_states": []}, "return_hidden_states: Expected"),
    (GENERATE, {"sampling_params": {"beam_width": {"x": 1}}}, "beam_width must be an integer in [1, 128]"),
    (GENERATE, {"sampling_params": []}, "sampling_params must be an object"),
    (RESPONSES, {"input": []}, "input must not be empty"),
    (GENERATE, {"input_ids": []}, "the prompt must have at least one token"),
    (GENERATE, {"input_ids": [[5], []], "text": None}, "the prompt must have at least one token"),
]
"""What ended the server for everybody, or was answered with status 500."""


@pytest.mark.parametrize(("route", "change", "message"), ONCE_FATAL, ids=lambda value: str(value)[:30])
def test_what_was_found_by_such_requests_is_refused(faulty, route, change, message):
    got = faulty.client.post(route, json=BASE[route] | change)
    assert got.status_code == 400 and message in got.text, got.text
    assert problems(route, 400, got.content) == ""


def test_10000_requests_that_are_not_what_they_should_be(faulty, fields):
    sender, seen, wrong = Sender(), Counter(), []
    draw = random.Random(SEED)
    requests = [fuzzed(draw, fields) for _ in range(FUZZED)]
    assert len({json.dumps(request) for request in requests}) > 0.75 * FUZZED

    def send(request):
        route, body = request
        try:
            status, content = sender.post(address(faulty), route, body)
            found = problems(route, status, content)
        except OSError as error:
            status, content, found = None, b"", repr(error)
        seen[status] += 1
        if found:
            wrong.append((found, route, json.dumps(body)[:400], content[:400]))

    with ThreadPoolExecutor(SENDERS) as pool:
        list(pool.map(send, requests))
    assert wrong == [], len(wrong)
    assert faulty.process.poll() is None
    assert seen[400] > FUZZED / 4 and seen[200] > FUZZED / 50, seen


def test_every_member_with_every_value_is_read_or_refused(fields):
    """Over 10,000 requests to SGLang's application in this process, up to where a route would ask the engine."""
    app, outcomes, wrong = application(), Counter(), []

    async def sweep():
        for route in ROUTES:
            for name in fields[route]:
                for value in itertools.chain(*KINDS):
                    status, content = await in_process(app, route, BASE[route] | {name: value})
                    outcomes[status] += 1
                    if status != "engine" and (found := problems(route, status, content)):
                        wrong.append((found, route, name, value, content[:300]))

    asyncio.run(sweep())
    assert wrong == []
    assert sum(outcomes.values()) > 10_000 and outcomes[400] > 5_000 and outcomes["engine"] > 1_000, outcomes


def application():
    """SGLang's application as Fathom configures it, without an engine."""
    from sglang.srt.entrypoints.http_server import app as sglang

    copied = FastAPI()
    copied.router.routes = list(sglang.router.routes)
    errors.install(copied)
    copied.add_middleware(PolicyMiddleware, face=Face())
    return copied


async def in_process(app, route, body):
    """Status and body of the answer; "engine" where the route itself began and found none."""
    sent = []

    async def receive():
        return {"type": "http.request", "body": json.dumps(body).encode()}

    async def send(message):
        sent.append(message)

    headers = [(b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": route, "headers": headers, "query_string": b""}
    try:
        await app(scope | {"root_path": ""}, receive, send)
    except Exception as error:
        begun = any(
            f.f_code.co_name == "run_endpoint_function" for f, _ in traceback.walk_tb(error.__traceback__)
        )
        return ("engine", b"") if begun else (599, repr(error).encode())
    return sent[0]["status"], sent[1]["body"]


@pytest.mark.alone
def test_slow_readers_hold_nobody_up(faulty):
    """They take a few bytes a second of streams of many megabytes; memory stays and the others are served."""
    process = psutil.Process(faulty.process.pid)
    body = {
        "text": "the key of",
        "stream": True,
        "return_logprob": True,
        "top_logprobs_num": 50,
        "sampling_params": {"max_new_tokens": 500, "ignore_eos": True, "temperature": 0},
    }
    alone = min(timed(faulty) for _ in range(3))
    memory = process.memory_info().rss
    readers = []
    for _ in range(4):
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        connection.connect(address(faulty))
        connection.sendall(raw(GENERATE, json.dumps(body).encode()))
        readers.append(connection)
    try:
        wait_until(lambda: held(faulty) > 0)
        until = time.monotonic() + 8
        while time.monotonic() < until and held(faulty) > 0:
            for connection in readers:
                connection.recv(16)
            timed(faulty)
            time.sleep(0.2)
        wait_until(lambda: held(faulty) == 0, 60)  # generated to the end, whoever reads it
        assert min(timed(faulty) for _ in range(3)) < 3 * alone + 0.1
        assert process.memory_info().rss - memory < 200 << 20
    finally:
        for connection in readers:
            connection.close()


def timed(server):
    begin = time.monotonic()
    assert server.client.post("/generate", json=ASK).status_code == 200
    return time.monotonic() - begin


def test_at_the_end_nothing_is_waited_for(faulty):
    faulty.process.send_signal(signal.SIGTERM)
    assert faulty.process.wait(20) == 0
    assert "cut off" not in faulty.log.read_text()
