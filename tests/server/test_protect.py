"""What of a chat prompt a selection must keep, found where SGLang makes the prompt."""

from types import SimpleNamespace

import pytest
from transformers import AutoTokenizer

from fathom.runtime.config import Policy
from fathom.runtime.sglang_host import torchvision_ops
from fathom.server import protect
from fathom.server.checks import demo_model
from fathom.server.context import CURRENT, RequestContext
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


def call(name):
    function = {"name": name, "description": "looks things up " * 20, "parameters": {"type": "object"}}
    return SimpleNamespace(model_dump=lambda: {"type": "function", "function": function})


@pytest.mark.parametrize(("choice", "offered"), [("auto", True), ("required", True), ("none", False)])
def test_tools_stay_where_they_are_in_the_prompt(choice, offered, monkeypatch):
    """SGLang leaves them out of the prompt of a request that may not call them."""
    seen = []

    def find(tokenizer, messages, tools, prompt_ids, template_kwargs):
        seen.append((messages, tools, prompt_ids, template_kwargs))
        return SimpleNamespace(tokens=lambda: ((1, 2),))

    monkeypatch.setattr(protect, "find_spans", find)
    request = request_of(("user", "a"), tools=[call("find"), call("read")])
    request.tool_choice, request.chat_template_kwargs = choice, {"enable_thinking": False}
    assert protected(None, request, [5, 6, 7]) == ((1, 2),)
    ((messages, tools, prompt, options),) = seen
    assert [tool["function"]["name"] for tool in tools] == (["find", "read"] if offered else [])
    assert (messages, prompt, options) == (
        [{"role": "user", "content": "a"}],
        [5, 6, 7],
        {"enable_thinking": False},
    )


@pytest.mark.parametrize(
    ("policy", "found"),
    [
        (None, None),
        (Policy(), ()),
        (Policy(depth_cutoff=4), ()),
        (Policy(prefill_keep_rate=0.5), ((3, 4),)),
        (Policy(prefill_keep_rate="auto"), ((3, 4),)),
    ],
)
def test_only_a_policy_that_judges_prompts_asks(policy, found, monkeypatch):
    torchvision_ops.declare()
    from sglang.srt.entrypoints.openai.serving_chat import OpenAIServingChat

    made = SimpleNamespace(prompt_ids=[1, 2, 3, 4])
    monkeypatch.setattr(OpenAIServingChat, "_process_messages", lambda self, request, is_multimodal: made)
    monkeypatch.setattr(protect, "protected", lambda tokenizer, request, ids: ((len(ids) - 1, len(ids)),))
    protect.install()
    manager = SimpleNamespace(tokenizer_manager=SimpleNamespace(tokenizer=None))
    context = policy and RequestContext("/v1/chat/completions", policy, 0.0)
    token = CURRENT.set(context)
    try:
        assert OpenAIServingChat._process_messages(manager, "request", False) is made
    finally:
        CURRENT.reset(token)
    assert (context and context.protected) == found
