"""Protected spans under three chat templates, and under templates that defeat one way of finding them or all."""

import itertools
import json
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from fathom.runtime.specprefill.config import PROTECTABLE, PROTECTED, SYSTEM, TOOL_RESULTS, TOOLS, USER
from fathom.server.requests import spans
from fathom.server.requests.spans import HEADER, find_spans

MODEL = Path(__file__).resolve().parents[2] / "demo" / "models" / "target"
DEMO = (MODEL / "chat_template.jinja").read_text()

CHATML = """{%- if tools %}<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content }}

{% endif %}You may call these functions:
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}Answer with a call.<|im_end|>
{% elif messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}
{%- for m in messages %}
{%- if m.role == 'tool' %}<|im_start|>user
<tool_response>
{{ m.content }}
</tool_response><|im_end|>
{% elif m.role != 'system' or not loop.first %}<|im_start|>{{ m.role }}
{% if m.content is string %}{{ m.content | trim }}
{%- else %}{% for p in m.content or [] %}{{ p.text }}{% endfor %}{% endif %}
{%- for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

LLAMA = """{{- '<|begin_of_text|>' }}{%- set system = '' %}
{%- if messages[0].role == 'system' %}{%- set system = messages[0].content | trim %}{%- set messages = messages[1:] %}{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' }}
{%- if tools %}{{- 'Environment: python\\n' }}{%- endif %}
{{- 'Knowledge ends: 2025\\n\\n' + system + '<|eot_id|>' }}
{%- if tools %}
{{- '<|start_header_id|>user<|end_header_id|>\\n\\nThese functions exist:\\n\\n' }}
{%- for tool in tools %}{{- tool | tojson(indent=2) + '\\n\\n' }}{%- endfor %}
{{- messages[0].content | trim + '<|eot_id|>' }}{%- set messages = messages[1:] %}
{%- endif %}
{%- for m in messages %}
{%- if m.role == 'tool' %}{{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + m.content | tojson + '<|eot_id|>' }}
{%- elif m.tool_calls %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' + m.tool_calls[0].function | tojson + '<|eot_id|>' }}
{%- else %}{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + m.content | trim + '<|eot_id|>' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""  # noqa: E501

RULES, QUESTION = "  You answer in one word.\nNever guess.\n", " What is the weather in Delhi? 7 "
RESULT = '{"celsius": 31,\n "sky": "clear é"}'
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"function": {"name": "weather", "arguments": {}}}],
}
TALK = [
    {"role": "system", "content": RULES},
    {"role": "user", "content": QUESTION},
    CALL,
    {"role": "tool", "content": RESULT},
    {"role": "user", "content": "And tomorrow? " * 30},
]

SOME_KINDS = [kinds for n in range(5) for kinds in itertools.combinations(PROTECTABLE, n)]


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(MODEL)


class Prompt:
    """A conversation under a template, and the text of its spans."""

    def __init__(self, tokenizer, template, messages, tools=None, prompt_ids=None, kinds=PROTECTED):
        tokenizer.chat_template = template
        self.tokenizer = tokenizer
        self.text = tokenizer.apply_chat_template(
            messages, tools=tools, tokenize=False, add_generation_prompt=True
        )
        self.ids = tokenizer.encode(self.text, add_special_tokens=False)
        self.found = find_spans(tokenizer, messages, tools, prompt_ids, kinds=kinds)
        self.run = self.ids if prompt_ids is None else prompt_ids

    def texts(self, kind):
        return [self.tokenizer.decode(self.run[start:stop]) for start, stop in self.found.spans[kind]]


def test_demo_template(tokenizer):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Where is Emma?"}]
    messages += [{"role": "tool", "content": "Emma is in Delhi."}, {"role": "user", "content": "Sure?"}]
    prompt = Prompt(tokenizer, DEMO, messages)
    assert prompt.found.problems == {}
    assert prompt.texts(SYSTEM) == ["<s><|system|>Be brief.<|end|><|user|>"]
    assert prompt.texts(TOOL_RESULTS) == ["Emma is in Delhi."]
    assert prompt.texts(HEADER) == ["<|assistant|>"]
    assert prompt.found.spans[TOOLS] == ()
    assert prompt.found.tokens() == tuple(sorted(sum(prompt.found.spans.values(), ())))


def test_chatml_template_with_tools(tokenizer):
    prompt = Prompt(tokenizer, CHATML, TALK, [TOOL, {**TOOL, "extra": "x"}])
    assert prompt.found.problems == {}
    (system,), (tools,), (result,), (header,) = (prompt.texts(kind) for kind in (*PROTECTED, HEADER))
    assert system.startswith("<|im_start|>system\n  You answer") and RULES in system
    assert system.endswith("<|im_start|>user\n") and "What is" not in system
    assert "You may call" in tools and tools.count('"name": "weather"') == 2 and "a call." in tools
    assert "You answer" not in tools and "<|im_start|>user" not in tools
    assert result == RESULT
    assert header == "<|im_start|>assistant\n"


def test_llama_template_with_tools_in_the_first_question(tokenizer):
    prompt = Prompt(tokenizer, LLAMA, TALK, [TOOL])
    assert prompt.found.problems == {}
    (system,) = prompt.texts(SYSTEM)
    assert system.startswith("<|begin_of_text|>") and RULES.strip() in system and "What is" not in system
    first, last = prompt.texts(TOOLS)  # two places, each by whole lines
    assert first == "Environment: python\n" and "You answer" not in last
    assert "These functions" in last and '"city"' in last and "What is" not in last
    (result,) = prompt.texts(TOOL_RESULTS)
    assert (
        json.loads(result if result.startswith('"') else f'"{result}"') == RESULT
    )  # as the template writes it
    assert prompt.texts(HEADER) == ["<|start_header_id|>assistant<|end_header_id|>\n\n"]


@pytest.mark.parametrize("template", [DEMO, CHATML, LLAMA])
def test_a_plain_question_protects_little(tokenizer, template):
    prompt = Prompt(tokenizer, template, [{"role": "user", "content": "Where is the key of Emma? " * 50}])
    assert (
        prompt.found.problems == {} and not prompt.found.spans[TOOLS] and not prompt.found.spans[TOOL_RESULTS]
    )
    (system,), (header,) = prompt.texts(SYSTEM), prompt.texts(HEADER)
    assert "Where" not in system and prompt.text.startswith(system)
    assert prompt.text.endswith(header) and "assistant" in header and "Emma" not in header


@pytest.mark.parametrize(("system", "tool"), [("system", "tool"), ("developer", "function")])
def test_later_system_messages_and_lists_of_parts(tokenizer, system, tool):
    parts = [{"type": "text", "text": "Two"}, {"type": "text", "text": "parts "}]
    messages = [
        {"role": "user", "content": parts},
        {"role": system, "content": "New rule."},
        {"role": tool, "content": "nothing"},
        {"role": tool, "content": "xmark3q xmarkx3z"},
        {"role": "user", "content": "Go."},
    ]
    prompt = Prompt(tokenizer, CHATML, messages)
    assert prompt.found.problems == {}
    assert [text.strip() for text in prompt.texts(SYSTEM)] == ["<|im_start|>user", "New rule."]
    assert [text.strip() for text in prompt.texts(TOOL_RESULTS)] == ["nothing", "xmark3q xmarkx3z"]
    messages[3]["content"] = messages[2]["content"] = ""
    messages[2] = {
        "role": "function",
        "content": [{"type": "text", "text": text} for text in ("", "none", " at ", "all")],
    }
    assert "".join(Prompt(tokenizer, CHATML, messages).texts(TOOL_RESULTS)).strip() == "none at all"


def test_contents_that_the_template_leaves_out_are_no_problem(tokenizer):
    silent = CHATML.replace("{{ messages[0].content }}", "")
    prompt = Prompt(tokenizer, silent, TALK)
    assert prompt.found.problems == {} and "Never guess" not in "".join(prompt.texts(SYSTEM))


@pytest.mark.parametrize(
    ("change", "system"),
    [
        (("messages[0].content }}<", "messages[0].content | upper }}<"), "NEVER GUESS"),
        (("messages[0].content }}<", "messages[0].content[:12] }}<"), "You answer"),
        (("messages[0].content }}<", "messages[0].content[9:] }}<"), "wer in one word"),
    ],
)
def test_marks_that_change_what_is_rendered(tokenizer, change, system):
    """Then the message's part of the conversation is taken; other messages are found by their content."""
    prompt = Prompt(tokenizer, CHATML.replace(*change), TALK)
    assert prompt.found.problems == {}
    assert system in prompt.texts(SYSTEM)[0] and "What is" not in prompt.texts(SYSTEM)[0]
    assert prompt.texts(TOOL_RESULTS) == [RESULT]


@pytest.mark.parametrize("template", [DEMO, CHATML, LLAMA], ids=["demo", "chatml", "llama"])
@pytest.mark.parametrize("kinds", SOME_KINDS, ids="+".join)
def test_only_what_is_asked_for_is_looked_for(tokenizer, template, kinds):
    """And each kind is found in the same places, whatever else is."""
    tools = None if template is DEMO else [TOOL]
    talk = [message for message in TALK if message is not CALL] if template is DEMO else TALK
    everything = Prompt(tokenizer, template, talk, tools, kinds=PROTECTABLE).found.spans
    prompt = Prompt(tokenizer, template, talk, tools, kinds=kinds)
    assert prompt.found.spans == {kind: everything[kind] for kind in (*kinds, HEADER)}
    assert not prompt.found.problems
    if USER in kinds:
        assert prompt.texts(USER) == [QUESTION.strip(), ("And tomorrow? " * 30).strip()]


def test_a_header_that_is_always_there(tokenizer):
    always = CHATML.replace("{%- if add_generation_prompt %}", "{%- if true %}")
    assert Prompt(tokenizer, always, TALK).texts(HEADER)[0].endswith("<|im_end|>\n<|im_start|>assistant\n")


def test_a_header_in_the_place_of_an_end(tokenizer):
    ends = CHATML.replace("assistant\n{% endif %}", "assistant\n{% else %}<end of talk>{% endif %}")
    (header,) = Prompt(tokenizer, ends, TALK).texts(HEADER)
    assert "im_start|>assistant\n" in header and "<|im_end|>" not in header
    always = CHATML.replace("{%- if add_generation_prompt %}", "{%- if true %}")
    (header,) = Prompt(tokenizer, always, [*TALK, CALL]).texts(HEADER)
    assert header.endswith("<|im_start|>assistant\n") and "tomorrow" not in header


def test_contents_that_are_written_twice(tokenizer):
    """What is before the first of them is the template's, and what is behind the last of them the header."""
    twice = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %} again: {{ messages[-1].content }}[go]"
    prompt = Prompt(tokenizer, twice, [TALK[0], TALK[1]])
    assert prompt.found.problems == {}
    (system,), (header,) = prompt.texts(SYSTEM), prompt.texts(HEADER)
    assert RULES in system and "weather" not in system and "go]" in header and "again" not in header


def test_a_call_and_its_result_before_any_other_message(tokenizer):
    """A message without a text is nowhere; the first that has one ends the template's words, whose ever it is."""
    prompt = Prompt(tokenizer, CHATML, [TALK[0], *TALK[2:]])
    assert prompt.found.problems == {} and prompt.texts(TOOL_RESULTS) == [RESULT]
    (system,) = prompt.texts(SYSTEM)
    assert "<tool_call>" in system and RESULT not in system


@pytest.mark.parametrize(("said", "kept"), [("Hm.</think>Hello.", -1), ("Hello.</think>Hm.", 0)])
def test_an_answer_of_which_the_template_leaves_the_thoughts_out(tokenizer, said, kept):
    """What the template writes before it is protected as before any other message."""
    shortened = CHATML.replace(
        "{{ m.content | trim }}", f"{{{{ m.content.split('</think>')[{kept}] | trim }}}}"
    )
    talk = [TALK[0], {"role": "assistant", "content": said}, TALK[1]]
    prompt = Prompt(tokenizer, shortened, talk)
    assert prompt.found.problems == {} and "Hm." not in prompt.text
    (system,) = prompt.texts(SYSTEM)
    assert RULES in system and system.endswith("<|im_end|>\n") and "Hello" not in system


LOUD = CHATML.replace("messages[0].content }}<", "messages[0].content | upper }}<")
"""Marks change what it writes; contents are found as they stand, or by their part of the conversation."""


def test_without_marks_every_text_of_a_content_is_found(tokenizer):
    parts = [{"type": "text", "text": text} for text in ("first", "a much longer second")]
    talk = [TALK[0], TALK[1], {"role": "function", "content": parts}, TALK[4]]
    (result,) = Prompt(tokenizer, LOUD, talk).texts(TOOL_RESULTS)
    assert result == "firsta much longer second"
    hidden = "{{ messages | length }} messages\n" + LOUD.replace(
        "{{ p.text }}", "{{ p.text[::-1] if loop.last else p.text }}"
    )
    assert TOOL_RESULTS in Prompt(tokenizer, hidden, talk).found.problems


def test_without_marks_a_result_is_not_its_quotation(tokenizer):
    """Where the conversation up to it does not tell, all that it may be is protected, or else the whole prompt."""
    talk = [TALK[0], {"role": "user", "content": f"Is it {RESULT}?"}, *TALK[2:]]
    (result,) = Prompt(tokenizer, LOUD, talk).texts(TOOL_RESULTS)
    assert RESULT in result and "Is it" not in result and "tomorrow" not in result
    numbered = "{{ messages | length }} messages\n" + LOUD
    assert Prompt(tokenizer, numbered, talk).texts(TOOL_RESULTS) == [RESULT] * 2
    hidden = numbered.replace("{{ m.content }}\n</tool", "{{ m.content | upper }}\n</tool")
    assert TOOL_RESULTS in Prompt(tokenizer, hidden, TALK).found.problems
    hidden = hidden.replace("{{ messages | length }} messages", "{{ 'five' if messages | length == 5 }}")
    assert TOOL_RESULTS in Prompt(tokenizer, hidden, TALK).found.problems
    ending = LOUD.replace("{{ m.content }}\n</tool", "{{ m.content | upper }}\n</tool")
    ending += "{% if messages[-1].role == 'assistant' %} This is the end of the talk.{% endif %}"
    assert TOOL_RESULTS in Prompt(tokenizer, ending, TALK).found.problems


def test_no_tools_are_none_and_keywords_are_the_templates(tokenizer):
    telling = CHATML + "{% if tools is not none %}tools{% endif %}{{ name }}"
    assert Prompt(tokenizer, telling, TALK, []).found == Prompt(tokenizer, telling, TALK).found
    found = [
        find_spans(tokenizer, TALK, template_kwargs={"name": name}) for name in ("", "Fathom, at the end")
    ]
    assert found[0].prompt_tokens < found[1].prompt_tokens


def test_long_definitions_are_not_compared_line_by_line(tokenizer, monkeypatch):
    monkeypatch.setattr(spans, "MAX_DIFF_LINES", 3)
    (tools,) = Prompt(tokenizer, LLAMA, TALK, [TOOL]).texts(TOOLS)
    assert "Environment: python\n" in tools and '"city"' in tools and "What is" not in tools


def test_what_cannot_be_found_protects_the_whole_prompt(tokenizer):
    needy = "{% if not tools %}{{ raise_exception('no tools') }}{% endif %}" + CHATML
    prompt = Prompt(tokenizer, needy, TALK, [TOOL])
    assert set(prompt.found.problems) == {TOOLS} and "without its tools" in prompt.found.problems[TOOLS]
    assert prompt.found.tokens() == ((0, len(prompt.ids)),)
    without = Prompt(tokenizer, needy, TALK, [TOOL], kinds=[SYSTEM, TOOL_RESULTS, USER]).found
    assert not without.problems and without.tokens() != prompt.found.tokens()

    scrambled = """{% if messages | length < 5 %}{{ raise_exception('whole conversations only') }}{% endif %}
    {%- for m in messages %}{{ (m.content or '') | reverse }}{% endfor %}"""
    found = Prompt(tokenizer, scrambled, TALK).found
    assert set(found.problems) == {SYSTEM, TOOL_RESULTS, HEADER}
    assert "message 3" in found.problems[TOOL_RESULTS]


def test_a_prompt_that_differs_from_the_rendered_conversation(tokenizer):
    plain = Prompt(tokenizer, CHATML, TALK)
    n = len(plain.ids)
    continued = Prompt(tokenizer, CHATML, TALK, prompt_ids=[*plain.ids, 5, 6, 7])
    assert continued.found.spans == plain.found.spans and continued.found.prompt_tokens == n + 3
    led = Prompt(tokenizer, CHATML, TALK, prompt_ids=[0, *plain.ids])
    shifted = {k: tuple((a + 1, b + 1) for a, b in v) for k, v in plain.found.spans.items()}
    assert led.found.spans == shifted | {SYSTEM: ((0, shifted[SYSTEM][0][1]),)}
    # Something else in the middle of the tool result: the span grows over it, what follows moves.
    (start, stop), (begin, end) = plain.found.spans[TOOL_RESULTS][0], plain.found.spans[HEADER][0]
    ids = [*plain.ids[: start + 3], *[9] * 20, *plain.ids[start + 5 :]]
    changed = Prompt(tokenizer, CHATML, TALK, prompt_ids=ids)
    assert changed.found.spans[TOOL_RESULTS] == ((start, stop + 18),)
    assert changed.found.spans[HEADER] == ((begin + 18, end + 18),)
    assert Prompt(tokenizer, CHATML, TALK, prompt_ids=[3] * 10, kinds=[]).found.tokens() == ((0, 10),)


def test_a_tokenizer_without_offsets(tokenizer):
    class Slow:
        def __getattr__(self, name):
            return getattr(tokenizer, name)

        def __call__(self, *args, **kwargs):
            raise NotImplementedError("return_offsets_mapping is not available")

    tokenizer.chat_template = CHATML
    found = find_spans(Slow(), TALK)
    assert set(found.problems) == {*PROTECTED, HEADER} and found.tokens() == ((0, found.prompt_tokens),)
    assert find_spans(Slow(), TALK, prompt_ids=[5] * 9).tokens() == ((0, 9),)


def test_errors_of_the_conversation_itself_are_raised(tokenizer):
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(Exception, match="roles must alternate"):
        find_spans(tokenizer, TALK)


@given(
    rules=st.text(st.characters(exclude_categories=["Cs"]), max_size=30),
    result=st.text(st.sampled_from("xmark012qz {}<|>\n\tü日"), max_size=30),
    template=st.sampled_from([DEMO, CHATML, LLAMA]),
)
@settings(max_examples=60, deadline=None)
def test_any_content_is_covered(tokenizer, rules, result, template):
    messages = [
        {"role": "system", "content": rules},
        {"role": "user", "content": "Go."},
        {"role": "tool", "content": result},
        {"role": "user", "content": "Go on."},
    ]
    prompt = Prompt(tokenizer, template, messages, kinds=PROTECTABLE)
    assert prompt.found.problems == {}
    assert prompt.texts(USER) == ["Go.", "Go on."]
    assert rules.strip() in "".join(prompt.texts(SYSTEM))
    written = json.dumps(result.strip(), ensure_ascii=False)[1:-1] if template == LLAMA else result.strip()
    assert written in "".join(prompt.texts(TOOL_RESULTS))
    assert prompt.texts(HEADER)[0].startswith("<|") and "Go on" not in prompt.texts(HEADER)[0]


SPANS = st.tuples(st.integers(0, 12), st.integers(0, 12))


@given(st.lists(SPANS, max_size=6))
def test_spans_together_are_what_each_of_them_holds(found):
    merged = spans._merge(found)
    assert {i for span in merged for i in range(*span)} == {i for span in found for i in range(*span)}
    assert all(start < stop for start, stop in merged)
    assert all(one[1] < other[0] for one, other in itertools.pairwise(merged))


@example("bbab", "aaab", (0, 1))
@settings(max_examples=500)
@given(st.text("ab", max_size=8), st.text("ab", max_size=8), SPANS)
def test_places_where_the_prompt_is_another_text(rendered, run, span):
    """Each token is a character. What both texts begin or end with stays, and of the rest it is all, if any."""
    head, tail = 0, 0
    while rendered[: head + 1] == run[: head + 1] and head < len(run):
        head += 1
    behind = [text[head:][::-1] for text in (rendered, run)]
    while tail < min(map(len, behind)) and behind[0][tail] == behind[1][tail]:
        tail += 1
    end, shift = len(run) - tail, len(run) - len(rendered)
    wanted = set()
    for place in range(*span)[: max(0, len(rendered) - span[0])]:
        inside = head <= place < len(rendered) - tail
        wanted |= set(range(head, end)) if inside else {place if place < head else place + shift}
    ids = ([ord(each) for each in text] for text in (rendered, run))
    offsets = [(place, place + 1) for place in range(len(rendered))]
    first, last = spans._Places(offsets, *ids).tokens(span)
    assert wanted <= set(range(first, last)) <= wanted | set(range(head, end))
    if span[1] <= head or head < len(rendered) - tail <= span[0]:
        assert set(range(first, last)) == wanted
