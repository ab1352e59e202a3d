"""A running server that asks for an API key and bounds what it reads."""

import io
import pickle
import sys
import time

import anthropic
import httpx
import pytest
from sglang.srt.entrypoints import http_server
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils import auth
from starlette.routing import WebSocketRoute

from fathom.runtime.sglang_host.reports import redact
from fathom.server.requests import keys
from fathom.server.routes import CHAT, MESSAGES, error_body

ADMIN_KEY = "of the operator"
HELLO = [{"role": "user", "content": "Where is the red box?"}]


@pytest.fixture(scope="module")
def guarded(start_server, tiny_model):
    keys = ("--api-key", "k", f"--admin-api-key={ADMIN_KEY}")
    return start_server(tiny_model, "--dtype", "float32", *keys, "--max-body-mib", "1")


def test_a_key_is_asked_for_before_a_body_is_read(guarded):
    assert guarded.client.post(CHAT, content=b"{").status_code == 401
    assert guarded.client.get("/fathom").status_code == 401
    for path in (MESSAGES, MESSAGES + "/count_tokens", CHAT, "/api/chat"):
        refusal = guarded.client.post(path, json={}, headers={"x-api-key": "j"})
        assert refusal.status_code == 401
        assert refusal.json() == error_body(path, 401, "the API key is missing or wrong")
    reply = httpx.post(guarded.url + CHAT, content=b"{", headers={"authorization": "Bearer k"})
    assert reply.status_code == 400


def test_a_key_that_is_not_ascii_is_a_wrong_one(guarded):
    for path, name, value in ((CHAT, b"authorization", "Bearer geheïm"), (MESSAGES, b"x-api-key", "geheïm")):
        for encoding in ("utf-8", "latin-1"):
            reply = httpx.post(guarded.url + path, json={}, headers={name: value.encode(encoding)})
            assert reply.status_code == 401


def test_anthropic_clients_send_their_key_in_a_header_of_their_own(guarded):
    claude = anthropic.Anthropic(base_url=guarded.url, api_key="k", max_retries=0, timeout=60)
    ask = {"model": "x", "messages": HELLO}
    assert claude.messages.count_tokens(**ask).input_tokens > 3
    assert claude.messages.create(**ask, max_tokens=2).usage.output_tokens == 2
    assert httpx.post(guarded.url + CHAT, json={}, headers={"x-api-key": "k"}).status_code == 401


def test_keys_are_not_told_to_who_has_one_of_them(guarded):
    for path in ("/server_info", "/get_server_info", "/fathom/info"):
        reply = httpx.get(guarded.url + path, headers={"authorization": "Bearer k"})
        assert reply.status_code == 200 and ADMIN_KEY not in reply.text
        assert '"k"' not in reply.text and "--api-key k" not in reply.text
    told = httpx.get(guarded.url + "/server_info", headers={"authorization": "Bearer k"}).json()
    assert told["admin_api_key"] == told["internal_states"][0]["api_key"] == "(hidden)"
    assert "--api-key (hidden) --admin-api-key=(hidden)" in told["launch_command"]


def test_keys_are_in_no_dump_of_requests(guarded, tmp_path):
    def configure(folder):
        asked = {"dump_requests_folder": folder, "dump_requests_threshold": 1}
        admin = {"authorization": f"Bearer {ADMIN_KEY}"}
        assert httpx.post(guarded.url + "/configure_logging", json=asked, headers=admin).status_code == 200

    configure(str(tmp_path))
    ask = {"text": "Where?", "sampling_params": {"max_new_tokens": 1}}
    httpx.post(guarded.url + "/generate", json=ask, headers={"authorization": "Bearer k"}, timeout=60)
    configure("")
    dump = wait_for_one(lambda: [path for path in tmp_path.iterdir() if path.stat().st_size])
    wait_for_one(lambda: dump.read_bytes().endswith(pickle.STOP) and [dump])
    told = pickle.loads(dump.read_bytes())
    assert told["server_args"].api_key == told["server_args"].admin_api_key == "(hidden)"
    assert told["requests"][0][0].text == "Where?"
    assert ADMIN_KEY.encode() not in dump.read_bytes()


def wait_for_one(found):
    deadline = time.monotonic() + 30
    while not (several := found()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return several[0]


def test_a_dump_before_the_end_has_the_command_line_without_keys(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["fathom", "serve", "--api-key", "first-word", "--admin-api-key=other"])
    given = ServerArgs(model_path="m", api_key="first-word", admin_api_key="other")
    given._raw_input = {"api_key": "first-word"}
    content = {"server_args": given, "launch_command": " ".join(sys.argv)}
    redact.Dumps.dump(content, file := io.BytesIO())
    told = pickle.loads(file.getvalue())
    assert told["server_args"].model_path == "m" and told["server_args"].api_key == "(hidden)"
    assert not any(word in file.getvalue() for word in (b"first-word", b"other"))
    assert told["launch_command"] == "fathom serve --api-key (hidden) --admin-api-key=(hidden)"


@pytest.mark.parametrize(
    "route",
    ["/load_lora_adapter_from_tensors", "/set_trace_level?level=0", "/flush_cache", "/reset_prefix_cache"],
)
def test_routes_that_change_the_server_are_the_administrators(guarded, route):
    adapter = {"lora_name": "a", "config_dict": {}, "serialized_named_tensors": ["AAAA"]}
    status = {}
    for key in ("k", ADMIN_KEY):
        reply = httpx.post(guarded.url + route, json=adapter, headers={"authorization": f"Bearer {key}"})
        status[key] = reply.status_code
    assert status["k"] == 401 != status[ADMIN_KEY]


def test_a_body_over_the_limit(guarded):
    headers = {"authorization": "Bearer k"}
    reply = httpx.post(guarded.url + CHAT, json={"messages": "x" * (1 << 20)}, headers=headers)
    assert reply.status_code == 413
    assert "larger than the limit of 1048576 bytes" in reply.json()["message"]
    many = iter([b'{"capacity_of_str_len": 1, "session_id": "' + b"x" * (1 << 20), b'"}'])
    for method, body in (("POST", many), ("GET", b"x" * (1 << 21))):
        reply = httpx.request(method, guarded.url + "/open_session", content=body, headers=headers)
        assert reply.status_code == 413


def test_the_server_ends_cleanly(guarded):
    """After the tests above: n > 1 answers must not leave anything to wait for."""
    headers = {"authorization": "Bearer k"}
    model = httpx.get(guarded.url + "/v1/models", headers=headers).json()["data"][0]["id"]
    ask = {"model": model, "messages": HELLO, "max_tokens": 2, "n": 2}
    assert httpx.post(guarded.url + CHAT, json=ask, headers=headers, timeout=60).status_code == 200
    assert guarded.stop() == 0
    text = guarded.log.read_text()
    assert "Fathom is ready: http://127.0.0.1:" in text
    assert "Traceback" not in text and "leaked" not in text


@pytest.fixture
def routes(monkeypatch):
    """Those of SGLang's application; what a test installs is gone when it is over."""
    routes = list(http_server.app.router.routes)
    monkeypatch.setattr(http_server.app.router, "routes", routes)
    for name in ("add_api_key_middleware", "decide_request_auth"):
        monkeypatch.setattr(auth, name, getattr(auth, name))
    return routes


@pytest.mark.parametrize("root", ["", "/api", "/health/api", "/metrics-of"])
def test_the_same_routes_need_no_key_behind_any_mount_point(root, routes):
    keys.install(root)
    given = {"method": "GET", "authorization_header": None, "api_key": "k", "admin_api_key": None}

    def allowed(path):
        level = auth.AuthLevel.NORMAL
        return auth.decide_request_auth(path=root + path, auth_level=level, **given).allowed

    assert all(map(allowed, ("/health", "/health_generate", "/ready", "/metrics", "/metrics/")))
    assert not any(map(allowed, ("/", CHAT, "/fathom/info", "/x/health")))


def test_there_is_no_websocket_of_which_no_key_would_be_asked(routes):
    routes = list(routes)
    sockets = [route for route in routes if isinstance(route, WebSocketRoute)]
    others = [route for route in routes if route not in sockets]
    assert sockets
    keys.install()
    assert http_server.app.router.routes == others
