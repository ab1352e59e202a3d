"""Calls that ``tool_choice`` demands, of servers with and without a parser of calls: whole and streamed."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from fathom.runtime.sglang_host.machine import torchvision_ops

torchvision_ops.declare()

from sglang.srt.entrypoints.openai.serving_chat import normalize_assistant_tool_call_arguments  # noqa: E402

from fathom.server.tools.tool_calls import whole_calls, without_halves  # noqa: E402

CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
PARAMETERS = {"type": "object", "properties": {"box": {"enum": ["red", "blue"]}}, "required": ["box"]}
PARAMETERS["additionalProperties"] = False
TURN = [{"role": "user", "content": "Where is the red box?"}]
FUNCTION = {"name": "look", "parameters": PARAMETERS}
NAMED = {"type": "function", "function": {"name": "look"}}
CHAT_TOOLS = [{"type": "function", "function": FUNCTION}]
FLAGS = ("--dtype", "float32", "--max-total-tokens", "4000", "--constrained-json-disable-any-whitespace")
"""JSON without the blanks of which a random model would write no end."""


@pytest.fixture(scope="module")
def compact(share_server, tiny_model):
    return share_server(tiny_model, *FLAGS)


@pytest.fixture(scope="module")
def parsing(share_server, tiny_model):
    return share_server(tiny_model, *FLAGS, "--tool-call-parser", "hermes")


def events_of(server, route, body):
    lines = server.client.post(route, json=body | {"stream": True}).text.splitlines()
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_a_chat(compact, choice):
    limit = {"max_tokens": 200, "temperature": 0, "parallel_tool_calls": False}
    body = {"model": "x", "messages": TURN, "tools": CHAT_TOOLS, "tool_choice": choice, **limit}
    answer = compact.client.post(CHAT, json=body).json()["choices"][0]
    (call,) = answer["message"]["tool_calls"]
    assert answer["finish_reason"] == "tool_calls" and not answer["message"]["content"]
    assert call["function"]["name"] == "look" and call["id"]
    assert json.loads(call["function"]["arguments"])["box"] in ("red", "blue")

    choices = [choice for event in events_of(compact, CHAT, body) for choice in event["choices"]]
    pieces = [piece for choice in choices for piece in choice["delta"].get("tool_calls") or ()]
    assert not any(choice["delta"].get("content") for choice in choices)
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["tool_calls"]
    assert [piece["function"]["name"] for piece in pieces if piece["function"].get("name")] == ["look"]
    told = "".join(piece["function"]["arguments"] or "" for piece in pieces)
    assert json.loads(told) == json.loads(call["function"]["arguments"])


def test_a_message(compact):
    tools = [{"name": "look", "input_schema": PARAMETERS}]
    body = {"model": "x", "messages": TURN, "max_tokens": 200, "temperature": 0, "tools": tools}
    body["tool_choice"] = {"type": "tool", "name": "look"}
    answer = compact.client.post(MESSAGES, json=body).json()
    assert answer["stop_reason"] == "tool_use" and answer["content"]
    for block in answer["content"]:
        assert block["type"] == "tool_use" and block["name"] == "look"
        assert block["input"]["box"] in ("red", "blue")

    events = events_of(compact, MESSAGES, body)
    told = [""] * len(answer["content"])
    for event in events:
        if event["type"] == "content_block_delta":
            told[event["index"]] += event["delta"]["partial_json"]
    assert [json.loads(text) for text in told] == [block["input"] for block in answer["content"]]
    assert [event["delta"]["stop_reason"] for event in events if event["type"] == "message_delta"] == [
        "tool_use"
    ]


def test_calls_that_are_not_demanded_are_text_without_a_parser(compact):
    body = {"model": "x", "messages": TURN, "tools": CHAT_TOOLS, "max_tokens": 4, "temperature": 0}
    answer = compact.client.post(CHAT, json=body).json()["choices"][0]
    assert answer["message"]["content"] and not answer["message"]["tool_calls"]
    assert answer["finish_reason"] == "length"


@pytest.mark.parametrize("parameters", [PARAMETERS, None], ids=["a schema", "no schema"])
@pytest.mark.parametrize("strict", [None, False, True])
def test_arguments_in_the_models_own_form_are_an_object(parsing, parameters, strict):
    """Behind its call a random model writes on, so the first call is looked at."""
    function = {"name": "look", "parameters": parameters, "strict": strict}
    body = {"model": "x", "messages": TURN, "tools": [{"type": "function", "function": function}]}
    body |= {"tool_choice": "required", "max_tokens": 100, "temperature": 0.7, "logprobs": True}
    begun = []
    with ThreadPoolExecutor(8) as pool:
        streams = list(pool.map(lambda seed: events_of(parsing, CHAT, body | {"seed": seed}), range(8)))
    for events in streams:
        choices = [choice for event in events for choice in event["choices"]]
        calls = [call for choice in choices for call in choice["delta"].get("tool_calls") or ()]
        pieces = [piece for piece in calls if piece["index"] == 0]
        assert [piece["function"]["name"] for piece in pieces if piece["function"].get("name")] == ["look"]
        arguments = "".join(piece["function"]["arguments"] or "" for piece in pieces)
        told = [
            entry["token"] for choice in choices for entry in (choice["logprobs"] or {}).get("content", ())
        ]
        assert '"arguments":{' in "".join(told).replace(" ", "")
        assert arguments.startswith("{") or not arguments  # of a call that was cut off before its first value
        begun.append(arguments)
        if strict and parameters:
            assert json.loads(arguments)["box"] in ("red", "blue")
    assert any(begun)


@pytest.mark.parametrize("served, route", [("compact", CHAT), ("compact", MESSAGES), ("parsing", CHAT)])
def test_a_call_that_is_cut_off_is_not_completed(request, served, route):
    """Agents carry out what they can read, whatever the answer's end."""
    server = request.getfixturevalue(served)
    body = {"model": "x", "messages": TURN, "temperature": 0}
    if route == CHAT:
        function = FUNCTION | {"strict": True}
        body |= {"tools": [{"type": "function", "function": function}], "tool_choice": NAMED}
    else:
        body |= {"tools": [{"name": "look", "input_schema": PARAMETERS}]}
        body["tool_choice"] = {"type": "tool", "name": "look"}

    def arguments(limit):
        told = ""
        for event in events_of(server, route, body | {"max_tokens": limit}):
            for choice in event.get("choices", ()):
                calls = choice["delta"].get("tool_calls") or ()
                told += "".join(call["function"]["arguments"] or "" for call in calls if call["index"] == 0)
            if event.get("index") == 0:
                told += event.get("delta", {}).get("partial_json", "")
        return told

    with ThreadPoolExecutor(8) as pool:
        told = list(pool.map(arguments, range(1, 80, 2)))
    assert json.loads(told[-1])["box"] in ("red", "blue")
    assert len({text for text in told if text and text != told[-1]}) > 1
    assert all(told[-1].startswith(text) for text in told)


HALVES = ("", '{"box": "bl', "3", "[]")


@pytest.mark.parametrize("choice", ["required", "look"])
@pytest.mark.parametrize("route", [CHAT, "/v1/responses"])
def test_a_demanded_call_that_is_cut_off_is_no_text(compact, route, choice):
    """Wherever in its JSON the limit falls."""
    body = {"model": compact.client.get("/v1/models").json()["data"][0]["id"], "temperature": 0}
    body["parallel_tool_calls"] = False
    if route == CHAT:
        body |= {"messages": TURN, "tools": CHAT_TOOLS, "tool_choice": NAMED if choice == "look" else choice}
    else:
        named = {"type": "function", "name": "look"}
        body |= {"input": TURN, "tools": [FUNCTION | {"type": "function"}], "store": False}
        body["tool_choice"] = named if choice == "look" else choice
    told = []
    for limit in range(1, 80, 6):
        bound = {"max_tokens": limit} if route == CHAT else {"max_output_tokens": limit}
        answer = compact.client.post(route, json=body | bound).json()
        if route == CHAT:
            message = answer["choices"][0]["message"]
            assert not message["content"], message
            calls = [call["function"] for call in message["tool_calls"] or ()]
        else:
            assert not any(item["type"] == "message" for item in answer["output"]), answer["output"]
            calls = [item for item in answer["output"] if item["type"] == "function_call"]
        told.append([json.loads(call["arguments"]) for call in calls])
    assert told[0] == [] and told[-1][0]["box"] in ("red", "blue")


def test_of_demanded_calls_that_an_answer_ends_within_the_whole_ones_are_told():
    calls = [{"name": "look", "parameters": {"box": "a [1], {"}}, {"name": "look", "parameters": {}}]
    text = json.dumps(calls)
    for end in range(1, len(text)):
        found = whole_calls(text[:end])
        assert found == calls[: len(found)] and len(found) >= (end > text.index("}}") + 1)
    assert whole_calls("[1] says that") is None and whole_calls("Hm.") is None


def test_a_chat_goes_on_after_a_call_that_was_cut_off(compact):
    """Its client tells of it as it was told."""

    def prompt(arguments):
        call = {"id": "a", "type": "function", "function": {"name": "look", "arguments": arguments}}
        result = {"role": "tool", "tool_call_id": "a", "content": "Error: arguments are not JSON"}
        said = [*TURN, {"role": "assistant", "content": None, "tool_calls": [call]}, result]
        body = {"model": "x", "messages": said, "tools": CHAT_TOOLS, "max_tokens": 1, "temperature": 0}
        reply = compact.client.post(CHAT, json=body)
        assert reply.status_code == 200, reply.text
        return reply.json()["usage"]["prompt_tokens"]

    assert {prompt(half) for half in HALVES} == {prompt("{}")}


def test_a_call_that_was_cut_off_has_no_arguments():
    given = [*HALVES, '{"box": "blue"}', {"box": 1}]
    calls = [{"id": "a", "function": {"name": "look", "arguments": each}} for each in given]
    message = {"role": "assistant", "tool_calls": [*calls, {"function": {"name": "look"}}, None]}
    normalize_assistant_tool_call_arguments(message, strict=False)
    without_halves(message)
    told = [call["function"]["arguments"] for call in message["tool_calls"][: len(given)]]
    assert told == [{}] * len(HALVES) + [{"box": "blue"}, {"box": 1}]
    assert message["tool_calls"][len(given) :] == [{"function": {"name": "look"}}, None]
    for other in ({"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": None}):
        without_halves(other)
