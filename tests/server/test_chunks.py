"""Streams of chats, in events of any size: tool calls lose nothing, and no token its log-probabilities."""

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from streams import choices_of, logprobs_of

from fathom.runtime.sglang_host import torchvision_ops
from fathom.server import chunks

CHAT = "/v1/chat/completions"
CALLS = [("weather", {"city": "Delhi", "days": [1, 2]}), ("time", {}), ("weather", {"city": 'a "b" [c], {d'})]
FORMS = {
    "json": lambda calls: json.dumps([{"name": name, "parameters": given} for name, given in calls]),
    "qwen25": lambda calls: "\n".join(
        "<tool_call>\n" + json.dumps({"name": name, "arguments": given}) + "\n</tool_call>"
        for name, given in calls
    ),
    "hermes": lambda calls: "".join(
        "<tool_call>" + json.dumps({"name": name, "arguments": given}) + "</tool_call>"
        for name, given in calls
    ),
    "llama3": lambda calls: (
        "<|python_tag|>" + ";".join(json.dumps({"name": name, "parameters": given}) for name, given in calls)
    ),
    "pythonic": lambda calls: "\n".join(
        f"[{name}({', '.join(f'{key}={value!r}' for key, value in given.items())})]" for name, given in calls
    ),
    "mistral": lambda calls: (
        "[TOOL_CALLS] " + json.dumps([{"name": name, "arguments": given} for name, given in calls])
    ),
}
"""How models of each family write calls; the first is what a grammar makes of any."""


@pytest.fixture(scope="module")
def parsers():
    """A function: name of a form -> a parser's function from a piece of text to text and pieces of calls."""
    torchvision_ops.declare()
    from sglang.srt.entrypoints.openai.protocol import Tool
    from sglang.srt.function_call.function_call_parser import FunctionCallParser
    from sglang.srt.function_call.json_array_parser import JsonArrayParser

    tools = [Tool(type="function", function={"name": name}) for name in ("weather", "time")]
    with pytest.MonkeyPatch.context() as patch:
        for kind, method in (
            (FunctionCallParser, "parse_stream_chunk"),
            (FunctionCallParser, "parse_stream_end"),
            (JsonArrayParser, "parse_streaming_increment"),
        ):
            patch.setattr(kind, method, getattr(kind, method))  # put back at the end
        chunks.install_parsers()

        def parser_of(form):
            if form != "json":
                return FunctionCallParser(tools, form).parse_stream_chunk
            parser = JsonArrayParser()

            def parse(piece):
                result = parser.parse_streaming_increment(piece, tools)
                return result.normal_text, result.calls

            return parse

        yield parser_of


@pytest.mark.parametrize("form", FORMS)
@given(st.integers(1, 3), st.lists(st.integers(0, 200), max_size=12))
@settings(max_examples=60)
def test_calls_are_whole_in_events_of_any_size(parsers, form, count, cuts):
    count = 1 if form == "mistral" else count  # of more SGLang's parser finds the first alone
    text, parse, seen = FORMS[form](CALLS[:count]), parsers(form), {}
    cuts = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    for begin, end in itertools.pairwise(cuts):
        _, calls = parse(text[begin:end])
        for call in calls:
            name, given_ = seen.get(call.tool_index, ("", ""))
            seen[call.tool_index] = name + (call.name or ""), given_ + call.parameters
    assert [(name, json.loads(given_)) for name, given_ in seen.values()] == CALLS[:count]
    assert list(seen) == list(range(count))


def test_more_brackets_than_python_reads(parsers):
    """In a call that a grammar makes: it has begun, and its stream goes on."""
    text, parse = 2000 * "[" + 2000 * "]" + "}}]", parsers("json")
    text = '[{"name": "weather", "parameters": {"city": ' + text
    told = [parse(text[at : at + 50]) for at in range(0, len(text), 50)]
    assert [call.name for _, calls in told for call in calls if call.name] == ["weather"]
    assert not any(said for said, _ in told)


@pytest.mark.parametrize("several", [1, 2])
def test_a_character_of_several_tokens(server, several):
    turns = [{"role": "user", "content": "Where?"}]
    body = {"model": "any", "messages": turns, "temperature": 0, "logprobs": True, "top_logprobs": 2}
    body |= {"max_tokens": 80, "n": several, "regex": "(字|漢|é|a){20}"}
    whole, pieces = (choices_of(server, CHAT, body | {"stream": stream}) for stream in (False, True))
    for choice in whole:
        mine = [piece for piece in pieces if piece["index"] == choice["index"]]
        text = "".join(piece["delta"].get("content") or "" for piece in mine)
        assert len(text) == 20 and text == choice["message"]["content"]
        got, want = logprobs_of(mine), logprobs_of([choice])
        assert len(want) > 25
        assert (
            got == want[: len(got)] and len(got) >= len(want) - 1
        )  # but for one without text, which ends it
