"""What of a chat prompt a selection must keep, found where SGLang makes the prompt."""

from types import SimpleNamespace

import pytest
from transformers import AutoTokenizer

from fathom.server.checks import demo_model
from fathom.server.protect import protected


class Message:
    def __init__(self, role, content):
        self.fields = {"role": role, "content": content}

    def model_dump(self, exclude_none):
        assert exclude_none
        return self.fields


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(demo_model())


def request_of(*messages, tools=None):
    return SimpleNamespace(
        messages=[Message(*message) for message in messages],
        tools=tools,
        tool_choice="auto",
        chat_template_kwargs=None,
    )


def prompt_of(tokenizer, request):
    messages = [message.fields for message in request.messages]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return tokenizer.encode(text, add_special_tokens=False)


def test_the_generation_header_stays(tokenizer):
    request = request_of(("user", "The code of Lena is 1574. " * 40))
    prompt = prompt_of(tokenizer, request)
    spans = protected(tokenizer, request, prompt)
    assert spans[-1][1] == len(prompt)
    assert sum(stop - start for start, stop in spans) < 20


def test_a_prompt_whose_parts_cannot_be_told_stays_whole(tokenizer):
    request = request_of(("user", "a"))
    request.messages[0].fields = {"role": "nobody", "content": object()}
    assert protected(tokenizer, request, [1, 2, 3]) == ((0, 3),)
    assert protected(tokenizer, request, "text") == ((0, 1 << 30),)
