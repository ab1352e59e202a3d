"""What GPT-OSS says before its calls, of answers that end anywhere."""

import re

import pytest

from fathom.runtime.sglang_host.machine import torchvision_ops

torchvision_ops.declare()

from sglang.srt.entrypoints.openai.protocol import Tool  # noqa: E402
from sglang.srt.function_call.function_call_parser import FunctionCallParser  # noqa: E402
from sglang.srt.parser.reasoning_parser import ReasoningParser  # noqa: E402

from fathom.server.answers import preambles, thoughts  # noqa: E402
from fathom.server.tools import tool_blocks, tool_steps  # noqa: E402

TOOLS = [Tool(type="function", function={"name": "look", "parameters": {"type": "object"}})]
THOUGHT = "<|channel|>analysis<|message|>Hm.<|end|>"
HEAD = "<|start|>assistant<|channel|>commentary<|message|>"
CALL = "<|start|>assistant<|channel|>commentary to=functions.look <|constrain|>json<|message|>{}<|call|>"
SAID = "C++ is <b>there</b>, I look"
TOKENS = re.compile(r"<\|\w+\|>|[^<\s]+|\s|<")


@pytest.fixture(scope="module", autouse=True)
def ours():
    with pytest.MonkeyPatch.context() as patch:
        for module in (thoughts, preambles, tool_blocks, tool_steps):
            for place in module.PLACES:
                patch.setattr(*place)
        yield


def streamed(pieces, reads_thoughts):
    """The text, and how many calls there are; as a chat reads them, with a parser of thoughts or without."""
    thought, calls = ReasoningParser("gpt-oss"), FunctionCallParser(TOOLS, "gpt-oss")
    if reads_thoughts:
        pieces = [thought.parse_stream_chunk(piece)[1] for piece in pieces]
    told = [*(calls.parse_stream_chunk(piece) for piece in pieces if piece), calls.parse_stream_end()]
    return "".join(said or "" for said, _ in told), sum(bool(call.name) for _, part in told for call in part)


def whole(text, reads_thoughts):
    if reads_thoughts:
        text = ReasoningParser("gpt-oss").parse_non_stream(text)[1]
    calls = FunctionCallParser(TOOLS, "gpt-oss")
    said, found = calls.parse_non_stream(text) if calls.has_tool_call(text) else (text, [])
    return said, len(found)


@pytest.mark.parametrize("reads_thoughts", [True, False])
@pytest.mark.parametrize("before", [THOUGHT, THOUGHT + CALL], ids=["first", "behind-a-call"])
def test_what_is_said_is_told_wherever_the_answer_ends(before, reads_thoughts):
    for end in range(2, len(SAID) + 1):
        said = SAID[:end]
        for rest in ("", "<|end|>", "<|end|>" + CALL[:60], "<|end|>" + CALL):
            text = before + HEAD + said + rest
            calls = before.count(CALL) + rest.count(CALL)
            told, found = whole(text, reads_thoughts)
            assert (told.split(), found) == (said.split(), calls), text
            for pieces in (TOKENS.findall(text), [text], [before, HEAD + said, rest]):
                assert streamed(filter(None, pieces), reads_thoughts) == (said, calls), (text, pieces)


@pytest.mark.parametrize("reads_thoughts", [True, False])
def test_it_is_told_as_it_is_written(reads_thoughts):
    """Not when it ends."""
    parts = [streamed(TOKENS.findall(THOUGHT + HEAD + SAID[:end]), reads_thoughts)[0] for end in (5, 12)]
    assert parts == [SAID[:5], SAID[:12]]


def test_no_begin_of_it_is_left_out_behind_a_call():
    """Where it could be the name of its channel, which some models repeat there."""
    pieces = [*TOKENS.findall(CALL + HEAD), "C", "o", "."]
    assert streamed(pieces, reads_thoughts=False) == ("Co.", 1)


@pytest.mark.parametrize("reads_thoughts", [True, False])
def test_nothing_of_a_call_is_told_as_text(reads_thoughts):
    for end in range(1, len(CALL)):
        pieces = TOKENS.findall(THOUGHT + CALL[:end])
        assert "look" not in streamed(pieces, reads_thoughts)[0]
