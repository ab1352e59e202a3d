"""Tool calls in events of any size: they are whole, and numbered in their order."""

import itertools
import json
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fathom.runtime.sglang_host.machine import torchvision_ops

torchvision_ops.declare()

from sglang.srt.entrypoints.openai.protocol import Tool  # noqa: E402
from sglang.srt.function_call.core_types import ToolCallItem  # noqa: E402
from sglang.srt.function_call.function_call_parser import FunctionCallParser  # noqa: E402
from sglang.srt.function_call.json_array_parser import JsonArrayParser  # noqa: E402

from fathom.server.tools import tool_steps  # noqa: E402

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
    tools = [Tool(type="function", function={"name": name}) for name in ("weather", "time")]
    with pytest.MonkeyPatch.context() as patch:
        for place in tool_steps.PLACES:
            patch.setattr(*place)

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


def test_parts_of_a_call_whose_name_is_unknown_have_one_number():
    """A stream goes on whatever a parser leaves out."""
    pieces = [(2, "weather"), (2, None), (0, None), (0, None), (2, None), (2, "time"), (2, None)]
    calls = [ToolCallItem(tool_index=index, name=name, parameters="") for index, name in pieces]
    parser = SimpleNamespace()
    told = [call.tool_index for part in (calls[:3], calls[3:]) for call in tool_steps.numbered(parser, part)]
    assert told == [0, 0, 1, 1, 0, 2, 2]
