"""Requests that are refused, most of which once ended the server for everybody, or were a failure of its own."""

import json

import pytest

from fathom.server.routes import PROBES

GENERATE, CHAT = "/generate", "/v1/chat/completions"
LOGPROBS = {"return_logprob": True, "top_logprobs_num": 2, "token_ids_logprob": [5]}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": 5}}}
REFUSED = {
    "regex": (GENERATE, {"text": "a", "sampling_params": {"regex": "(("}, **LOGPROBS}),
    "schema": (GENERATE, {"text": "a", "sampling_params": {"json_schema": '{"type": 5}'}, **LOGPROBS}),
    "chat": (
        CHAT,
        {
            "model": "any",
            "messages": [{"role": "user", "content": "Where?"}],
            "response_format": SCHEMA,
            "logprobs": True,
            "top_logprobs": 2,
        },
    ),
}


@pytest.mark.parametrize(
    ("route", "body"),
    {
        GENERATE: {"text": "a", "rid": "HEALTH_CHECK_x"},
        "/generate ": {"text": ["a", "b"], "rid": ["x", "HEALTH_CHECK"]},
        "/v1/completions": {"model": "any", "prompt": "a", "rid": "HEALTH_CHECK"},
        "/vertex_generate": {"instances": [{"text": "a"}], "parameters": {"rid": ["HEALTH_CHECK_y"]}},
    }.items(),
)
def test_an_id_that_is_a_health_checks(server, route, body):
    """The scheduler would drop it while it is busy, and its client wait for ever."""
    reply = server.client.post(route.strip(), json=body)
    assert reply.status_code == 400 and "rid must not begin with HEALTH_CHECK" in reply.text


@pytest.mark.parametrize("value", [False, None, 0])
def test_nobody_is_left_out_of_the_metrics(server, value):
    given = {"text": "a", "log_metrics": value}
    vertex = {"instances": [{"text": "a"}], "parameters": {"log_metrics": value}}
    for path, body in ((GENERATE, given), ("/vertex_generate", vertex)):
        reply = server.client.post(path, json=body)
        assert reply.status_code == 400 and "log_metrics" in reply.text
    assert server.client.get("/health_generate").status_code == 200  # which is in none
    assert server.client.get("/health_generate").status_code == 200


def test_what_is_nested_too_deeply(server):
    deep = {}
    for _ in range(900):
        deep = {"a": deep}
    body = {"text": "a", "sampling_params": {"max_new_tokens": 1, "custom_params": deep}}
    reply = server.client.post(GENERATE, json=body)
    assert reply.status_code == 400 and "nested too deeply" in reply.text


def test_an_id_without_a_character(server):
    """No abort names it: the generation would go on when its client has gone."""
    for body in ({"text": "a", "rid": ""}, {"text": ["a", "b"], "rid": ["x", ""]}):
        reply = server.client.post(GENERATE, json=body)
        assert reply.status_code == 400 and "rid must not be empty" in reply.text


@pytest.mark.parametrize("route", [CHAT, "/v1/responses", "/tokenize"])
def test_a_template_of_the_clients_own_is_not_run(server, route):
    """It would hold up the process that answers everybody for as long as it likes."""
    values = {"chat_template_kwargs": {"chat_template": "{% for _ in range(99) %}x{% endfor %}", "y": 1}}
    body = {"model": server.client.get("/v1/models").json()["data"][0]["id"]}
    body |= {"max_output_tokens" if route == "/v1/responses" else "max_tokens": 1}
    turns = {"input" if route == "/v1/responses" else "messages": [{"role": "user", "content": "Where?"}]}
    reply = server.client.post(route, json=body | turns | values)
    assert reply.status_code == 400 and "chat_template_kwargs must not have chat_template" in reply.text
    del values["chat_template_kwargs"]["chat_template"]
    assert server.client.post(route, json=body | turns | values).status_code == 200


def test_a_response_needs_no_model(server):
    for fathom in ({}, {"fathom": {"preset": "exact"}}):
        reply = server.client.post("/v1/responses", json={"input": "hi", "max_output_tokens": 2} | fathom)
        assert reply.status_code == 200 and reply.json()["usage"]["output_tokens"] == 2


def test_a_streamed_message_without_a_text_tells_how_long_its_prompt_is(server):
    turns = [{"role": "user", "content": "Where is the red box?"}]
    body = {"model": "any", "messages": turns, "max_tokens": 6, "temperature": 0}
    said = server.client.post("/v1/messages", json=body).json()["content"][0]["text"]
    body["stop_sequences"] = [said[0]]
    whole = server.client.post("/v1/messages", json=body).json()
    assert (whole["content"], whole["stop_sequence"]) == ([{"type": "text", "text": ""}], said[0])
    lines = server.client.post("/v1/messages", json=body | {"stream": True}).text.splitlines()
    begin, end, _ = (json.loads(line[6:]) for line in lines if line.startswith("data: "))
    assert begin["message"]["usage"]["input_tokens"] == whole["usage"]["input_tokens"] > 0
    assert end["usage"]["output_tokens"] == whole["usage"]["output_tokens"]
    assert end["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": said[0]}


def test_tokens_of_no_messages_are_not_counted(server):
    reply = server.client.post("/v1/messages/count_tokens", json={"model": "any", "messages": []})
    assert reply.status_code == 400
    assert reply.json()["error"] == {"type": "invalid_request_error", "message": "messages must not be empty"}


@pytest.mark.parametrize("left", [500, 200, 20])
def test_a_response_without_a_limit_gets_what_the_context_has_left(server, left):
    """As a chat does: a conversation that has become long goes on to its end."""
    client, model = server.client, server.client.get("/v1/models").json()["data"][0]
    user = {"role": "user", "content": "box " * (model["max_model_len"] - left)}
    prompt = client.post("/v1/messages/count_tokens", json={"model": "any", "messages": [user]}).json()
    assert model["max_model_len"] - left <= prompt["input_tokens"] < model["max_model_len"]
    replies = {
        route: client.post(route, json={"model": model["id"], "temperature": 0, **body})
        for route, body in (
            ("/v1/responses", {"input": [user]}),
            ("/v1/chat/completions", {"messages": [user]}),
        )
    }
    assert {reply.status_code for reply in replies.values()} == {200}, replies["/v1/responses"].text
    told, chat = (reply.json() for reply in replies.values())
    assert told["usage"]["output_tokens"] == chat["usage"]["completion_tokens"]


@pytest.mark.parametrize(("route", "body"), REFUSED.values(), ids=REFUSED)
def test_what_the_engine_refuses_has_no_log_probabilities(server, route, body):
    refused = server.client.post(route, json=body)
    assert refused.status_code == 400 and "Failed to compile" in refused.text
    streamed = server.client.post(route, json=body | {"stream": True})
    assert "Failed to compile" in streamed.text
    assert server.process.poll() is None
    assert "Traceback" not in server.log.read_text()


def test_the_log_is_not_the_clients(server):
    """Neither lines of it that pass for the server's, nor all that was sent."""
    reply = server.client.post(GENERATE, json={"text": "a", "session_params": {"id": "x\nFORGED"}})
    assert reply.status_code == 400
    for name, grammar in {"json_schema": '["QUOTED"', "ebnf": "QUOTED" * 9}.items():
        reply = server.client.post(GENERATE, json={"text": "a", "sampling_params": {name: grammar}})
        assert reply.status_code == 400
    log = server.log.read_text()
    assert "session id x FORGED does not exist" in log
    assert not any(line.startswith("FORGED") for line in log.splitlines())
    assert "Failed to compile json grammar" in log and "QUOTED" not in log


WIDE, NARROW = [0.5] * 64, [0.5] * 3


@pytest.mark.parametrize("vector", [WIDE, NARROW], ids=["as wide as the model", "narrower"])
def test_vectors_in_the_place_of_tokens_end_no_engine(server, vector):
    before = server.engine()["pid"]
    query = {"query": [6, *range(10, 90)], "embed_override_token_id": 6, "query_embed_overrides": [vector]}
    reply = server.client.post(
        "/v1/score", json={"model": "x", "items": [[8]], "label_token_ids": [5], **query}
    )
    assert reply.status_code == 400 and "vectors in the place of tokens" in reply.text
    assert server.engine()["pid"] == before


def test_a_score_of_no_token(server):
    body = {"model": "x", "query": [6], "items": [[8]], "label_token_ids": []}
    reply = server.client.post("/v1/score", json=body)
    assert reply.status_code == 400 and "label_token_ids must not be empty" in reply.text


@pytest.mark.parametrize("name", ["nope", None])
@pytest.mark.parametrize(
    ("route", "field", "known"),
    [
        ("/parse_function_call", "tool_call_parser", "qwen25"),
        ("/separate_reasoning", "reasoning_parser", "deepseek-r1"),
    ],
)
def test_a_parser_that_is_not_there(server, route, field, known, name):
    reply = server.client.post(route, json={"text": "x", "tools": [], field: name})
    assert reply.status_code == 400 and field in reply.text
    assert name is None or known in reply.text
    assert server.client.post(route, json={"text": "x", "tools": [], field: known}).status_code == 200


@pytest.mark.parametrize("path", PROBES)
def test_a_probe_may_leave_the_body_out(server, path):
    reply = server.client.head(path)
    assert (reply.status_code, reply.content) == (200, b"")


def test_an_embedding_of_nothing_ends_no_engine(start_server, tiny_model):
    server = start_server(tiny_model, "--dtype", "float32", "--is-embedding", "--max-total-tokens", "4000")
    for ids in ([[5], []], [], [9999], [[5], [-1]]):
        for path, body in (("/v1/embeddings", {"model": "x", "input": ids}), ("/encode", {"input_ids": ids})):
            reply = server.client.post(path, json=body)
            assert reply.status_code == 400, reply.text
    reply = server.client.post("/v1/embeddings", json={"model": "x", "input": [[5], [6, 7]]})
    assert [len(each["embedding"]) for each in reply.json()["data"]] == [64, 64]
