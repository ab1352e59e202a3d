"""A ``null`` is as if it had not been said, against the forms that SGLang's routes read."""

import json

import pytest
from pydantic import ValidationError
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest, CompletionRequest, ResponsesRequest

from fathom.server.middleware import take_policy
from fathom.server.routes import CHAT, COMPLETIONS, GENERATE, MESSAGES, RESPONSES

ASKED = {
    CHAT: {"model": "m", "messages": [{"role": "user", "content": "x"}]},
    COMPLETIONS: {"model": "m", "prompt": "x"},
    RESPONSES: {"model": "m", "input": "x"},
}
FORMS = {CHAT: ChatCompletionRequest, COMPLETIONS: CompletionRequest, RESPONSES: ResponsesRequest}
MEMBERS = [
    (path, name) for path, form in FORMS.items() for name in form.model_fields if name not in ASKED[path]
]
FUNCTION = {"name": "w", "parameters": {"type": "object"}}
OWN = {"request_id"}
"""Members whose default is another one in each request."""


def handed_on(path, body):
    return json.loads(take_policy(json.dumps(body).encode(), path, "m", True)[0])


def read(path, body):
    return FORMS[path].model_validate(handed_on(path, body)).model_dump(exclude=OWN)


@pytest.mark.parametrize(("path", "name"), MEMBERS)
def test_a_member_that_is_null_has_the_value_of_one_that_is_not_said(path, name):
    if name not in OWN:
        assert read(path, ASKED[path] | {name: None}) == read(path, ASKED[path])
    else:
        assert len(FORMS[path].model_validate(handed_on(path, ASKED[path] | {name: None})).request_id) > 8


@pytest.mark.parametrize(
    ("path", "tool"),
    [(CHAT, lambda function: {"type": "function", "function": function}),
     (RESPONSES, lambda function: {"type": "function"} | function)],
)  # fmt: skip
def test_a_tool_is_as_strict_as_it_says(path, tool):
    tools = [tool(FUNCTION | said) for said in ({"strict": None}, {}, {"strict": True}, {"strict": False})]
    given = handed_on(path, ASKED[path] | {"tools": tools})["tools"]
    assert given == [tools[1], *tools[1:]]
    FORMS[path].model_validate(ASKED[path] | {"tools": given})


def test_what_has_no_default_is_the_routes_to_refuse():
    for path, name in ((CHAT, "messages"), (COMPLETIONS, "prompt"), (RESPONSES, "input")):
        assert handed_on(path, ASKED[path] | {name: None})[name] is None
        with pytest.raises(ValidationError, match=name):
            read(path, ASKED[path] | {name: None})


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
@pytest.mark.parametrize(
    "tools", [None, {}, "x", [None], [{}], [{"function": None}], [{"function": [], "strict": 1}]]
)
def test_tools_of_a_wrong_shape_are_handed_on(path, tools):
    given = handed_on(path, ASKED[path] | {"tools": tools, "stop": "\n"})
    assert given.get("tools") == tools


@pytest.mark.parametrize("path", [*FORMS, MESSAGES, GENERATE])
def test_a_body_that_says_everything_passes_byte_for_byte(path):
    body = b'{ "model" : "m",\n "stop": null, "temperature": 1.50 }'
    assert take_policy(body, path, "m", True)[0] == body
