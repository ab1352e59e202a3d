"""Ollama's routes of a running server: whole answers and streams of lines say the same, and how they ended."""

import json
import shutil

import pytest

CHAT = {"model": "x", "messages": [{"role": "user", "content": "Where is the red box?"}]}
COMPLETION = {"model": "x", "prompt": "The red box"}
ROUTES = [("/api/chat", CHAT), ("/api/generate", COMPLETION)]
OPTIONS = {"temperature": 0, "num_predict": 6}


def lines_of(server, path, body):
    return [json.loads(line) for line in server.client.post(path, json=body).text.splitlines()]


def text_of(answer):
    return answer["message"]["content"] if "message" in answer else answer["response"]


@pytest.mark.parametrize(("path", "form"), ROUTES)
def test_a_stream_says_what_a_whole_answer_says(server, path, form):
    body = {**form, "options": OPTIONS}
    whole = server.client.post(path, json={**body, "stream": False}).json()
    *parts, last = lines_of(server, path, body)
    assert "".join(map(text_of, parts)) == text_of(whole) != ""
    assert not any(part["done"] for part in parts)
    for answer in (whole, last):
        assert answer["done"] and answer["done_reason"] == "length"
        assert answer["eval_count"] == 6 and answer["prompt_eval_count"] > 2


def test_a_chat_is_that_of_the_chat_route(server):
    answer = server.client.post("/api/chat", json={**CHAT, "options": OPTIONS, "stream": False}).json()
    model = server.client.get("/v1/models").json()["data"][0]["id"]
    ask = {**CHAT, "model": model, "temperature": 0, "max_tokens": 6}
    expected = server.client.post("/v1/chat/completions", json=ask).json()
    assert text_of(answer) == expected["choices"][0]["message"]["content"]
    assert answer["prompt_eval_count"] == expected["usage"]["prompt_tokens"]


def test_an_end_by_the_model(server):
    first = text_of(
        server.client.post("/api/generate", json={**COMPLETION, "options": OPTIONS, "stream": False}).json()
    )
    options = {**OPTIONS, "num_predict": -1, "stop": [first[:3]]}
    answer = server.client.post(
        "/api/generate", json={**COMPLETION, "options": options, "stream": False}
    ).json()
    assert answer["done_reason"] == "stop" and text_of(answer) == ""


@pytest.mark.parametrize(("path", "form"), ROUTES)
def test_a_seed_repeats_the_sample(server, path, form):
    body = {**form, "options": {"seed": 3, "temperature": 1.5, "num_predict": 12}, "stream": False}
    assert text_of(server.client.post(path, json=body).json()) == text_of(
        server.client.post(path, json=body).json()
    )


@pytest.mark.parametrize(("path", "form"), ROUTES)
def test_a_refusal(server, path, form):
    for options, told in (({"top_p": 7}, "top_p"), ({"num_predict": "few"}, "options.num_predict: Expected")):
        body = {**form, "options": options}
        whole = server.client.post(path, json={**body, "stream": False})
        assert whole.status_code == 400 and told in whole.json()["error"]
        assert lines_of(server, path, body) == [whole.json()]


def test_what_only_loads_the_model(server):
    answer = server.client.post("/api/chat", json={**CHAT, "messages": []}).json()
    assert answer["done"] and answer["done_reason"] == "load"


def test_a_model_without_a_chat_template(start_server, tiny_model, tmp_path):
    model = shutil.copytree(tiny_model, tmp_path / "model")
    (model / "chat_template.jinja").unlink()
    server = start_server(model, "--max-total-tokens", "2000")
    for stream in (False, True):
        reply = server.client.post("/api/chat", json={**CHAT, "stream": stream})
        assert reply.status_code == 400 and "chat_template is not set" in reply.json()["error"]
    assert server.client.post("/api/generate", json={**COMPLETION, "options": OPTIONS}).status_code == 200
    assert server.stop() == 0
