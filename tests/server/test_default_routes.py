"""Routes that generate under the server's default policy: a wish for another is refused, all else is handed on."""

import math

import pytest
from noisy import draft_flags, noisy_copy

from fathom.runtime.config import Policy
from fathom.runtime.specprefill.config import PROTECTED
from fathom.server.requests.context import CURRENT, Face
from fathom.server.routes import (
    CORPUS_ROUTES,
    GENERATES,
    GENERATION_ROUTES,
    OLLAMA,
    OLLAMA_SHOW,
    OTHER,
    VERTEX,
)

BY_DEFAULT = [*(set(GENERATES) - set(GENERATION_ROUTES)), "/api/chat/"]


@pytest.mark.parametrize("path", sorted(BY_DEFAULT))
def test_a_policy_is_refused_where_none_can_be_asked_for(path, client):
    caller = client((0, b"{}"))
    reply = caller.call(path, {"model": "m", "fathom": {"preset": "exact"}})
    told = reply.json["error" if path.rstrip("/") in OLLAMA else "message"]
    assert reply.status == 400 and not caller.inner.bodies
    assert told.startswith("fathom cannot be had on this route") and all(r in told for r in GENERATION_ROUTES)
    face, routes = Face({"prefill_keep_rate": 0.5}), []
    for raw in (b'{ "model" : "m",\n "fathom": null}', b"[1]", b'{"bad', b"\xff", b""):
        caller = client((0, b"{}"), face)
        reply = caller.call(
            path, raw, parts=[raw[:3], raw[3:]], on_chunk=lambda _: routes.append(CURRENT.get().route)
        )
        assert reply.status == 200
        assert caller.inner.bodies == [raw] and caller.inner.policies == [face.default] != [Policy()]
    assert set(routes) == {OTHER}


@pytest.mark.parametrize("path", [*OLLAMA, OLLAMA_SHOW])
@pytest.mark.parametrize("kind", [b"application/x-www-form-urlencoded", b""])
def test_ollamas_routes_read_json_whatever_its_client_calls_it(path, kind, client):
    """As Ollama does, whose documentation's commands name no type."""
    caller = client((0, b"{}"))
    headers = [(b"host", b"h"), *([(b"Content-Type", kind)] if kind else [])]
    assert caller.call(path, {"model": "m"}, headers=headers).status == 200
    assert caller.inner.scopes[0]["headers"] == [(b"host", b"h"), (b"content-type", b"application/json")]


@pytest.mark.parametrize("path", OLLAMA)
@pytest.mark.parametrize("name", ["tools", "images", "suffix", "template", "context", "logprobs"])
def test_what_ollamas_routes_would_pass_over_is_refused(path, name, client):
    for body in (
        {name: [1]},
        *([{"messages": [{"role": "user"}, {name: ["a"]}]}] if name == "images" else []),
    ):
        caller = client((0, b"{}"))
        reply = caller.call(path, body)
        assert reply.status == 400 and not caller.inner.bodies
        assert reply.json["error"].startswith(f"{name} cannot be had on this route")
    assert client((0, b"{}")).call(path, {name: None, "messages": [1]}).status == 200


def test_a_body_that_is_not_called_json_is_the_clients_mistake(server):
    """SGLang's validators take it for an object."""
    for path in ("/invocations", "/vertex_generate"):
        reply = server.client.post(path, content=b'{"model": "m"}')
        assert reply.status_code == 400, reply.text
        assert reply.json()["type"] == "BadRequestError"


@pytest.mark.parametrize("name", ["temperature", "fathom", "text", "x" * 900])
def test_a_parameter_that_vertex_ais_route_does_not_know(client, name):
    """SGLang's fails on it."""
    caller = client((0, b"{}"))
    reply = caller.call(VERTEX, {"instances": [{"text": "a"}], "parameters": {"stream": False, name: 1}})
    assert reply.status == 400 and not caller.inner.bodies
    assert reply.json["message"].startswith(f"parameters must not have {name[:40]!r}")
    assert "sampling_params" in reply.json["message"]


@pytest.mark.parametrize(
    ("parameters", "told"),
    [
        ({"sampling_params": {"max_new_tokens": 2}}, None),
        ({"sampling_params": [{"max_new_tokens": 2}, {"max_new_tokens": 3}]}, None),
        (None, None),
        ({"temperature": 0}, "parameters must not have 'temperature'"),
        ({"sampling_params": [1.5]}, "sampling_params.0: Input should be"),
        ({"sampling_params": 5}, "sampling_params: Input should be"),
        ({"rid": 3}, "rid: Input should be"),
        ([1], "parameters: Input should be"),
        ({"lora_id": "a"}, "lora_id is not for clients"),
        ({"sampling_params": {"stop_strs": ["a"]}}, "sampling_params.stop_strs is not for clients"),
        ({"sampling_params": {"custom_params": {"fathom": {}}}}, "custom_params.fathom is reserved"),
    ],
)
def test_parameters_of_vertex_ais_route(server, parameters, told):
    instances = [{"text": "A page."}, {"text": "Another page."}]
    reply = server.client.post(VERTEX, json={"instances": instances, "parameters": parameters})
    if told is None:
        assert reply.status_code == 200 and len(reply.json()["predictions"]) == len(instances)
    else:
        assert reply.status_code == 400 and told in reply.json()["message"]


@pytest.mark.parametrize(
    ("instances", "status"),
    [
        ([{"input_ids": [5, 6]}, {"input_ids": [7]}], 200),
        ([], 200),
        ([{"text": 3.5}], 400),
        ([{"text": "A page."}, {"text": {}}], 400),
        ([{"text": "A page."}, {}], 400),
        ([{"input_ids": ["a"]}], 400),
        ([{}], 400),
        (["A page."], 400),
        ({"text": "A page."}, 400),
        (None, 400),
    ],
)
def test_instances_of_vertex_ais_route(server, instances, status):
    body = {"instances": instances, "parameters": {"sampling_params": {"max_new_tokens": 2}}}
    reply = server.client.post(VERTEX, json=body)
    assert reply.status_code == status, reply.text
    if status == 400:
        error = reply.json()
        assert any(name in str(error) for name in ("text", "input_ids", "instances"))


@pytest.mark.parametrize("path", CORPUS_ROUTES)
@pytest.mark.parametrize("raw", [b"{}", b"[1]", b'"auto"', b""])
def test_there_are_no_external_corpora(path, raw, client):
    """Whatever the body is: SGLang's route takes it for an object."""
    caller = client((0, b"{}"))
    for method in ("GET", "POST"):
        reply = caller.call(path, raw, method)
        assert reply.status == 400 and reply.json["message"].startswith("external corpora")
    assert not caller.inner.bodies


@pytest.fixture(scope="module")
def judging_server(start_server, tiny_model, tmp_path_factory):
    """By default it keeps a fifth of what is longer than a few tokens."""
    draft = noisy_copy(tiny_model, tmp_path_factory.mktemp("draft"), 0.0008)
    default = ("--prefill-keep-rate", "0.2", "--min-prompt-tokens", "64", *draft_flags(draft))
    return start_server(tiny_model, "--dtype", "float32", "--max-total-tokens", "8000", *default)


def test_system_text_stays_under_the_default_policy(judging_server, tiny_model):
    """On each route of chats: as much of the same prompt is kept as on the one that carries policies."""
    server = judging_server
    rules, document = ("\n".join(f"{word} {i} is kept." for i in range(40)) for word in ("Rule", "Page"))
    messages = [{"role": "system", "content": rules}, {"role": "user", "content": document}]
    limits = {
        "options": {"temperature": 0, "num_predict": 2},
        "temperature": 0,
        "max_tokens": 2,
        "stream": False,
    }

    def kept(path):
        server.flush()
        before = sum(server.series("fathom:request_kept_tokens_total").values())
        reply = server.client.post(path, json={"model": str(tiny_model), "messages": messages, **limits})
        assert reply.status_code == 200, reply.text
        return sum(server.series("fathom:request_kept_tokens_total").values()) - before, reply.json()

    tokens, reply = kept("/v1/chat/completions")
    prompt = reply["usage"]["prompt_tokens"]
    assert 0.4 * prompt < tokens < 0.6 * prompt  # the system text is more than SpecPrefill's share
    assert kept("/api/chat")[0] == kept("/invocations")[0] == tokens


@pytest.mark.parametrize("route", ["chat/completions", "messages", "responses"])
def test_a_request_says_what_of_its_conversation_stays(judging_server, tiny_model, route):
    rules, document = ("\n".join(f"{word} {i} is kept." for i in range(40)) for word in ("Rule", "Page"))
    body = {"model": str(tiny_model), "temperature": 0, "max_tokens": 2}
    said = [{"role": "user", "content": document}]
    if route == "responses":
        body |= {"instructions": rules, "input": said, "max_output_tokens": 2}
    elif route == "messages":
        body |= {"system": rules, "messages": said}
    else:
        body["messages"] = [{"role": "system", "content": rules}, *said]

    def share(policy):
        policy = {"preset": "exact", "prefill_keep_rate": 0.1, "min_prompt_tokens": 0} | policy
        reply = judging_server.client.post(f"/v1/{route}", json=body | {"fathom": policy})
        assert reply.status_code == 200, reply.text
        account = reply.json()["fathom"]
        assert set(account["policy"]["prefill_protect"]) == set(policy.get("prefill_protect", PROTECTED))
        return account["kept_tokens"] / account["prompt_tokens"]

    assert 0.4 < share({}) == share({"prefill_protect": ["tools", "system"]}) < 0.6
    assert 0.4 < share({"prefill_protect": ["user"]}) < 0.7
    assert 0.05 < share({"prefill_protect": []}) < 0.2
    assert share({"prefill_protect": ["user", "system"]}) == 1
    for wrong in ("system", ["rules"], ["system", 3], None):
        reply = judging_server.client.post(f"/v1/{route}", json=body | {"fathom": {"prefill_protect": wrong}})
        assert reply.status_code == 400
        assert 'fathom.prefill_protect must be a list of none to all of "system", ' in reply.text.replace(
            "\\", ""
        )


def test_scores_are_those_of_the_whole_prompt(judging_server):
    """Their answers could not tell that the default policy left something out."""
    prompt, labels = [6 + i * 37 % 1900 for i in range(600)], [5, 6]

    def share_of_the_first(policy):
        body = {"input_ids": prompt, "return_logprob": True, "token_ids_logprob": labels, **policy}
        body["sampling_params"] = {"temperature": 0, "max_new_tokens": 1}
        meta = judging_server.client.post("/generate", json=body).json()["meta_info"]
        first, second = (value for value, *_ in meta["output_token_ids_logprobs"][0])
        return 1 / (1 + math.exp(second - first)), meta["fathom"]["kept_tokens"]

    asked = {"query": prompt[:-9], "items": [prompt[-9:]], "label_token_ids": labels, "apply_softmax": True}
    reply = judging_server.client.post("/v1/score", json=asked | {"model": "m"})
    exact, kept = share_of_the_first({"fathom": {"preset": "exact"}})
    assert kept == len(prompt) and reply.json()["scores"][0][0] == pytest.approx(exact, abs=1e-4), reply.text
    otherwise, kept = share_of_the_first({})
    assert kept < len(prompt) / 3 and abs(otherwise - exact) > 0.01
    ended = judging_server.series("fathom:requests_total")
    assert ended['fathom:requests_total{outcome="length",preset="exact",route="other"}'] == 1
