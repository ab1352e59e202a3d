"""Thoughts and text of a stream are those of the whole answer, in pieces of any size."""

import pytest

from fathom.runtime.sglang_host.machine import torchvision_ops

torchvision_ops.declare()

from sglang.srt.parser.reasoning_parser import ReasoningParser  # noqa: E402
from streams import cut  # noqa: E402

from fathom.server.answers import thoughts  # noqa: E402

COHERE = "cohere_command4"
TEXTS = (
    "{open}a b{close}c d",
    "a b{close}c d",
    "\n{open}\na b\n{close}\nc d",
    "x {open}a b{close}c {open}d",
    "a b{close}c {open}d {close}e",
    "a {open}b {open}c{close}{half}d {open}",
    "x {label}y {open}a {close}b {label}c",
    "c d {half}",
)
"""Answers of the parsers that have one mark before thoughts and one behind them."""
OF_COHERE = (
    "{open}a b{close}<|START_TEXT|>c d<|END_TEXT|>",
    "{open}\na b{close}\n<|START_TEXT|>c d",
    "a b{close}<|START_TEXT|>c d<|END_TEXT|>",
    "<|START_TEXT|>c d<|END_TEXT|>",
    '{open}a b{close}<|START_ACTION|>[{{"tool_name": "f"}}]<|END_ACTION|>',
    "{open}a b",
    *("." * length + "{open}a {open}b{close}<|START_TEXT|>c" for length in range(3)),
    "a {half}",
)
PLAIN = sorted(
    name
    for name, kind in ReasoningParser.DetectorMap.items()
    if "parse_streaming_increment" not in kind.__dict__
    and kind.__name__ not in ("GptOssDetector", "InklingDetector", "KimiK3Detector")
)


@pytest.fixture(scope="module", autouse=True)
def ours():
    with pytest.MonkeyPatch.context() as patch:
        for place in thoughts.PLACES:
            patch.setattr(*place)
        yield


def parser(name, forced):
    return ReasoningParser(name, force_reasoning=forced)


def answer(name, forced, text):
    """The text with this parser's marks."""
    kind = parser(name, forced).detector
    mark = kind.think_start_token + kind.think_start_self_label
    marks = {"open": mark, "label": kind.think_start_token, "close": kind.think_end_token, "half": mark[:3]}
    return text.format(**marks)


def words(thought, said):
    return (thought or "").split(), (said or "").split()


def whole(name, forced, text):
    return words(*parser(name, forced).parse_non_stream(text))


def streamed(name, forced, pieces):
    read = parser(name, forced)
    told = [*map(read.parse_stream_chunk, pieces), read.parse_stream_end()]
    return words(*("".join(part or "" for part in parts) for parts in zip(*told, strict=True)))


ALWAYS_FORCED = ("k2_horizon",)
NEVER_EMPTY = ("ling3",)
"""Thoughts without a text are told as text too, by SGLang's design."""


@pytest.mark.parametrize(
    ("name", "forced"), [(name, x) for name in PLAIN for x in (False, True) if x or name not in ALWAYS_FORCED]
)
def test_a_stream_is_the_answer(name, forced):
    for text in TEXTS[:-1] if forced and name in NEVER_EMPTY else TEXTS:
        text = answer(name, forced, text)
        expected = whole(name, forced, text)
        for pieces in ([text], *cut(text)):
            assert streamed(name, forced, pieces) == expected, (pieces, expected)


@pytest.mark.parametrize("text", OF_COHERE)
def test_a_stream_of_cohere_is_the_answer(text):
    """Also of pieces with the end of the thoughts and all of the text."""
    text = answer(COHERE, True, text)
    expected = whole(COHERE, True, text)
    for pieces in ([text], *cut(text)):
        assert streamed(COHERE, True, pieces) == expected, pieces


def test_a_text_before_thoughts_is_text():
    """If the thoughts have a mark of their own; behind a template that has begun them there is no text."""
    text = "x <think>a</think> b"
    assert whole("qwen3", False, text) == (["a"], ["x", "b"])
    assert whole("qwen3", True, text) == (["x", "a"], ["b"])
    assert whole("qwen3", False, "x <think>a") == (["a"], ["x"])


def test_a_mark_that_begins_no_thoughts_is_text():
    """Behind thoughts that a template has begun; before the first ones; without the label that it needs."""
    assert whole("qwen3", True, "a</think>b <think>c</think> d") == (["a"], ["b", "<think>c</think>", "d"])
    assert whole("qwen3", False, "x</think>y <think>a</think>b") == (["a"], ["x</think>y", "b"])
    text = "x <|channel>y"
    assert whole("gemma4", False, text) == ([], ["x", "<|channel>y"])
    assert all(streamed("gemma4", False, pieces) == ([], ["x", "<|channel>y"]) for pieces in cut(text))
