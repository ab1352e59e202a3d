"""Tool calls read while they are streamed: what SGLang reads of them, without reading all of them again."""

import json
import random
import re
from contextlib import contextmanager
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fathom.runtime.sglang_host.machine import torchvision_ops

torchvision_ops.declare()

from partial_json_parser.core.options import Allow  # noqa: E402
from sglang.srt.entrypoints.openai.protocol import Tool  # noqa: E402
from sglang.srt.function_call import deepseekv32_detector, lfm2_detector  # noqa: E402
from sglang.srt.function_call.function_call_parser import FunctionCallParser  # noqa: E402
from sglang.srt.function_call.mistral_detector import MistralDetector  # noqa: E402
from sglang.srt.function_call.pythonic_detector import PythonicDetector  # noqa: E402

from fathom.server.tools import glm_calls, tool_arguments, tool_blocks, tool_steps  # noqa: E402

HALF = re.compile(r"\\u[dD][89abAB]..(\\(u([dD](.(.)?)?)?)?)?$")
"""The begin of a character that JSON may write as two: SGLang reads half of it, and we nothing."""
PIECES = ['"', "\\", "\n", "é", "😀", "{", "}", "[", "]", ":", ",", " ", "/", "\x7f", "\u2028", "a", "0"]
TEXTS = st.lists(st.sampled_from(PIECES), max_size=8).map("".join)
VALUES = st.recursive(
    TEXTS | st.sampled_from([0, 1, -2.5, 10**30, 1e-7, True, False, None, float("nan")]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)


def attempted(function, *args):
    try:
        return repr(function(*args))  # of numbers that are none too
    except Exception as error:
        return type(error)


@settings(max_examples=150, deadline=None)
@given(
    VALUES,
    st.booleans(),
    st.sampled_from([None, 2]),
    st.sampled_from(["", "\n</tool_call>", '"', ', {"a": "b']),
)
def test_every_beginning_of_a_call_is_read_as_sglang_reads_it(value, escaped, indent, rest):
    text = json.dumps({"name": "f", "arguments": value}, ensure_ascii=escaped, indent=indent) + rest
    for end in range(1, len(text) + 1):
        for flags in (Allow.ALL, Allow.ALL & ~Allow.STR):
            if not HALF.search(text[:end]):
                mine = attempted(tool_arguments.read, text[:end], flags)
                assert mine == attempted(tool_arguments._read, text[:end], flags)


@given(st.text("ab", max_size=9), st.text("ab", max_size=9))
def test_what_two_texts_begin_with(one, other):
    prefix = tool_arguments.common_prefix(one, other)
    assert one.startswith(prefix) and other.startswith(prefix)
    assert one[len(prefix) :][:1] != other[len(prefix) :][:1] or prefix in (one, other)


@pytest.fixture
def with_ours(monkeypatch):
    """Installs our functions; what is SGLang's comes back."""

    def install():
        for place in tool_arguments.PLACES + tool_blocks.PLACES:
            monkeypatch.setattr(*place)

    return install


LINES = "".join(f"    x{i} = {{'a': [{i}, \"é\"], 'b': f({i})}}  # \\ note\n" for i in range(30))
CALL = {"name": "write", "arguments": {"path": "a.py", "content": LINES, "mode": 420}}


def items_of(parser, text):
    """What each of many pieces of a text gives."""
    draw = random.Random(1)
    cuts = [0, *sorted(draw.sample(range(1, len(text)), len(text) // 3)), len(text)]
    parameters = {"type": "object", "properties": {"path": {"type": "string"}}}
    read = FunctionCallParser(
        [Tool(type="function", function={"name": "write", "parameters": parameters})], parser
    )
    return [
        [item.model_dump() for item in read.parse_stream_chunk(text[begin:end])[1]]
        for begin, end in pairwise(cuts)
    ]


def arguments_in(items):
    return "".join(item["parameters"] for found in items for item in found)


@pytest.mark.parametrize(
    ("parser", "form"), [("qwen", "<tool_call>\n{}\n</tool_call>"), ("hermes", "<tool_call>{}</tool_call>")]
)
def test_a_long_call_in_pieces(with_ours, monkeypatch, parser, form):
    """The same items, of which SGLang's reader has read next to none."""
    text = form.format(json.dumps(CALL, ensure_ascii=False))
    stock = items_of(parser, text)
    with_ours()
    asked, slow = [], tool_arguments._read
    monkeypatch.setattr(tool_arguments, "_read", lambda *args: asked.append(0) or slow(*args))
    assert items_of(parser, text) == stock
    assert json.loads(arguments_in(stock)) == CALL["arguments"]
    assert 0 < len(asked) < len(stock) / 10


def test_a_long_call_of_deepseek_in_pieces(with_ours, monkeypatch):
    """The same items, without SGLang's comparison of all arguments with those before, a character at a time."""
    inner = f'<｜DSML｜parameter name="path" string="true">{LINES}</｜DSML｜parameter>'
    text = f'<｜DSML｜invoke name="write">{inner}</｜DSML｜invoke>'
    text = f"<｜DSML｜function_calls>{text}</｜DSML｜function_calls>"
    stock = items_of("deepseekv32", text)
    monkeypatch.setattr(deepseekv32_detector, "_find_common_prefix", None)
    with_ours()
    assert arguments_in(items_of("deepseekv32", text)) == arguments_in(stock)
    assert json.loads(arguments_in(stock)) == {"path": LINES.strip()}


@pytest.mark.parametrize("form", ["<|python_tag|>{}", "{}", "{}; {}"])
def test_a_call_of_a_llama_that_writes_python(with_ours, form):
    with_ours()
    whole = json.dumps(CALL, ensure_ascii=False)
    items = items_of("llama3", form.format(whole, whole.replace("a.py", "b.py")))
    files = ["a.py", "b.py"][: form.count("{}")]
    assert [item["tool_index"] for found in items for item in found if item["name"]] == list(
        range(len(files))
    )
    for index, file in enumerate(files):
        own = [[item for item in found if item["tool_index"] == index] for found in items]
        assert json.loads(arguments_in(own)) == CALL["arguments"] | {"path": file}


def test_a_call_of_a_llama_that_is_a_dictionary(with_ours):
    text = str({"name": "write", "arguments": {"path": "a.py", "mode": 420}})
    stock = items_of("llama3", text)
    with_ours()
    assert items_of("llama3", text) == stock and arguments_in(stock)


@contextmanager
def ours_in_place():
    """For one example of hypothesis, which takes no fixture for it."""
    with pytest.MonkeyPatch.context() as patch:
        for place in tool_arguments.PLACES + tool_blocks.PLACES + tool_steps.PLACES:
            patch.setattr(*place)
        yield


TOOLS = [Tool(type="function", function={"name": name, "parameters": {"type": "object"}}) for name in "fg"]
CALLS = st.lists(
    st.tuples(st.sampled_from("fg"), st.dictionaries(TEXTS, TEXTS | st.integers(-5, 5), max_size=2)),
    min_size=1,
    max_size=3,
)


def streamed(parser, text, cuts, to_the_end=False):
    """The text and the calls (name, arguments) of a stream in pieces, each read to its end."""
    read = FunctionCallParser(TOOLS, parser)
    said, calls = "", {}
    for begin, end in pairwise([0, *sorted({cut % len(text) for cut in cuts}), len(text)]):
        piece, more = text[begin:end], True
        while more:
            more = False
            normal, found = read.parse_stream_chunk(piece)
            piece, said = "", said + (normal or "")
            for item in found:
                more = True
                name, arguments = calls.get(item.tool_index, ("", ""))
                calls[item.tool_index] = (name + (item.name or ""), arguments + item.parameters)
            more = more or bool(normal)
    if to_the_end:
        said += read.parse_stream_end()[0]
    return said, [calls[index] for index in sorted(calls)]


CUTS = st.lists(st.integers(0, 10**6), max_size=12)


@settings(max_examples=150, deadline=None)
@given(CALLS, CUTS, st.sampled_from([", ", ",", " ,\n "]), st.booleans(), st.sampled_from([" ", ""]))
def test_all_of_mistrals_calls_are_told(calls, cuts, between, compact, blank):
    written = [json.dumps(arguments) for _, arguments in calls]
    if compact:
        parts = zip(calls, written, strict=True)
        text = "".join(f"[TOOL_CALLS]{name}[ARGS]{arguments}" for (name, _), arguments in parts)
    else:
        parts = zip(calls, written, strict=True)
        each = [f'{{"name": "{name}", "arguments": {arguments}}}' for (name, _), arguments in parts]
        text = f"[TOOL_CALLS]{blank}[{between.join(each)}]"
    with ours_in_place():
        said, found = streamed("mistral", "Well: " + text, cuts)
        rest, whole = FunctionCallParser(TOOLS, "mistral").parse_non_stream("Well: " + text)
    assert said.strip() == rest == "Well:"
    assert [(call.name, json.loads(call.parameters)) for call in whole] == calls
    assert [(name, json.loads(arguments)) for name, arguments in found] == calls


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(["Well: ", "a < b;\n", "[1] ", "x <"]), TEXTS, CUTS)
@pytest.mark.parametrize(
    ("parser", "form"), [("qwen25", "<tool_call>\n{}\n</tool_call>"), ("llama3", "<|python_tag|>{}")]
)
def test_a_text_before_a_call_is_told(parser, form, before, given_, cuts):
    call = form.format(json.dumps({"name": "f", "arguments": {"a": given_}}))
    with ours_in_place():
        said, ((name, arguments),) = streamed(parser, before + call, cuts)
    assert (said, name, json.loads(arguments)) == (before, "f", {"a": given_})


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from(["[1]", "a[i] = 2", "]", " ", "x\n"]), min_size=1, max_size=9), CUTS)
def test_a_mistral_that_calls_nothing_keeps_its_brackets(pieces, cuts):
    text = "".join(pieces) + "."
    with ours_in_place():
        assert streamed("mistral", text, cuts) == (text, [])


AROUND = st.sampled_from(["", "Well: ", "it's [1], [f(", "\n[x]"])


@settings(max_examples=200, deadline=None)
@given(st.lists(CALLS, min_size=1, max_size=2), CUTS, st.sampled_from(["", "Well: ", "[x] "]), AROUND)
def test_calls_in_python_are_told(lists, cuts, before, behind):
    """Also of several lists, with brackets in texts, and beside brackets that are no calls."""
    text, calls = before, []
    for each in lists:
        named = [(name, {f"a{i}": v for i, v in enumerate(a.values())}) for name, a in each]
        parts = (f"{name}({', '.join(f'{k}={v!r}' for k, v in a.items())})" for name, a in named)
        text, calls = f"{text}[{', '.join(parts)}] ", calls + named
    with ours_in_place():
        said, found = streamed("pythonic", text + behind, cuts, to_the_end=True)
        rest, whole = FunctionCallParser(TOOLS, "pythonic").parse_non_stream(text + behind)
    assert said.split() == rest.split() == (before + behind).split()
    assert [(name, json.loads(arguments)) for name, arguments in found] == calls
    assert [(call.name, json.loads(call.parameters)) for call in whole] == calls


@pytest.mark.parametrize("lines", [50, 2000])
def test_a_text_with_quotes_in_quotes(with_ours, monkeypatch, lines):
    """LFM2's parser tries each as the end of the text, and reads all of the calls for it."""
    read = []
    parse = lfm2_detector.safe_ast_parse
    monkeypatch.setattr(lfm2_detector, "safe_ast_parse", lambda text: read.append(len(text)) or parse(text))
    with_ours()
    code = "".join(f"print('x{i} = ', {i})\n" for i in range(lines))
    parser = FunctionCallParser(TOOLS, "lfm2")
    _, calls = parser.parse_non_stream(f"<|tool_call_start|>[f(a='{code}')]<|tool_call_end|>")
    assert [json.loads(call.parameters) for call in calls] == ([{"a": code}] if lines == 50 else [])
    assert 0 < sum(read) < tool_arguments.MOST_TRIED


@pytest.mark.parametrize("arguments", [30, 20000])
def test_a_call_in_python_without_an_end_is_none(with_ours, arguments):
    """SGLang's search would take minutes for 30 arguments, and twice as long for each more."""
    with_ours()
    text = "[f(" + "a=1, " * arguments
    assert not FunctionCallParser(TOOLS, "pythonic").has_tool_call(text)
    assert streamed("pythonic", text, [4, 9], to_the_end=True) == (text, [])


@pytest.mark.parametrize(
    ("parser", "form"), [("mistral", "[TOOL_CALLS]f[ARGS]{{{}}}"), ("pythonic", "[f({})]")]
)
def test_a_call_that_is_told_at_its_end_is_looked_at_there(with_ours, monkeypatch, parser, form):
    detector, asked = {"mistral": MistralDetector, "pythonic": PythonicDetector}[parser], []
    name = {"mistral": "_extract_json_value", "pythonic": "_find_matching_bracket"}[parser]
    with_ours()
    look = getattr(detector, name)
    monkeypatch.setattr(detector, name, lambda *args: asked.append(0) or look(*args))
    lines = json.dumps("x = 1\n" * 300)
    text = form.format(f'"a": {lines}' if parser == "mistral" else f"a={lines}")
    said, ((called, arguments),) = streamed(parser, text, range(0, len(text), 4))
    assert (said, called, json.loads(arguments)) == ("", "f", {"a": json.loads(lines)})
    assert 0 < len(asked) < 8


@pytest.fixture(scope="module")
def with_our_glm():
    """For all examples of hypothesis."""
    with pytest.MonkeyPatch.context() as patch:
        for place in glm_calls.PLACES:
            patch.setattr(*place)
        yield


MARKS = ["<tool_call>", "</tool_call>", "<arg_key>", "<arg_key", "\n", "\\n", "\\", "n", " ", "a", "<"]


@settings(max_examples=500, deadline=None)
@given(text=st.lists(st.sampled_from(MARKS), max_size=9).map("".join))
@pytest.mark.parametrize(
    ("find", "pattern"),
    [(glm_calls.call_of_glm45, glm_calls.OF_GLM_45), (glm_calls.call_of_glm47, glm_calls.OF_GLM_47)],
)
def test_a_call_of_glm_is_what_sglangs_pattern_finds(find, pattern, text):
    mine, theirs = find(text), re.search(pattern, text, re.DOTALL)
    assert (mine is None) == (theirs is None)
    if theirs:
        assert [mine.group(number) or "" for number in (1, 2, 3)] == [part or "" for part in theirs.groups()]
        assert mine.end() == theirs.end() and (not theirs.group(3) or mine.end(3) == theirs.end(3))


def in_glms_words(name, arguments, between):
    pairs = (
        f"<arg_key>{key}</arg_key>{between}<arg_value>{value}</arg_value>{between}"
        for key, value in arguments.items()
    )
    return f"<tool_call>{name}{between}{''.join(pairs)}</tool_call>"


GLMS = pytest.mark.parametrize(("parser", "between"), [("glm45", "\n"), ("glm47", "")])


@GLMS
@settings(max_examples=100, deadline=None)
@given(
    calls=st.lists(
        st.tuples(
            st.sampled_from("fg"), st.dictionaries(st.sampled_from("ab"), st.sampled_from(["x", "y <z\n"]))
        ),
        max_size=3,
    ),
    before=st.sampled_from(["Well: ", "a < b\n", "<", ""]),
    cuts=CUTS,
)
def test_glms_calls_and_the_texts_between_them(with_our_glm, parser, between, calls, before, cuts):
    text = "".join(before + in_glms_words(*call, between) for call in calls) + "Done."
    said, found = streamed(parser, text, cuts)
    assert said == before * len(calls) + "Done."
    assert [(name, json.loads(arguments)) for name, arguments in found] == calls


@GLMS
def test_a_long_call_of_glm_is_not_searched_with_each_piece(with_our_glm, monkeypatch, parser, between):
    """By no regular expression, while it has no end."""
    asked, search = [], re.search
    monkeypatch.setattr(re, "search", lambda *args: asked.append(0) or search(*args))
    text = in_glms_words("f", {"a": "x = 1\n" * 300}, between)
    said, ((name, arguments),) = streamed(parser, text, range(0, len(text), 4))
    assert (said, name, json.loads(arguments)) == ("", "f", {"a": "x = 1\n" * 300})
    assert len(asked) < 8
