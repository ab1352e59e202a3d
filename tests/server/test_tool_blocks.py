"""Answers with tool calls, in pieces of any size: the text and the calls of the same answer in one piece."""

import json
import re
import time

import pytest
import tool_forms
from streams import cut
from tool_forms import CALLS, FORMS, OTHERS

from fathom.runtime.sglang_host.machine import torchvision_ops

torchvision_ops.declare()

from sglang.srt.entrypoints.openai.protocol import Tool  # noqa: E402
from sglang.srt.function_call.function_call_parser import FunctionCallParser  # noqa: E402

from fathom.server.tools import (  # noqa: E402
    glm_calls,
    tool_arguments,
    tool_blocks,
    tool_steps,
    written_values,
)

TYPES = {"a": "string", "b": "integer", "c": "array", "d": "object", "e": "boolean", "f": "number"}
SCHEMA = {"type": "object", "properties": {name: {"type": kind} for name, kind in TYPES.items()}}
TOOLS = [Tool(type="function", function={"name": name, "parameters": SCHEMA}) for name in ("gun", "fun")]
SAME = {"glm": "glm45", "qwen": "qwen25", "step3p5": "qwen3_coder", "nanbeige": "qwen3_coder"}
"""Other names of parsers."""
ENDS = ("gigachat3",)
"""Formats in which the calls end an answer."""


@pytest.fixture(scope="module", autouse=True)
def ours():
    with pytest.MonkeyPatch.context() as patch:
        for module in (tool_arguments, glm_calls, tool_blocks, tool_steps, written_values):
            for place in module.PLACES:
                patch.setattr(*place)
        yield


def whole(parser, text):
    """As SGLang's chats read an answer that is not streamed."""
    read = FunctionCallParser(TOOLS, parser)
    said, calls = read.parse_non_stream(text) if read.has_tool_call(text) else (text, [])
    assert [call.tool_index for call in calls] == list(range(len(calls)))
    return said.split(), [(call.name, json.loads(call.parameters)) for call in calls]


def streamed_raw(parser, pieces):
    """As SGLang's chats read a stream: the text, and each call's name and the text of its arguments."""
    read, said, calls = FunctionCallParser(TOOLS, parser), "", {}
    for found in (*map(read.parse_stream_chunk, pieces), read.parse_stream_end()):
        said += found[0] or ""
        for item in found[1]:
            name, arguments = calls.get(item.tool_index, ("", ""))
            calls[item.tool_index] = (name + (item.name or ""), arguments + (item.parameters or ""))
    assert list(calls) == list(range(len(calls)))
    return said, list(calls.values())


def streamed(parser, pieces, unfinished=False):
    """As SGLang's chats read a stream; the arguments of a call without an end are None."""
    said, given = streamed_raw(parser, pieces)
    if unfinished and given and not tool_blocks.is_json(given[-1][1]):
        given[-1] = given[-1][0], "null"
    return said.split(), [(name, json.loads(arguments)) for name, arguments in given]


def test_every_parser_has_its_form():
    assert FORMS.keys() | SAME.keys() == FunctionCallParser.ToolCallParserEnum.keys()
    for name, other in SAME.items():
        parsers = FunctionCallParser.ToolCallParserEnum
        assert parsers[name] is parsers[other]


@pytest.mark.parametrize("texts", [("Well: ", " then ", " Done. <"), ("", "\n", "")], ids=["texts", "calls"])
@pytest.mark.parametrize("parser", FORMS)
def test_a_stream_is_the_answer(parser, texts):
    text = FORMS[parser](*texts)
    said, calls = whole(parser, text)
    assert calls == (CALLS[:1] if parser == "gigachat3" else CALLS)
    told = (part for part in texts if part in text and not (part == texts[2] and parser in ENDS))
    assert said == "".join(told).split()
    for pieces in cut(text):
        assert streamed(parser, pieces) == (said, calls), pieces


FLAT = "gemma4", "kimi_k3", "minimax-m3"
"""Formats with a way of their own to write lists and objects, in which ours are not written here."""


@pytest.mark.parametrize("parser", [name for name in FORMS if name not in FLAT])
def test_arguments_of_any_kind(parser, monkeypatch):
    monkeypatch.setattr(tool_forms, "CALLS", OTHERS)
    text = FORMS[parser]("Well: ", " then ", " Done.")
    said, calls = whole(parser, text)
    assert calls == (OTHERS[:1] if parser == "gigachat3" else OTHERS)
    for pieces in cut(text):
        assert streamed(parser, pieces) == (said, calls), pieces


@pytest.mark.parametrize("parser", ["glm45", "glm47"])
def test_a_value_of_glm_without_a_schema_may_end_as_its_mark_begins(parser, monkeypatch):
    calls = [("fun", {"a": "a <", "b": "< </"}), ("gun", {"a": "</arg_value"})]
    monkeypatch.setattr(tool_forms, "CALLS", calls)
    tools = [Tool(type="function", function={"name": name}) for name in ("fun", "gun")]
    monkeypatch.setitem(globals(), "TOOLS", tools)
    for pieces in cut(text := FORMS[parser]("", "", "")):
        assert streamed(parser, pieces) == whole(parser, text) == ([], calls), pieces


STRINGS = "a <", "a </arg", "if a<b:", "", "true", "null", '"q"', "'q'", "1e5", "x\n", "\n x\n\n ", "<a>1</a>"
NULLS = "dots", "mimo", "minimax-m2", "qwen3_coder", "spark25"
"""Formats in which a string cannot be ``null``, which is none."""


@pytest.mark.parametrize("parser", FORMS)
def test_a_string_is_told_as_it_was_written(parser, monkeypatch):
    """Whatever else it could be: an argument of another kind, or the begin of a mark."""
    for string in STRINGS:
        calls = [("fun", {"a": string, "b": 1}), ("gun", {"a": string})]
        monkeypatch.setattr(tool_forms, "CALLS", calls)
        text = FORMS[parser]("", "", "")
        said, found = whole(parser, text)
        for size in (1, 3, len(text)):
            pieces = [text[at : at + size] for at in range(0, len(text), size)]
            assert streamed(parser, pieces) == (said, found), (string, size)
        if not (string == "null" and parser in NULLS):
            assert found == (calls[:1] if parser == "gigachat3" else calls)


@pytest.mark.parametrize("parser", FORMS)
def test_a_piece_may_end_behind_a_backslash(parser, monkeypatch):
    """With what could close a call before it, in a text."""
    text = "x]}}}) </tool_call>\\n" if parser in ("qwen25", "hermes", "trinity") else "x]}}})\\n"
    monkeypatch.setattr(tool_forms, "CALLS", calls := [("fun", {"a": text}), ("gun", {"a": "z"})])
    text = FORMS[parser]("", "", "")
    for end in (found.end() for found in re.finditer(r"\\", text)):
        told = streamed(parser, [text[: end - 4], text[end - 4 : end], text[end:]])
        assert told == ([], calls[:1] if parser == "gigachat3" else calls), text[:end]
        assert whole(parser, text[:end])[0] == []


def test_a_text_of_dots_on_lines_of_its_own(monkeypatch):
    """As its template has it; what else is at the ends is the text's."""
    calls = [("fun", {"a": "    x\n", "b": 1}), ("gun", {"a": "\ny"})]
    monkeypatch.setattr(tool_forms, "CALLS", calls)
    text = re.sub(
        r"(<parameter[^>]+>)(.*?)(</parameter>)", r"\1\n\2\n\3", FORMS["dots"]("", "", ""), flags=re.S
    )
    for pieces in cut(text):
        assert streamed("dots", pieces) == whole("dots", text) == ([], calls), pieces


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("<![CDATA[ if a < b:\n]]>", " if a < b:\n"),
        ("\n<![CDATA[x\n]]>\n", "x\n"),
        ("a &lt; b\n", "a < b\n"),
        ("<p>a</p> &amp; <br>\n", "<p>a</p> &amp; <br>\n"),
    ],
)
def test_a_text_of_minicpm_that_has_marks_of_xml(value, expected):
    """Marked as text, with its marks written in XML's way, or as it is."""
    text = f'<function name="fun"><param name="a">{value}</param><param name="b">1</param></function>'
    for pieces in cut(text):
        told = streamed("minicpm5", pieces)
        assert told == whole("minicpm5", text) == ([], [("fun", {"a": expected, "b": 1})]), pieces


@pytest.mark.parametrize("number", ["inf", "-1e999"])
@pytest.mark.parametrize("parser", ["mimo", "minimax-m2", "minimax-m3"])
def test_a_number_without_end_is_told_as_a_text(parser, number, monkeypatch):
    calls = [("fun", {"f": number, "a": "x"}), ("gun", {"a": "z"})]
    monkeypatch.setattr(tool_forms, "CALLS", calls)
    text = FORMS[parser]("", "", "")
    for pieces in cut(text):
        assert streamed(parser, pieces) == whole(parser, text) == ([], calls), pieces


@pytest.mark.parametrize("blank", ["", "\n"])
@pytest.mark.parametrize("open_kind", [{}, {"anyOf": [{"type": "object"}, {"type": "null"}]}])
def test_an_argument_of_minimax_m3_whose_kind_its_schema_leaves_open(open_kind, blank):
    mark = tool_forms.M3
    inner = f"{blank}{mark}<k>v{mark}</k>{blank}{mark}<l>{blank}{mark}<k>w{mark}</k>{blank}{mark}</l>{blank}"
    values = {"p": inner, "q": "x y", "r": "a ]<] b", "s": ""}
    body = "".join(f"{mark}<{key}>{value}{mark}</{key}>\n" for key, value in values.items())
    text = f'{mark}<tool_call>\n{mark}<invoke name="f">\n{body}{mark}</invoke>\n{mark}</tool_call>'
    schema = {"type": "object", "properties": dict.fromkeys("pqrs", open_kind)}
    tools = [Tool(type="function", function={"name": "f", "parameters": schema})]
    for pieces in cut(text):
        read = FunctionCallParser(tools, "minimax-m3")
        told = [*map(read.parse_stream_chunk, pieces), read.parse_stream_end()]
        arguments = "".join(call.parameters for _, calls in told for call in calls)
        expected = {"p": {"k": "v", "l": {"k": "w"}}, "q": "x y", "r": "a ]<] b", "s": ""}
        assert json.loads(arguments) == expected, pieces


@pytest.mark.parametrize("parser", FORMS)
def test_calls_alone_have_no_text(parser):
    text = FORMS[parser]("", "", "")
    for pieces in cut(text):
        read = FunctionCallParser(TOOLS, parser)
        told = [*map(read.parse_stream_chunk, pieces), read.parse_stream_end()]
        assert "".join(said or "" for said, _ in told) == "", pieces


@pytest.mark.parametrize("parser", FORMS)
def test_blanks_without_end_keep_nobody_waiting(parser):
    """Wherever in a call a model begins to write nothing but them: a linear search takes some 0.03 s of these, one
    that tries every blank as the first one ten.
    """
    text = FORMS[parser]("a ", "", "")
    for stop in (found.end() for found in re.finditer(r"\W+", text)):
        for blank in "\n ":
            begin = time.process_time()
            whole(parser, text[:stop] + blank * 60_000)
            assert time.process_time() - begin < 2


def test_lists_within_lists_of_calls_keep_nobody_waiting():
    """A search that begins again within each takes ten seconds of these."""
    begin = time.process_time()
    whole("pythonic", "[fun(a=" * 6000 + ")]" * 6000)
    assert time.process_time() - begin < 2


@pytest.mark.parametrize(("bracket", "other"), [("[", ""), ('{"k":', ""), ("[", "]")])
@pytest.mark.parametrize("parser", FORMS)
def test_more_brackets_than_python_reads(parser, bracket, other):
    """As of a model that writes nothing else any more: no answer ends by them, and the text before is told once."""
    text = FORMS[parser]("Well: ", "", "").replace("'x y'", "@").replace('"x y"', "@").replace("x y", "@")
    before, behind = text.split("@")
    text = before + 2000 * bracket + 2000 * other + (behind if other else "")
    assert FunctionCallParser(TOOLS, parser).parse_non_stream(text)[0].count("Well:") == 1
    for size in (len(text), 50):
        read = FunctionCallParser(TOOLS, parser)
        pieces = [text[at : at + size] for at in range(0, len(text), size)]
        told = [*map(read.parse_stream_chunk, [*pieces, " more"]), read.parse_stream_end()]
        said = "".join(part or "" for part, _ in told)
        assert said.count("Well: ") == 1
        if getattr(read.detector, "has_given_up", False):
            assert said.endswith(" more") and said.count(bracket) <= text.count(bracket)


@pytest.mark.parametrize("text", ["a < b, [1] c", "a <", "if x[0] < 3 {", "[f b", 'It is {"a": 1} so far'])
@pytest.mark.parametrize("parser", FORMS)
def test_a_text_without_calls_is_told_to_its_end(parser, text):
    for pieces in cut(text):
        assert streamed(parser, pieces) == (text.split(), []), pieces


@pytest.mark.parametrize("parser", ["qwen25", "hermes"])
def test_a_call_of_a_tool_that_there_is_not_is_left_out(parser):
    text = FORMS[parser]("a ", "b ", "c").replace("fun", "none")
    for pieces in cut(text):
        assert streamed(parser, pieces) == whole(parser, text) == (["a", "b", "c"], CALLS[1:]), pieces


def test_a_compact_call_of_a_tool_that_there_is_not_is_left_out():
    none, gun = '[TOOL_CALLS]none[ARGS]{"a": "]}"}', '[TOOL_CALLS]gun[ARGS]{"a": "z"}'
    text = "Well: " + none + none + gun + none + " Done."
    for pieces in cut(text):
        assert streamed("mistral", pieces) == whole("mistral", text) == (["Well:", "Done."], CALLS[1:]), (
            pieces
        )


@pytest.mark.parametrize("wrong", ['{"a": 1,}', '{"a" 1}', '{"a": 1', "{'a': 1}"])
@pytest.mark.parametrize("parser", ["qwen25", "hermes", "trinity"])
def test_a_malformed_call_takes_nothing_with_it(parser, wrong):
    """Streamed, it has begun: what is of it is told, and has no end."""
    text = FORMS[parser]("a ", "b ", "c").replace('{"a": "x y", "b": 1}', wrong)
    assert whole(parser, text) == (["a", "b", "c"], CALLS[1:])
    for pieces in cut(text):
        read, said, calls = FunctionCallParser(TOOLS, parser), "", []
        for more, found in (*map(read.parse_stream_chunk, pieces), read.parse_stream_end()):
            said, calls = said + (more or ""), calls + found
        assert said.split() == ["a", "b", "c"], pieces
        told = tool_blocks.complete(calls, {"fun", "gun"})
        assert [(call.name, json.loads(call.parameters)) for call in told] == CALLS[1:], pieces


@pytest.mark.parametrize("parser", ["qwen25", "hermes", "trinity"])
def test_a_call_without_arguments_has_none(parser):
    text = FORMS[parser]("a ", "b ", "c").replace(', "arguments": {"a": "x y", "b": 1}', "")
    expected = ["a", "b", "c"], [("fun", {}), CALLS[1]]
    for pieces in cut(text):
        assert streamed(parser, pieces) == whole(parser, text) == expected, pieces


@pytest.mark.parametrize(
    "parser",
    ["qwen25", "hermes", "cohere_command4", "deepseekv3", "deepseekv31", "interns1", "mimo", "step3"],
)
def test_text_around_what_is_no_call_is_told(parser):
    detector = FunctionCallParser(TOOLS, parser).detector
    marks = tool_blocks.BLOCKS.get(type(detector)) or (detector.bot_token, detector.eot_token)
    text = f"a {marks[0]} no JSON {marks[1]} b"
    for pieces in cut(text):
        assert streamed(parser, pieces) == whole(parser, text) == (["a", "b"], []), pieces


@pytest.mark.parametrize("length", range(0, 60, 4))
def test_of_coheres_calls_none_is_told_half(length):
    begin = FORMS["cohere_command4"]("a ", "", "").index("fun")
    text = FORMS["cohere_command4"]("a ", "", "")[: begin + length]
    for pieces in cut(text):
        said, calls = streamed("cohere_command4", pieces)
        assert (said, calls) == whole("cohere_command4", text) and said == ["a"]
        assert calls in ([], CALLS[:1])


NONE_BEFORE = "apertus2509", "gigachat3", "lfm2", "pythonic", "step3"
"""Formats of one call, or whose calls are one literal or one block, which is read when it has an end."""


@pytest.mark.parametrize("parser", [name for name in FORMS if name not in NONE_BEFORE])
def test_an_answer_that_ends_within_a_call_has_the_calls_before(parser):
    """Streamed, the call without an end has begun."""
    text = FORMS[parser]("Well: ", "", "")
    text = text[: text.rindex("gun") + 3]
    said, calls = whole(parser, text)
    for pieces in ([text], [text[at : at + 3] for at in range(0, len(text), 3)]):
        told, begun = streamed(parser, pieces, unfinished=True)
        assert (told, begun[: len(calls)]) == (said, calls) and len(begun) <= len(calls) + 1
    assert calls == CALLS[:1]


@pytest.mark.parametrize("parser", [name for name in FORMS if name not in ENDS])
def test_calls_in_two_sections_are_all_told(parser):
    """A model may call, say something and call again; of some formats SGLang reads the first section alone."""
    # Not where each text is a message of its own.
    more, behind = ("", "") if parser in ("gpt-oss", "muse") else ("More ", "Done. ")
    text = FORMS[parser]("Well: ", "", behind) + FORMS[parser](more, "", "")
    expected = ["Well:", *behind.split(), *more.split()], CALLS + CALLS
    for pieces in cut(text):
        assert streamed(parser, pieces) == whole(parser, text) == expected, pieces


@pytest.mark.parametrize("kind", [CALLS, OTHERS, [("fun", {}), ("gun", {})]], ids=["usual", "others", "none"])
@pytest.mark.parametrize("parser", FORMS)
def test_a_call_that_an_answer_ends_within_is_none(parser, kind, monkeypatch):
    """What came of its arguments is no call that anybody should carry out."""
    monkeypatch.setattr(tool_forms, "CALLS", kind)
    text = FORMS[parser]("Well: ", "", "")
    for end in range(len(text) - 1, 4, -7):
        read = FunctionCallParser(TOOLS, parser)
        told = [*read.parse_stream_chunk(text[:end])[1], *read.parse_stream_end()[1]]
        begun = tool_blocks.complete(told, {"fun", "gun"})
        calls = [(call.name, json.loads(call.parameters)) for call in begun]
        assert whole(parser, text[:end])[1] == calls, text[:end]
        assert parser in FLAT or calls == kind[: len(calls)]


@pytest.mark.parametrize("parser", ["deepseekv32", "deepseekv4", "hunyuan", "kimi_k2", "kimi_k3"])
def test_nothing_of_a_section_without_an_end_is_text(parser):
    """Whatever an answer ends within: a mark, a name, an argument, or between two calls."""
    text = FORMS[parser]("Well: ", "", "")
    detector = FunctionCallParser(TOOLS, parser).detector
    begin = text.index(detector.bot_token) + len(detector.bot_token)
    for end in range(begin, text.index(detector.eot_token) + len(detector.eot_token), 2):
        for pieces in ([text[:end]], [text[at : min(at + 9, end)] for at in range(0, end, 9)]):
            read = FunctionCallParser(TOOLS, parser)
            told = [*map(read.parse_stream_chunk, pieces), read.parse_stream_end()]
            assert "".join(said or "" for said, _ in told).split() == ["Well:"], text[:end]


@pytest.mark.parametrize(
    "behind", [" [1] Done.", " 1 Done.", ' "x" Done.', " a [", " {x} is", " ; a", " { x", ' Done; {"a": 1}']
)
@pytest.mark.parametrize("parser", ["llama3", "mistral", "qwen25", "cohere_command4"])
def test_a_text_behind_calls_that_begins_as_json_is_text(parser, behind):
    text = FORMS[parser]("Well: ", "", behind)
    for pieces in cut(text):
        assert streamed(parser, pieces) == whole(parser, text) == (["Well:", *behind.split()], CALLS), pieces


PLAIN = [name for name in FORMS if name not in ("gpt-oss", "kimi_k3", "muse")]
"""Formats in which a text is no message with marks of its own, which is for the parser of thoughts."""


@pytest.mark.parametrize(
    "texts", [("Well: ", "", ""), ("Well: ", " then ", " Done.")], ids=["calls", "texts"]
)
@pytest.mark.parametrize("parser", FORMS)
def test_nothing_of_a_call_that_an_answer_ends_within_is_text(parser, texts):
    """The text is that of the answer with its end, as far as it goes, and a half mark at most, as a text's end may
    be one; and so are the calls.
    """
    text = FORMS[parser](*texts)
    said, calls = ("".join(whole(parser, text)[0]), whole(parser, text)[1])
    full = streamed_raw(parser, [text])[1]
    first = 0 if parser in PLAIN else text.index("Well: ") + len("Well: ")
    for end in range(first + 1, len(text), 2):
        for size in (end, 4):
            pieces = [text[at : min(at + size, end)] for at in range(0, end, size)]
            told, begun = streamed_raw(parser, pieces)
            assert half_or_none("".join(told.split()), said), text[:end]
            assert len(begun) <= len(calls)
            for number, (call, whole_call) in enumerate(zip(begun, full, strict=False)):
                cut_off = number == len(begun) - 1 and not tool_blocks.is_json(call[1])
                assert call[0] == whole_call[0]
                assert whole_call[1].startswith(call[1]) if cut_off else call[1] == whole_call[1]
        if parser in PLAIN or "gun" in text[:end]:
            told_whole, calls_whole = whole(parser, text[:end])
            assert "".join(told_whole) == "".join(told.split()), text[:end]
            assert calls_whole == calls[: len(calls_whole)]


def half_or_none(told, said):
    """Whether a text is the begin of another, but for a mark's first half."""
    same = next(
        (at for at, (one, other) in enumerate(zip(told, said, strict=False)) if one != other), len(said)
    )
    rest = told[same:]
    return not rest or re.fullmatch(r"(<[/|]?|\]<?|\[)[^<>{(]*|\[\w+\(\w*", rest)


@pytest.mark.parametrize(
    ("parser", "head"),
    [
        ("gpt-oss", "<|start|>assistant<|channel|>final<|message|>"),
        ("gpt-oss", "<|start|>assistant<|channel|>final <|constrain|>json<|message|>"),
        ("inkling", "<|message_model|><|content_text|>"),
        ("kimi_k3", "<|open|>response<|sep|>"),
        ("muse", "<|start|>assistant to=user<|message|>"),
    ],
)
def test_a_text_that_is_a_message_is_told_to_its_end(parser, head):
    for pieces in cut(head + "if x[0] <"):
        assert streamed(parser, pieces) == (["if", "x[0]", "<"], []), pieces


@pytest.mark.parametrize(
    ("parser", "text"),
    [("llama3", 'See {"name": "fun", "parameters": {"a": [1 <'), ("pythonic", "See [fun(x, [y")],
)
def test_a_text_that_ends_as_a_call_might_is_told_to_its_end(parser, text):
    for pieces in cut(text):
        assert streamed(parser, pieces) == whole(parser, text) == (text.split(), []), pieces


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        ("llama3", '<|python_tag|>{"name": "fun", "parameters": {"a": "x }}} y'),
        ("llama3", '<|python_tag|>{"name": "fun", "parameters": {"a": "x }}} \\" y", "b": '),
        ("pythonic", "[fun(a='x ])] y"),
        ("muse", "to=functions<|message|>"),
    ],
)
def test_nothing_of_a_cut_call_is_text_whatever_brackets_are_in_it(parser, text):
    for pieces in cut(text):
        assert streamed(parser, pieces, unfinished=True)[0] == whole(parser, text)[0] == [], pieces


@pytest.mark.parametrize("name", ["get-x", "get-xy", "mcp__a.b-1__see", "import"])
@pytest.mark.parametrize("parser", FORMS)
def test_a_tool_may_have_a_name_that_is_none_in_python(parser, name, monkeypatch):
    """Also where its name is in a text, and another tool's is its end or its begin."""
    if parser == "gpt-oss" and "." in name:  # in whose form a dot is behind a namespace
        return
    calls = [(name, {"a": f"x {name}(1) ['", "b": 1}), ("gun", {"a": "z"})]
    names = dict.fromkeys(["gun", "x", "get-x", name])
    tools = [Tool(type="function", function={"name": each, "parameters": SCHEMA}) for each in names]
    monkeypatch.setattr(tool_forms, "CALLS", calls)
    monkeypatch.setitem(globals(), "TOOLS", tools)
    text = FORMS[parser](f"Well {name}(2): ", "", "")
    said, found = whole(parser, text)
    assert said == ["Well", f"{name}(2):"] and found == (calls[:1] if parser == "gigachat3" else calls)
    for size in (1, 4, 30):
        assert streamed(parser, [text[at : at + size] for at in range(0, len(text), size)]) == (said, found)


def test_nothing_of_a_cut_call_of_such_a_tool_is_text(monkeypatch):
    tools = [Tool(type="function", function={"name": "get-x", "parameters": SCHEMA})]
    monkeypatch.setitem(globals(), "TOOLS", tools)
    for pieces in cut(text := "Well: [get-x(a='x ])] y"):
        assert streamed("pythonic", pieces, unfinished=True) == whole("pythonic", text) == (["Well:"], []), (
            pieces
        )


@pytest.mark.parametrize("call", ["get-x(a='b')", "fun(a=", "none"])
def test_text_around_a_list_of_lfm2_that_cannot_be_read_is_told(call):
    text = f"a <|tool_call_start|>[{call}]<|tool_call_end|> b"
    for pieces in cut(text):
        assert streamed("lfm2", pieces) == whole("lfm2", text) == (["a", "b"], []), pieces
