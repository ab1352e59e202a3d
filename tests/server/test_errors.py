"""Error texts and the handlers of SGLang's application."""

import json
import logging
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from pydantic import BaseModel, model_validator

from fathom.server.answers import errors
from fathom.server.answers.errors import clean, describe
from fathom.server.middleware import PolicyMiddleware
from fathom.server.quiet import on_one_line, without_traceback
from fathom.server.requests.context import Face
from fathom.server.routes import CHAT, COMPLETIONS, GENERATE, RESPONSES


class Body(BaseModel):
    model: str
    prompt: str | list[int]


@pytest.fixture
def app():
    result = FastAPI()
    errors.install(result)

    @result.post("/v1/embeddings")
    @result.post("/v1/messages/count_tokens")
    async def answer(body: Body):
        raise RuntimeError("secret /srv/engine.py")

    return TestClient(result, raise_server_exceptions=False)


def test_validation_errors_are_short_and_name_the_fields(app):
    reply = app.post("/v1/embeddings", json={"prompt": {}})
    assert reply.status_code == 400
    body = reply.json()
    assert body["object"] == "error" and body["code"] == 400 and body["type"] == "BadRequestError"
    assert body["message"].startswith("model: Field required; prompt: Input should be a valid string")
    for leak in (".py", "File", "Traceback", "list[int]", ".str"):
        assert leak not in body["message"]


def test_openais_clients_find_an_error_where_openai_has_it(app):
    """Those for JavaScript look nowhere else, and told their users only the status."""
    body = app.post("/v1/embeddings", json={"prompt": {}}).json()
    error = body.pop("error")
    assert body == {"object": "error", **error} and error.keys() == {"message", "type", "param", "code"}
    for path in (CHAT, COMPLETIONS):
        assert errors.error_body(path, 400, "Bad x.", "x")["error"] == {
            "message": "Bad x.",
            "type": "BadRequestError",
            "param": "x",
            "code": 400,
        }


def test_ollamas_clients_find_an_error_as_text(app):
    assert app.get("/api/ps").json() == {"error": "Not Found"}


def test_malformed_json_outside_the_generation_routes(app):
    reply = app.post("/v1/embeddings", content=b'{"bad', headers={"content-type": "application/json"})
    assert reply.status_code == 400
    assert "JSON decode error" in reply.json()["message"]


def test_the_anthropic_envelope(app):
    body = app.post("/v1/messages/count_tokens", json={}).json()
    assert body["type"] == "error" and body["error"]["type"] == "invalid_request_error"


def test_an_exception_is_not_shown(app):
    reply = app.post("/v1/embeddings", json={"model": "m", "prompt": "p"})
    assert reply.status_code == 500
    assert "secret" not in reply.text and "internal error" in reply.json()["message"]


@pytest.mark.parametrize(
    ("path", "status", "told"),
    [
        ("/v1/embeddings", 405, {"object": "error", "type": "MethodNotAllowedError", "code": 405}),
        ("/v1/messages/count_tokens", 405, {"type": "error"}),
        ("/v1/nothing", 404, {"object": "error", "type": "NotFoundError", "code": 404}),
        ("/v1/messages/nothing", 404, {"type": "error"}),
    ],
)
def test_what_no_route_takes_is_refused_in_the_paths_format(app, path, status, told):
    reply = app.get(path)
    body = reply.json()
    assert reply.status_code == status and body.items() >= told.items()
    assert body.get("error", body)["message"] in ("Method Not Allowed", "Not Found")
    assert ("allow" in reply.headers) == (status == 405)


def test_many_errors_are_counted():
    found = [{"loc": ("body", f"f{n}"), "msg": "Value error, bad"} for n in range(5)]
    assert describe(found) == "f0: bad; f1: bad; f2: bad (and 2 more)"
    assert describe([]) == "illegal request"
    assert len(describe([{"loc": ("a",), "msg": "x" * 2000}])) == errors.SHOWN_CHARACTERS


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("[13:26:58] /project/cpp/converter.cc:2999: Unsupported type\n", "Unsupported type"),
        ('File "/usr/lib/x.py", line 3: boom', "boom"),
        (
            "n\na.0\n  bad [type=t, input_value={}]\n    For further information visit https://e/v",
            "n; a.0; bad",
        ),
        ("and/or 3/4, see https://a.b/c.html", "and/or 3/4, see https://a.b/c.html"),
        ("The model 'org/name' does not exist", "The model 'org/name' does not exist"),
        ("x" * 600, "x" * 497 + "..."),
    ],
)
def test_cleaning(message, expected):
    assert clean(message) == expected


def test_a_validator_that_breaks_is_the_requests_fault():
    class Careless(BaseModel):
        value: Any = None

        @model_validator(mode="before")
        @classmethod
        def look(cls, values):
            return {**values, "x": values["value"].get("x")}

    app = FastAPI()

    @app.post(CHAT)
    def chat(body: Careless):
        return body.value["missing"]

    app.add_middleware(PolicyMiddleware, face=Face())
    client = TestClient(app)
    got = client.post(CHAT, json={"value": [1]})
    assert (got.status_code, got.json()["message"]) == (400, errors.MALFORMED)
    with pytest.raises(KeyError):
        client.post(CHAT, json={"value": {"x": 1}})


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        (CHAT, "min_tokens must be in [0, max_tokens], and top_logprobs in [0, 5]"),
        (COMPLETIONS, "min_tokens must be in [0, max_tokens], and logprobs in [0, 5]"),
        (RESPONSES, "min_tokens must be in [0, max_output_tokens], and top_logprobs in [0, 5]"),
        (GENERATE, "min_new_tokens must be in [0, max_new_tokens], and top_logprobs_num in [0, 5]"),
    ],
)
def test_messages_have_the_names_that_clients_of_the_route_use(path, expected):
    message = "min_new_tokens must be in [0, max_new_tokens], and top_logprobs_num in [0, 5]"
    told = json.loads(errors.rewrite(path, 400, json.dumps({"message": message}).encode()))
    assert told.get("error", told)["message"] == expected


def test_a_clients_mistake_has_no_traceback_in_the_log(caplog):
    logger = logging.getLogger("of a route")
    logger.addFilter(without_traceback)
    for kind in (ValueError, KeyError):
        try:
            raise kind("a\nb")
        except kind:
            logger.exception("Error in %s", "x")
    mistake, failure = caplog.records
    assert (mistake.getMessage(), mistake.exc_info) == ("Error in x (a b)", None)
    assert failure.getMessage() == "Error in x" and failure.exc_info


def test_what_a_grammar_does_not_take_is_logged_without_the_answer_and_the_grammar(caplog):
    logger = logging.getLogger("of results")
    logger.addFilter(on_one_line)
    reason, told = "Tokens not accepted: 0", "Accepted tokens: [5, 6]\nKey string: SECRET"
    logger.error(f"Grammar accept_token failed for req 7 with token 0: {reason}\n{told}")
    logger.error(f"another: {reason}\n{told}")
    refused, other = (record.getMessage() for record in caplog.records)
    assert refused == f"Grammar accept_token failed for req 7 with token 0: {reason}"
    assert other == f"another: {reason}\n{told}"
