"""``/v1/responses``: whose place a response may not take, and how many are kept."""

import asyncio
from types import SimpleNamespace

import pytest
from openai.types.responses import ResponseOutputMessage
from sglang.srt.entrypoints.openai.protocol import ResponsesRequest
from sglang.srt.entrypoints.openai.serving_responses import OpenAIServingResponses
from starlette.exceptions import HTTPException

from fathom.server.api import responses


async def create(self, request, raw_request=None):
    return "created"


async def make(self, error):
    raise error


@pytest.fixture
def installed(monkeypatch):
    """Our functions around SGLang's, of which ones that need no engine stand for what makes a response."""
    serving = SimpleNamespace(allow_auto_truncate=False)
    monkeypatch.setattr("sglang.srt.runtime_context.get_serving", lambda: serving)
    monkeypatch.setattr(OpenAIServingResponses, "create_responses", create)
    monkeypatch.setattr(OpenAIServingResponses, "__init__", lambda self: None)
    monkeypatch.setattr(OpenAIServingResponses, "responses_full_generator", make)
    history = OpenAIServingResponses._response_input_history
    monkeypatch.setattr(OpenAIServingResponses, "_response_input_history", history)
    monkeypatch.setattr(ResponsesRequest, "to_sampling_params", ResponsesRequest.to_sampling_params)
    responses.install()
    return serving


def test_a_response_takes_no_stored_ones_place(installed):
    told = []
    serving = SimpleNamespace(
        response_store={"resp_a": 1},
        msg_store={"resp_a": ["kept"], "resp_b": ["of a request that failed"]},
        create_error_response=lambda *a, **b: told.append(b),
    )
    for name in ("resp_b", "resp_a"):
        request = ResponsesRequest(input="x", model="m", request_id=name)
        answer = asyncio.run(OpenAIServingResponses.create_responses(serving, request))
        assert (answer == "created") == (name == "resp_b")
    assert told == [{"param": "request_id"}]
    assert serving.msg_store == {"resp_a": ["kept"]}


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
    store(kept[1])  # again: a use of it, as a look at it is
    assert list(serving.response_store) == [*kept[2:], "last", kept[1]]


@pytest.mark.parametrize("status", ["queued", "in_progress"])
def test_no_response_goes_that_is_still_to_come(installed, status):
    serving = OpenAIServingResponses()
    names = {f"resp_{index}" for index in range(responses.STORED + 2)}
    for name in [*names, "done"]:
        told = "completed" if name == "done" else status
        serving.response_store[name] = SimpleNamespace(status=told)
    assert names <= set(serving.response_store)


def test_what_the_engine_refuses_has_its_status(installed):
    serving = SimpleNamespace(create_error_response=lambda message, status_code: (message, status_code))
    refused = OpenAIServingResponses.responses_full_generator(
        serving, HTTPException(503, "the queue is full")
    )
    assert asyncio.run(refused) == ("the queue is full", 503)
    with pytest.raises(RuntimeError, match="no"):
        asyncio.run(OpenAIServingResponses.responses_full_generator(serving, RuntimeError("no")))


@pytest.mark.parametrize(
    ("asked", "room", "limit"),
    [
        (1, 4000, 1),
        (3999, 4000, 3999),
        (5000, 4000, 4000),
        (20, responses.LEAST_ROOM, 20),
        (None, responses.LEAST_ROOM, None),
        (None, responses.LEAST_ROOM + 1, responses.LEAST_ROOM - 1),
    ],
)
def test_a_limit_is_the_clients_or_what_the_context_has_left(installed, asked, room, limit):
    """SGLang tells of no room less than the least; where it cuts prompts, that much is made of it."""
    request = ResponsesRequest(input="x", model="m", max_output_tokens=asked)
    assert request.to_sampling_params(room)["max_new_tokens"] == limit
    installed.allow_auto_truncate = True
    cut = responses.LEAST_ROOM - 2 if limit is None else limit
    assert request.to_sampling_params(room)["max_new_tokens"] == cut


def test_a_conversation_goes_on_though_the_response_before_was_let_go(installed):
    serving = OpenAIServingResponses()
    first = ResponsesRequest(input="one", model="m", request_id="resp_a")
    serving.msg_store["resp_a"] = serving._response_input_history(first)
    request = ResponsesRequest(input="two", model="m", request_id="resp_b", previous_response_id="resp_a")
    begun = serving._response_input_history(request)
    assert [message["content"] for message in begun] == ["one", "two"]
    serving.msg_store["resp_b"] = begun
    del serving.msg_store["resp_a"]
    again = serving._response_input_history(request)
    assert again == begun and again is not begun, "the answer is put behind it"
    with pytest.raises(KeyError):
        serving._response_input_history(request.model_copy(update={"request_id": "resp_c"}))


@pytest.mark.parametrize(
    "form", [{"type": "item_reference"}, {"type": None}, {}], ids=["type", "null", "none"]
)
@pytest.mark.parametrize("kept", [True, False])
def test_items_of_stored_responses_can_be_named_by_their_ids(installed, kept, form):
    """As the AI SDK does with all turns but the newest."""
    said = {"role": "user", "content": "one"}
    told = ResponseOutputMessage(
        id="msg_1",
        content=[{"type": "output_text", "text": "Hi.", "annotations": []}],
        role="assistant",
        status="completed",
        type="message",
    )
    request = ResponsesRequest(input=[said, form | {"id": "msg_1"}, said | {"content": "two"}], model="m")
    serving = OpenAIServingResponses()
    serving.enable_response_store, refusals = kept, []
    serving.create_error_response = lambda message, param: refusals.append((message, param))
    if kept:
        serving.response_store["resp_a"] = SimpleNamespace(status="completed", output=[told])
    answer = asyncio.run(serving.create_responses(request))
    if kept:
        assert answer == "created" and not refusals
        messages = serving._construct_input_messages(request)
        assert [(each["role"], each["content"]) for each in messages][::2] == [
            ("user", "one"),
            ("user", "two"),
        ]
        assert messages[1]["role"] == "assistant" and "Hi." in str(messages[1]["content"])
    else:
        ((message, param),) = refusals
        assert (
            answer is None
            and param == "input"
            and "'msg_1'" in message
            and "--enable-response-store" in message
        )
