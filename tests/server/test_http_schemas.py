"""Answers that must be of a JSON schema, on the routes of which SGLang takes none: Anthropic's, and Ollama's."""

import json

import pytest

SCHEMA = {"type": "object", "properties": {"box": {"enum": ["red", "blue"]}}, "required": ["box"]}
SCHEMA["additionalProperties"] = False
TURN = [{"role": "user", "content": "Where is the red box?"}]
OPTIONS = {"temperature": 0, "num_predict": 200}
CHAT = {"model": "x", "messages": TURN, "options": OPTIONS, "stream": False}
COMPLETION = {"model": "x", "prompt": "The red box", "options": OPTIONS, "stream": False}
MESSAGE = {"model": "x", "messages": TURN, "max_tokens": 200, "temperature": 0}
TOOLS = [{"name": "look", "input_schema": {"type": "object", "properties": {"in": {"type": "string"}}}}]


@pytest.fixture(scope="module")
def compact(share_server, tiny_model):
    """A server whose JSON is without the blanks of which a random model would write no end."""
    flags = ("--dtype", "float32", "--max-total-tokens", "4000", "--constrained-json-disable-any-whitespace")
    return share_server(tiny_model, *flags)


def wanting(schema):
    return MESSAGE | {"output_config": {"format": {"type": "json_schema", "schema": schema}}}


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
def test_ollamas_format(compact, path):
    body = CHAT if path == "/api/chat" else COMPLETION
    text = "" if path == "/api/chat" else "response"

    def told(answer):
        return answer[text] if text else answer["message"]["content"]

    whole = compact.client.post(path, json=body | {"format": SCHEMA}).json()
    assert json.loads(told(whole))["box"] in ("red", "blue") and whole["done_reason"] == "stop"
    lines = compact.client.post(path, json=body | {"format": SCHEMA, "stream": True}).text.splitlines()
    assert "".join(told(json.loads(line)) for line in lines) == told(whole)
    some = compact.client.post(
        path, json=body | {"format": "json", "options": OPTIONS | {"num_predict": 1}}
    ).json()
    assert told(some).startswith("{")
    wrong = compact.client.post(path, json=body | {"format": {"type": "nothing"}})
    assert wrong.status_code == 400 and "Failed to compile json grammar" in wrong.json()["error"]


def test_anthropics_output_format(compact):
    reply = compact.client.post("/v1/messages", json=wanting(SCHEMA)).json()
    assert json.loads(reply["content"][0]["text"])["box"] in ("red", "blue")
    assert reply["stop_reason"] == "end_turn" and reply["fathom"]["preset"] == "exact"
    events = compact.client.post("/v1/messages", json=wanting(SCHEMA) | {"stream": True}).text.split("\n\n")
    deltas = [json.loads(event.split("data: ")[1]) for event in events if "text_delta" in event]
    assert "".join(delta["delta"]["text"] for delta in deltas) == reply["content"][0]["text"]
    plain = compact.client.post("/v1/messages", json=MESSAGE | {"output_config": {"effort": "low"}}).json()
    assert plain["content"] == compact.client.post("/v1/messages", json=MESSAGE).json()["content"]


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (wanting({"type": "nothing"}), "Failed to compile json grammar"),
        (wanting("text"), "output_config.format.schema must be a JSON schema"),
        (MESSAGE | {"output_config": {"format": {"type": "text"}}}, "output_config.format must be an object"),
        (wanting(SCHEMA) | {"tools": TOOLS, "tool_choice": {"type": "any"}}, "tools that must be called"),
    ],
)
def test_an_output_format_that_cannot_be_had(compact, body, told):
    reply = compact.client.post("/v1/messages", json=body)
    assert reply.status_code == 400 and told in reply.json()["error"]["message"]
