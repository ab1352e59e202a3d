"""Requests that control a running server: what cannot be done is refused with a reason, and the server lives on."""

import json
import re
from concurrent.futures import ThreadPoolExecutor

import pytest
from conftest import save_random_model

ASK = {"text": "the key of", "sampling_params": {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True}}
NO_WEIGHTS = {"names": [], "dtypes": [], "shapes": []}


def answer(server):
    return server.client.post("/generate", json=ASK).json()["text"]


@pytest.fixture(autouse=True)
def the_engine_lives(server):
    before = answer(server), server.engine()["pid"]
    yield
    assert (answer(server), server.engine()["pid"]) == before


@pytest.mark.parametrize("method", ["GET", "POST"])
@pytest.mark.parametrize("verb", ["start", "stop", "dump"])
def test_a_recorder_that_is_not_there(server, verb, method):
    reply = server.client.request(method, f"/{verb}_expert_distribution_record")
    assert reply.status_code == 400
    assert "expert_distribution_recorder_mode" in reply.json()["message"]


@pytest.mark.parametrize(
    ("path", "body", "reason"),
    [
        ("/update_weights_from_distributed", NO_WEIGHTS, "Please call `init_weights_update_group` first"),
        ("/update_weights_from_tensor", {"serialized_named_tensors": ["AAAA"]}, "invalid load key"),
        ("/resume_memory_occupation", {}, "'kv_cache' (KeyError)"),
        ("/stop_profile", None, "Profiling is not in progress"),
        ("/configure_logging", {"log_level": "loud"}, "log_level must be one of critical, "),
        ("/configure_logging", {"log_requests_level": 4}, "log_requests_level must be an integer in [0, 3]"),
        ("/configure_logging", {"log_requests_format": "xml"}, "log_requests_format must be text or json"),
        (
            "/configure_logging",
            {"dump_requests_folder": "/dev/null/x"},
            "dump_requests_folder /dev/null/x: /dev",
        ),
        ("/configure_logging", {"crash_dump_folder": "/dev/null/x"}, "/dev/null is no folder"),
        ("/configure_logging", {"dump_requests_threshold": 0}, "dump_requests_threshold must be an integer"),
        ("/start_profile", {"output_dir": "/dev/null/x"}, "output_dir /dev/null/x: /dev/null is no folder"),
        ("/start_profile", {"activities": ["MEM"]}, "activities must be a list of one or more of CPU, GPU"),
        ("/start_profile", {"activities": []}, "activities must be a list of one or more of CPU, GPU"),
        ("/start_profile", {"num_steps": 0}, "num_steps must be an integer of 1 or more, got 0"),
        ("/start_profile", {"start_step": -1, "num_steps": 1}, "start_step must be an integer of 0 or more"),
        ("/start_profile", {"profile_by_stage": True}, "profile_by_stage needs num_steps"),
        ("/start_profile", {"profile_stages": ["decode"]}, "profile_stages needs a server that was started"),
        ("/start_profile", {"profile_prefix": "a/b"}, "profile_prefix is part of a file's name"),
    ],
)
def test_what_the_engine_cannot_do_is_refused(server, path, body, reason):
    reply = server.client.post(path, json=body)
    assert reply.status_code == 400
    assert reason in str(reply.json())


@pytest.mark.parametrize("level", [0, 1])
@pytest.mark.parametrize("form", ["text", "json"])
def test_neither_prompt_nor_answer_is_in_a_log_that_is_to_be_without_them(server, level, form):
    """Whatever of its tokens a request asks back."""
    tokens = list(range(1711, 1719))
    everything = {
        "return_logprob": True,
        "logprob_start_len": 0,
        "top_logprobs_num": 2,
        "rid": f"{level}{form}",
    }
    everything |= {
        "token_ids_logprob": [1723],
        "return_text_in_logprobs": True,
        "return_prompt_token_ids": True,
    }
    log = {"log_requests": True, "log_requests_level": level, "log_requests_format": form}
    server.client.post("/configure_logging", json=log)
    try:
        told = server.client.post("/generate", json={**ASK, "text": None, "input_ids": tokens, **everything})
    finally:
        server.client.post("/configure_logging", json={"log_requests": False})
    lines = [line for line in server.log.read_text().splitlines() if everything["rid"] in line]
    assert len(lines) == 2
    shown = set(map(int, re.findall(r"(?<![\d.])\d{4}(?![\d.])", " ".join(lines))))
    assert len(told.json()["meta_info"]["input_token_logprobs"]) == len(tokens)
    assert not shown & {*tokens, *(token for token in told.json()["output_ids"] if token > 999)}
    assert repr(told.json()["text"])[1:-1] not in lines[1]


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_is_found_in_the_log_by_the_name_that_its_client_knows(server, stream):
    """Two at once may have the same one. Each line of JSON is one, whichever format was there before."""
    name, short = f"ours-{stream}", {"model": "any", "max_tokens": 2, "stream": stream}
    model = server.client.get("/v1/models").json()["data"][0]["id"]
    asked = {
        "/generate": ASK | {"stream": stream},
        "/v1/completions": short | {"prompt": "the"},
        "/v1/chat/completions": short | {"messages": [{"role": "user", "content": "the"}]},
        "/v1/messages": short | {"messages": [{"role": "user", "content": "the"}]},
        "/v1/responses": {"model": model, "input": "the", "max_output_tokens": 2, "stream": stream},
        "/api/generate": {"model": model, "prompt": "the", "stream": stream, "options": {"num_predict": 2}},
    }

    def post(route):
        return server.client.post(route, json=asked[route], headers={"X-Request-Id": name})

    for form in ("text", "json"):
        log = {"log_requests": True, "log_requests_level": 0, "log_requests_format": form}
        server.client.post("/configure_logging", json=log)
        lines = len(server.log.read_text().splitlines())
        with ThreadPoolExecutor(2) as pool:
            replies = list(pool.map(post, [*asked, *asked]))
        server.client.post("/configure_logging", json={"log_requests": False})
        assert {(reply.status_code, reply.headers["x-request-id"]) for reply in replies} == {(200, name)}
        new = [line for line in server.log.read_text().splitlines()[lines:] if name in line]
        assert len(new) == 4 * len(asked)
        if form == "json":
            assert {json.loads(line)["headers"]["x-request-id"] for line in new} == {name}


def test_the_prefix_cache_is_emptied_under_vllms_name(server):
    def cached():
        return server.client.post("/generate", json=ASK).json()["meta_info"]["cached_tokens"]

    cached()
    assert cached() > 0
    assert server.client.post("/reset_prefix_cache").status_code == 200
    assert cached() == 0


def test_a_paused_server_is_alive(server):
    server.client.post("/pause_generation", json={"mode": "in_place"})
    try:
        assert server.client.get("/health", timeout=10).status_code == 200
    finally:
        server.client.post("/continue_generation", json={})


@pytest.mark.parametrize("tokens", [[-1], [[3], [1 << 32]]])
def test_token_ids_that_no_tokenizer_takes(server, tokens):
    reply = server.client.post("/v1/detokenize", json={"model": "x", "tokens": tokens})
    assert reply.status_code == 400
    assert "tokens must be integers in [0, 4294967295]" in reply.json()["message"]


def test_a_clients_mistake_is_logged_on_one_line(server):
    model = server.client.get("/v1/models").json()["data"][0]["id"]
    too_long = {"model": model, "input": "word " * 9000, "stream": True}
    assert "context length" in server.client.post("/v1/responses", json=too_long).text
    text = server.log.read_text()
    assert "context length" in text and "Traceback" not in text


def test_a_grammar_of_several_answers_is_not_in_the_log(server):
    """SGLang first asks for no token at all, for the cache's sake."""
    sampling = {"n": 2, "max_new_tokens": 3, "regex": "SECRET[a-z]+"}
    replies = server.client.post("/generate", json=ASK | {"sampling_params": sampling}).json()
    assert all("SECRET".startswith(reply["text"]) for reply in replies)
    text = server.log.read_text()
    assert "SECRET" not in text and "accept_token" not in text


def test_weights_that_are_not_packed_can_be_changed(server, tiny_model, tmp_path):
    assert server.engine()["packed_weights"] == 0
    before = answer(server)
    other = save_random_model(tmp_path, initializer_range=0.3)
    for model, same in ((other, False), (tiny_model, True)):
        reply = server.client.post("/update_weights_from_disk", json={"model_path": str(model)})
        assert reply.status_code == 200, reply.text
        assert (answer(server) == before) == same


def test_what_clients_make_up_is_no_label(server):
    def ask(number):
        for method, path in (
            ("GET", f"/no/such/{number}"),
            ("POST", f"/v1/models/{number}"),
            (f"X{number}", "/"),
        ):
            assert server.client.request(method, path).status_code in (404, 405)

    ask(0)
    server.series()  # an answer of /metrics is counted after it was written
    before = set(server.series("sglang:http_"))
    for number in range(1, 9):
        ask(number)
    assert set(server.series("sglang:http_")) == before
    assert (
        server.series("sglang:http_responses")[
            'sglang:http_responses_total{endpoint="other",method="GET",status_code="404"}'
        ]
        >= 9
    )
