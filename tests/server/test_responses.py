"""``/v1/responses``: whose place a response may not take, and how many are kept."""

import asyncio
from types import SimpleNamespace

import pytest
from sglang.srt.entrypoints.openai.protocol import ResponsesRequest
from sglang.srt.entrypoints.openai.serving_responses import OpenAIServingResponses

from fathom.server import responses


async def create(self, request, raw_request=None):
    return "created"


@pytest.fixture
def installed(monkeypatch):
    """Our functions around SGLang's, of which one that needs no engine stands for what makes a response."""
    monkeypatch.setattr(OpenAIServingResponses, "create_responses", create)
    monkeypatch.setattr(OpenAIServingResponses, "__init__", lambda self: None)
    for name in ("responses_full_generator", "_response_input_history"):
        monkeypatch.setattr(OpenAIServingResponses, name, getattr(OpenAIServingResponses, name))
    monkeypatch.setattr(ResponsesRequest, "to_sampling_params", ResponsesRequest.to_sampling_params)
    responses.install()


def test_a_response_takes_no_stored_ones_place(installed):
    told = []
    serving = SimpleNamespace(
        response_store={"resp_a": 1}, create_error_response=lambda *a, **b: told.append(b)
    )
    for name in ("resp_b", "resp_a"):
        request = ResponsesRequest(input="x", model="m", request_id=name)
        answer = asyncio.run(OpenAIServingResponses.create_responses(serving, request))
        assert (answer == "created") == (name == "resp_b")
    assert told == [{"param": "request_id"}]


def test_the_stored_responses_used_last_are_kept_with_their_conversations(installed):
    most, serving = responses.STORED, OpenAIServingResponses()
    done, coming = SimpleNamespace(status="completed"), SimpleNamespace(status="in_progress")

    def store(name, response=done):
        serving.msg_store[name] = [name]
        serving.response_store[name] = response

    store("background", coming)
    for index in range(most - 1):
        store(f"resp_{index}")
    for index in range(3 * most):
        serving.msg_store[f"failed {index}"] = []
    assert serving.response_store.get("resp_0") is done  # a use of it
    assert serving.response_store.get("of nobody") is None
    store("next")
    store("after it")
    kept = ["background", *(f"resp_{index}" for index in range(3, most - 1)), "resp_0", "next", "after it"]
    assert list(serving.response_store) == kept
    assert set(kept) <= set(serving.msg_store) and len(serving.msg_store) == 2 * most
    coming.status = "completed"
    store("last")
    assert list(serving.response_store) == [*kept[1:], "last"]
    for index in range(most):
        serving.msg_store[f"failed later {index}"] = []
    assert "background" not in serving.msg_store and "resp_1" not in serving.msg_store


def test_a_conversation_goes_on_though_the_response_before_was_let_go(installed):
    serving = OpenAIServingResponses()
    serving.msg_store["resp_a"] = [{"role": "user", "content": "one"}]
    request = ResponsesRequest(input="two", model="m", request_id="resp_b", previous_response_id="resp_a")
    begun = serving._response_input_history(request)
    assert [message["content"] for message in begun] == ["one", "two"]
    serving.msg_store["resp_b"] = begun
    del serving.msg_store["resp_a"]
    assert serving._response_input_history(request) == begun
    with pytest.raises(KeyError):
        serving._response_input_history(request.model_copy(update={"request_id": "resp_c"}))
