"""What the JSON object of a generation request may not ask for."""

import pytest
from envelopes import message_of

from fathom.server.context import Face
from fathom.server.routes import CHAT, COMPLETIONS, GENERATE, GENERATION_ROUTES, RESPONSES


@pytest.mark.parametrize(
    ("field", "body"),
    [
        ("best_of", {"best_of": 2}),
        ("best_of", {"best_of": 3, "n": 2}),
        ("suffix", {"suffix": "b"}),
    ],
)
def test_what_a_completion_would_not_do_is_refused(client, field, body):
    caller = client((1, b"{}"))
    reply = caller.call(COMPLETIONS, {"prompt": "a", **body})
    assert reply.status == 400 and message_of(COMPLETIONS, reply.json).startswith(field)
    assert not caller.inner.bodies


def test_what_a_completion_does_is_passed_on(client):
    asked = [{"best_of": 1}, {"best_of": 2, "n": 2}, {"best_of": None, "suffix": ""}]
    caller = client((1, b"{}"))
    for body in asked:
        assert caller.call(COMPLETIONS, {"prompt": "a", **body}).status == 200
    caller = client((1, b"{}"), Face(completes_middles=True))
    assert caller.call(COMPLETIONS, {"prompt": "a", "suffix": "b"}).status == 200


@pytest.mark.parametrize(
    "body",
    [
        {"custom_params": {"fathom": {}}},
        {"sampling_params": {"custom_params": {"fathom": {}}}},
        {"sampling_params": [{}, {"custom_params": {"fathom": {}}}]},
    ],
)
def test_the_private_field_is_reserved(body, client):
    reply = client((1, b"{}")).call(GENERATE, body)
    assert reply.status == 400
    assert "custom_params.fathom is reserved" in message_of(GENERATE, reply.json)


@pytest.mark.parametrize("path", GENERATION_ROUTES)
@pytest.mark.parametrize(
    "body",
    [{"n": 0}, {"sampling_params": {"n": -1}}, {"n": 129}, {"n": 2**63}, {"sampling_params": {"n": [3]}}],
)
def test_no_generation_or_too_many_are_refused(path, body, client):
    reply = client((0, b"{}")).call(path, body)
    assert reply.status == 400
    assert "n must be an integer in [1, 128], got " in message_of(path, reply.json)


@pytest.mark.parametrize("limit", [0, -1])
@pytest.mark.parametrize("path, name", [(RESPONSES, "max_output_tokens"), (CHAT, "max_completion_tokens")])
def test_an_answer_without_room_for_a_token_is_refused(path, name, limit, client):
    reply = client((0, b"{}")).call(path, {name: limit})
    error = reply.json.get("error", reply.json)
    message = f"{name} must be an integer >= 1, got {limit}"
    assert (reply.status, error["param"], error["message"]) == (400, name, message)


def test_an_empty_conversation_is_refused(client):
    reply = client((0, b"{}")).call(RESPONSES, {"input": []})
    assert (reply.status, reply.json["error"]["param"]) == (400, "input")


@pytest.mark.parametrize(
    ("body", "name"),
    [
        ({"http_worker_ipc": "ipc:///tmp/x"}, "http_worker_ipc"),
        ({"received_time": 1.0}, "received_time"),
        ({"sampling_params": {"is_normalized": True}}, "sampling_params.is_normalized"),
        ({"sampling_params": [{}, {"stop_strs": ["a"]}]}, "sampling_params.stop_strs"),
    ],
)
def test_fields_between_sglangs_processes_are_not_for_clients(body, name, client):
    reply = client((0, b"{}")).call("/generate", body)
    assert (reply.status, reply.json["error"]["param"]) == (400, name)
    assert client((1, b"{}")).call("/generate", {"http_worker_ipc": None}).status == 200
