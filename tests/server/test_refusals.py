"""What cannot be had is status 400 on every generation route, streaming or not, single or batched: the field, the
value and what is legal, in the route's own format, before anything reaches the engine."""

import json

import pytest
from envelopes import message_of

from fathom.runtime.config import Limits, Policy, without_draft
from fathom.runtime.sglang_host.machine import torchvision_ops
from fathom.server.requests.applied_policy import constrain, refuse_prompt_outputs
from fathom.server.requests.context import Face
from fathom.server.requests.refusals import FORMS as FORMS_OF_ANSWERS
from fathom.server.requests.refusals import PASSED_OVER, READS
from fathom.server.routes import (
    CHAT,
    COMPLETIONS,
    GENERATE,
    GENERATES,
    GENERATION_ROUTES,
    MESSAGES,
    OLLAMA,
    RESPONSES,
)

torchvision_ops.declare()

from sglang.srt.entrypoints.anthropic.protocol import AnthropicMessagesRequest  # noqa: E402
from sglang.srt.entrypoints.openai.protocol import (  # noqa: E402
    ChatCompletionRequest,
    CompletionRequest,
    ResponsesRequest,
)
from sglang.srt.managers.io_struct import GenerateReqInput  # noqa: E402

LIMITS = Limits(16, 4, {"SFI": "no tokenizer is loaded"} | without_draft(), 8, 500)
ILLEGAL = [
    ({"depth_cutoff": 6}, "depth_cutoff", "must be a multiple of 4 layers, got 6; nearest: 4, 8"),
    ({"depth_cutoff": 17}, "depth_cutoff", 'must be a multiple of 4 in [4, 16] or "full", got 17'),
    ({"depth_cutoff": 12.0}, "depth_cutoff", 'must be a multiple of 4 in [4, 16] or "full", got 12.0'),
    ({"tsp_rate": 0.2, "depth_cutoff": 8}, "tsp_rate", "legal: 1.0, or a depth_cutoff above 8; got 0.2"),
    ({"tsp_rate": 0.2, "depth_cutoff": 4}, "tsp_rate", "legal: 1.0, or a depth_cutoff above 8; got 0.2"),
    ({"tsp_rate": 0}, "tsp_rate", "must be in (0, 1], got 0"),
    ({"kv_retention_rate": 1.01}, "kv_retention_rate", "must be in (0, 1], got 1.01"),
    ({"prefill_keep_rate": 0.5}, "prefill_keep_rate", "start with --draft-model-path); legal: 1.0, got 0.5"),
    ({"speculative": True}, "speculative", "start with --draft-model-path); legal: false, got true"),
    ({"decode": "slow_fast"}, "decode", '(no tokenizer is loaded); legal: "full", got "slow_fast"'),
    ({"preset": "fast"}, "preset", 'must be one of "exact", "conversation", "balanced", "turbo", got "fast"'),
    ({"preset": "turbo", "depth_cutoff": 5}, "depth_cutoff", "got 5; nearest: 4, 8"),
    ({"preset": "balanced", "speculative": True}, "speculative", "legal: false, got true"),
    ({"sfi_budget": 501}, "sfi_budget", 'must be an integer in [1, 500] or "server", got 501'),
    ({"cutoff": 8}, "cutoff", "is not a policy field; legal fields: preset, prefill_keep_rate"),
    ([], "", "must be an object, got []"),
]
FORMS = {
    "plain": {},
    "stream": {"stream": True},
    "batch": {"prompt": ["a", "b"], "text": ["a", "b"], "input": ["a", "b"], "n": 2},
    "stream of a batch": {"stream": True, "prompt": ["a", "b"], "text": ["a", "b"], "n": 2},
}


@pytest.mark.parametrize("route", GENERATION_ROUTES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("policy", "field", "message"), ILLEGAL, ids=[json.dumps(i[0]) for i in ILLEGAL])
def test_every_route_and_form_refuses_alike(client, route, form, policy, field, message):
    caller = client((1, b"{}"), Face(limits=LIMITS))
    reply = caller.call(route, {"model": "m", **FORMS[form], "fathom": policy})
    assert reply.status == 400 and not caller.inner.bodies
    error = reply.json.get("error", reply.json)
    assert message in error["message"] and error["message"].startswith(
        f"fathom.{field}" if field else "fathom "
    )
    assert error["type"] in ("BadRequestError", "BadRequest", "invalid_request_error")
    if route != MESSAGES:
        assert error["param"] == (f"fathom.{field}" if field else "fathom") and error["code"] == 400


@pytest.mark.parametrize("route", GENERATION_ROUTES)
def test_what_a_preset_cannot_have_is_no_error(client, route):
    """Left out, and said in the answer."""
    caller = client((1, b"{}"), Face(limits=LIMITS))
    reply = caller.call(route, {"model": "m", "fathom": {"preset": "turbo"}})
    assert reply.status == 200
    (policy,) = caller.inner.policies
    assert policy == Policy("turbo", depth_cutoff=12, tsp_rate=0.2, kv_retention_rate=0.2)
    answer = reply.json["fathom"]
    assert answer["preset"] == "turbo"
    assert answer["left_out"].keys() == {"prefill_keep_rate", "decode", "speculative"}
    assert answer["left_out"]["decode"] == "SFI is not available here (no tokenizer is loaded)"


class Asked:
    """Of SGLang's request, what is looked at."""

    def __init__(self, **members):
        self.sampling_params, self.return_logprob, self.logprob_start_len = {}, False, -1
        self.return_hidden_states = False
        vars(self).update(members)


@pytest.mark.parametrize(
    ("members", "what"),
    [
        ({"return_logprob": True, "logprob_start_len": 0}, "log-probabilities of the prompt"),
        ({"return_logprob": [False, True], "logprob_start_len": [-1, 3]}, "log-probabilities of the prompt"),
        ({"return_logprob": True, "logprob_start_len": [-1, 3]}, "log-probabilities of the prompt"),
        ({"return_logprob": [False, True], "logprob_start_len": 0}, "log-probabilities of the prompt"),
        ({"return_hidden_states": True}, "hidden states"),
        ({"return_hidden_states": [False, True]}, "hidden states"),
    ],
)
def test_what_needs_every_prompt_token(members, what):
    policy = Policy("custom", depth_cutoff=12, tsp_rate=0.5)
    with pytest.raises(ValueError) as caught:
        refuse_prompt_outputs(Asked(**members), policy)
    assert str(caught.value) == (
        f"{what} cannot be had under a policy that drops prompt tokens, by fathom.depth_cutoff 12 and "
        'fathom.tsp_rate 0.5; legal with them: "depth_cutoff": "full", "tsp_rate": 1.0'
    )
    refuse_prompt_outputs(Asked(**members), Policy("custom", kv_retention_rate=0.5))
    refuse_prompt_outputs(Asked(return_logprob=True), policy)


def test_what_no_prompt_of_several_asks_for():
    """Where a prompt's log-probabilities would begin counts for a prompt that asks for some."""
    policy = Policy("custom", depth_cutoff=12)
    refuse_prompt_outputs(Asked(return_logprob=[True, False], logprob_start_len=[-1, 0]), policy)
    refuse_prompt_outputs(Asked(return_logprob=[False, False], logprob_start_len=0), policy)
    refuse_prompt_outputs(Asked(return_hidden_states=[False, False]), policy)


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


@pytest.mark.parametrize("route", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("field", PASSED_OVER)
def test_what_sglang_would_pass_over_is_refused(client, route, field):
    """And is none of the route's fields, which would be obeyed."""
    declared = {CHAT: ChatCompletionRequest, COMPLETIONS: CompletionRequest}[route].model_fields
    assert field not in declared
    caller = client((1, b"{}"))
    for given in ({"a": 1}, ["a"], "a", 0, True):
        reply = caller.call(route, {"model": "m", "prompt": "a", field: given})
        assert reply.status == 400 and message_of(route, reply.json).startswith(f"{field} is not supported")
    assert not caller.inner.bodies
    for nothing in (None, False, "", [], {}):
        assert caller.call(route, {"model": "m", "prompt": "a", field: nothing}).status == 200


DECLARED = {
    CHAT: ChatCompletionRequest.model_fields,
    COMPLETIONS: CompletionRequest.model_fields,
    RESPONSES: ResponsesRequest.model_fields,
    MESSAGES: AnthropicMessagesRequest.model_fields,
    GENERATE: GenerateReqInput.__dataclass_fields__,
}


@pytest.mark.parametrize("route", GENERATION_ROUTES)
@pytest.mark.parametrize("field", FORMS_OF_ANSWERS)
def test_a_form_of_the_answer_is_read_or_refused(client, route, field):
    caller = client((1, b"{}"))
    reply = caller.call(route, {"model": "m", "prompt": "a", field: {"type": "json_schema"}})
    if field in DECLARED[route]:
        assert field in READS[route] and reply.status == 200
        return
    assert reply.status == 400 and not caller.inner.bodies
    message = message_of(route, reply.json)
    assert message.startswith(f"{field} is not supported")
    assert any(each in message for each in READS[route])
    for nothing in (None, "", {}, {"type": "text"}) if field == "response_format" else (None, "", {}):
        assert caller.call(route, {"model": "m", "prompt": "a", field: nothing}).status == 200


SCHEMA = {"type": "boolean"}


@pytest.mark.parametrize("route", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, "response_format"),
        ({"response_format": {"type": "json_object", "json_schema": {"schema": SCHEMA}}}, "response_format"),
        ({"response_format": {"type": "json_object"}, "json_schema": json.dumps(SCHEMA)}, "json_schema"),
    ],
)
def test_a_schema_that_would_give_way_is_refused(client, route, body, field):
    caller = client((1, b"{}"))
    reply = caller.call(route, {"model": "m", "prompt": "a", **body})
    assert reply.status == 400 and message_of(route, reply.json).startswith(field)
    assert not caller.inner.bodies
    for legal in ({"response_format": {"type": "json_object"}}, {"response_format": {"type": "text"}}):
        assert caller.call(route, {"model": "m", "prompt": "a", **legal}).status == 200


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


ALLOWED = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "f"}]}


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("conversation", "conv_1"),
        ("conversation", {"id": "conv_1"}),
        ("prompt", {"id": "pmpt_1"}),
        ("tool_choice", ALLOWED),
    ],
)
def test_a_response_to_more_than_is_read_is_refused(client, name, given):
    """To a conversation or a prompt that is elsewhere, or with a choice that SGLang takes for `auto`."""
    caller = client((1, b"{}"))
    reply = caller.call(RESPONSES, {"input": "a", name: given})
    assert (reply.status, reply.json["error"]["param"]) == (400, name) and not caller.inner.bodies
    assert reply.json["error"]["message"].startswith(name)
    for legal in (
        {name: None},
        {"tool_choice": {"type": "function", "name": "f"}},
        {"tool_choice": "required"},
    ):
        assert caller.call(RESPONSES, {"input": "a"} | legal).status == 200


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


@pytest.mark.parametrize("path", GENERATES)
def test_a_compressed_body_is_told_apart_from_broken_json(client, path):
    for name in (b"content-encoding", b"Content-Encoding"):
        reply = client((0, b"{}")).call(path, b"\x1f\x8b", headers=[(name, b"gzip")])
        assert reply.status == 415
        told = reply.json.get("error", reply.json)
        assert "content-encoding 'gzip' is not supported" in (told if path in OLLAMA else told["message"])
    assert client((0, b"{}")).call(path, {}, headers=[(b"content-encoding", b"identity")]).status == 200


@pytest.mark.parametrize("route", [route for route in GENERATION_ROUTES if route != GENERATE])
def test_a_budget_for_thinking_is_not_passed_over(client, route):
    """SGLang's other routes do not hand it on."""
    caller = client((1, b"{}"))
    reply = caller.call(route, {"model": "m", "max_thinking_tokens": 5})
    assert reply.status == 400 and not caller.inner.bodies
    assert "max_thinking_tokens cannot be had on this route" in message_of(route, reply.json)
    for body in ({"max_thinking_tokens": None}, {}):
        assert caller.call(route, {"model": "m", **body}).status == 200
    assert caller.call(GENERATE, {"text": "a", "max_thinking_tokens": 5}).status == 200


@pytest.mark.parametrize("asked", [None, {"temperature": 0.5, "regex": None}])
def test_a_schema_is_had_beside_what_else_was_asked_for(asked):
    request = GenerateReqInput(text="a", sampling_params=asked and dict(asked))
    constrain(request, "{}")
    assert request.sampling_params == (asked or {}) | {"json_schema": "{}"}


@pytest.mark.parametrize("form", ["json_schema", "structural_tag", "regex", "ebnf"])
def test_two_forms_of_one_answer_cannot_be_had(form):
    request = GenerateReqInput(text="a", sampling_params={form: "a"})
    with pytest.raises(ValueError, match="cannot be had together"):
        constrain(request, "{}")
