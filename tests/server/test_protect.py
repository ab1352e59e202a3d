"""What of a chat prompt a selection must keep, found where SGLang makes the prompt."""

from types import SimpleNamespace

import pytest
from transformers import AutoTokenizer

from fathom.runtime.config import Policy
from fathom.runtime.sglang_host.machine import torchvision_ops
from fathom.runtime.specprefill.config import PROTECTED
from fathom.server.command.checks import demo_model
from fathom.server.requests import protect
from fathom.server.requests.context import CURRENT, Conversation, RequestContext
from fathom.server.requests.protect import as_sent, protected


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
    spans = protected(tokenizer, as_sent(request), prompt, PROTECTED)
    assert spans[-1][1] == len(prompt)
    assert sum(stop - start for start, stop in spans) < 20


def test_a_prompt_whose_parts_cannot_be_told_stays_whole(tokenizer):
    request = request_of(("user", "a"))
    request.messages[0].fields = {"role": "nobody", "content": object()}
    assert protected(tokenizer, as_sent(request), [1, 2, 3], PROTECTED) == ((0, 3),)
    assert protected(tokenizer, as_sent(request), "text", PROTECTED) == ((0, 1 << 30),)


def call(name):
    function = {"name": name, "description": "looks things up " * 20, "parameters": {"type": "object"}}
    return SimpleNamespace(model_dump=lambda: {"type": "function", "function": function})


@pytest.mark.parametrize(("choice", "offered"), [("auto", True), ("required", True), ("none", False)])
def test_tools_stay_where_they_are_in_the_prompt(choice, offered, monkeypatch):
    """SGLang leaves them out of the prompt of a request that may not call them."""
    seen = []

    def find(tokenizer, messages, tools, prompt_ids, template_kwargs, kinds):
        seen.append((messages, tools, prompt_ids, template_kwargs, kinds))
        return SimpleNamespace(tokens=lambda: ((1, 2),))

    monkeypatch.setattr(protect, "find_spans", find)
    request = request_of(("user", "a"), tools=[call("find"), call("read")])
    request.tool_choice, request.chat_template_kwargs = choice, {"enable_thinking": False}
    assert protected(None, as_sent(request), [5, 6, 7], ["user"]) == ((1, 2),)
    ((messages, tools, prompt, options, kinds),) = seen
    assert [tool["function"]["name"] for tool in tools] == (["find", "read"] if offered else [])
    assert (messages, prompt, options, kinds) == (
        [{"role": "user", "content": "a"}],
        [5, 6, 7],
        {"enable_thinking": False},
        ["user"],
    )


@pytest.mark.parametrize(
    ("policy", "found"),
    [
        (None, None),
        (Policy(), ()),
        (Policy(depth_cutoff=4), ()),
        (Policy(prefill_keep_rate=0.5), ((3, 4),)),
        (Policy(prefill_keep_rate="auto"), ((3, 4),)),
        (Policy(prefill_keep_rate="auto", prefill_protect=("user",)), ((1, 4),)),
    ],
)
def test_only_a_policy_that_judges_prompts_asks(policy, found, monkeypatch):
    torchvision_ops.declare()
    from sglang.srt.entrypoints.openai.serving_chat import OpenAIServingChat

    made = SimpleNamespace(prompt_ids=[1, 2, 3, 4])
    monkeypatch.setattr(OpenAIServingChat, "_process_messages", lambda self, request, is_multimodal: made)
    render = OpenAIServingChat._render_and_encode_chat_template
    monkeypatch.setattr(OpenAIServingChat, "_render_and_encode_chat_template", render)  # put back at the end
    monkeypatch.setattr(protect, "as_sent", lambda request: request)
    monkeypatch.setattr(
        protect, "protected", lambda tokenizer, request, ids, kinds: ((len(kinds), len(ids)),)
    )
    protect.install()
    manager = SimpleNamespace(tokenizer_manager=SimpleNamespace(tokenizer=None))
    context = policy and RequestContext("/v1/chat/completions", policy, 0.0)
    token = CURRENT.set(context)
    try:
        assert OpenAIServingChat._process_messages(manager, "request", False) is made
    finally:
        CURRENT.reset(token)
    assert (context and context.protected) == found


WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALL = {"name": "weather", "arguments": '{"city": "Delhi"}'}
CALLED = {"role": "assistant", "tool_calls": [{"id": "one", "type": "function", "function": CALL}]}
RESULT = {"role": "tool", "tool_call_id": "one", "content": "It is clear, and 31 degrees."}
DOCUMENT = {"role": "user", "content": "The code of Lena is 1574. " * 60}
PARTS = {"role": "user", "content": [{"type": "text", "text": "The code of Lena is 1574. " * 60}] * 2}
QUESTION = {"role": "user", "content": "And tomorrow?"}
TEMPLATES = {
    "demo": None,  # joins texts, and fails where there is none
    "json": """{% for t in tools or [] %}{{ t | tojson }}{% endfor %}
{%- for m in messages %}<|{{ m.role }}|>{{ m.content | trim }}
{%- for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}{% endfor %}<|end|>{% endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}""",
    "items": """{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% for c in m.tool_calls or [] %}
{%- for key, value in c.function.arguments | items %}{{ key + value }}{% endfor %}{% endfor %}<|end|>{% endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}""",
}
CONVERSATIONS = {
    "called": [DOCUMENT, CALLED, RESULT, QUESTION],
    "null": [DOCUMENT, CALLED | {"content": None}, RESULT, QUESTION],
    "twice": [DOCUMENT, CALLED, RESULT, DOCUMENT, CALLED | {"content": "Again."}, RESULT, QUESTION],
    "parts": [PARTS, {"role": "assistant", "content": "Yes."}, QUESTION],
    "named": [DOCUMENT, QUESTION],
}


@pytest.fixture
def handler(tokenizer, monkeypatch):
    """SGLang's handler of chats with what it needs to make a prompt, and our functions around its own."""
    torchvision_ops.declare()
    from sglang.srt.entrypoints.openai.serving_chat import OpenAIServingChat

    for name in ("_process_messages", "_render_and_encode_chat_template"):
        monkeypatch.setattr(OpenAIServingChat, name, getattr(OpenAIServingChat, name))  # put back at the end
    protect.install()
    chat = OpenAIServingChat.__new__(OpenAIServingChat)
    for name in (
        "default_chat_template_kwargs",
        "reasoning_parser",
        "tool_call_parser",
        "chat_encoding_spec",
    ):
        setattr(chat, name, None)
    chat.is_gpt_oss = chat.is_gemma4 = chat._tokenizer_auto_adds_specials = False
    chat.tokenizer_manager = SimpleNamespace(tokenizer=tokenizer, served_model_name="demo")
    chat.template_manager = SimpleNamespace(
        reasoning_config=None,
        chat_template_name=None,
        jinja_template_content_format="string",
        jinja_template_may_reorder_tool_results=False,
    )
    return chat


def kept_of(handler, template, protect=PROTECTED, **members):
    """The texts of what must stay of a chat, and its prompt."""
    from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest

    tokenizer = handler.tokenizer_manager.tokenizer
    context = RequestContext("", Policy(prefill_keep_rate=0.5, prefill_protect=protect), 0.0)
    token = CURRENT.set(context)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tokenizer, "chat_template", template or tokenizer.chat_template)
            made = handler._process_messages(ChatCompletionRequest(model="demo", **members), False)
    finally:
        CURRENT.reset(token)
    return [tokenizer.decode(made.prompt_ids[a:b]) for a, b in context.protected], made.prompt_ids


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
@pytest.mark.parametrize("messages", CONVERSATIONS.values(), ids=CONVERSATIONS)
def test_an_agents_documents_may_be_thinned_out(handler, messages, template):
    """Its tool calls are rendered with arguments and contents that are not those it sent."""
    texts, _ = kept_of(handler, template, messages=messages)
    assert "1574" not in "".join(texts)
    assert sum("31 degrees" in text for text in texts) == messages.count(RESULT)
    assert texts[-1].endswith("<|assistant|>")


@pytest.mark.parametrize("messages", CONVERSATIONS.values(), ids=CONVERSATIONS)
def test_an_agent_may_let_the_results_of_its_tools_be_thinned_out(handler, messages):
    """And keep what it was told to do."""
    texts, _ = kept_of(handler, None, ("system", "tools", "user"), messages=messages)
    assert "31 degrees" not in "".join(texts) and "And tomorrow?" in "".join(texts)
    assert "1574" in "".join(texts) and texts[-1].endswith("<|assistant|>")


def test_an_agents_tools_stay(handler):
    """Of several, SGLang writes the one that has to be called."""
    tools = [WEATHER, WEATHER | {"function": WEATHER["function"] | {"name": "time"}}]
    choice = {"type": "function", "function": {"name": "weather"}}
    for given, names in (("auto", ("weather", "time")), (choice, ("weather",)), ("none", ())):
        texts, _ = kept_of(
            handler, TEMPLATES["json"], messages=CONVERSATIONS["called"], tools=tools, tool_choice=given
        )
        assert [name for name in ("weather", "time") if f'"name": "{name}"' in "".join(texts)] == list(names)
        assert "1574" not in "".join(texts)


def test_the_header_before_an_answer_that_goes_on_stays(handler):
    begun = {"role": "assistant", "content": "The code of Lena is 1574. " * 60}
    texts, prompt = kept_of(handler, None, messages=[QUESTION, begun], continue_final_message=True)
    assert texts[-1].endswith("<|assistant|>") and "1574" not in "".join(texts)
    assert handler.tokenizer_manager.tokenizer.decode(prompt).endswith(begun["content"])


def test_a_prompt_of_token_ids_is_compared_with_its_messages(handler):
    """Nothing is rendered for it."""
    texts, prompt = kept_of(handler, None, messages=[QUESTION, CALLED, QUESTION], input_ids=[5, 6, 7])
    assert prompt == [5, 6, 7] and len(texts) == 1


def test_a_prompt_is_not_compared_with_the_one_before_it(handler):
    """Nothing is rendered for the second, so that the first is what was rendered last."""
    from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest

    context = RequestContext("", Policy(prefill_keep_rate=0.5), 0.0)
    token = CURRENT.set(context)
    try:
        for messages, given in (([DOCUMENT, QUESTION], {}), ([QUESTION], {"input_ids": [5, 6, 7]})):
            handler._process_messages(ChatCompletionRequest(model="demo", messages=messages, **given), False)
    finally:
        CURRENT.reset(token)
    assert context.conversation is None


@pytest.mark.parametrize("rate", [0.5, 1.0])
def test_a_conversation_is_looked_for_as_it_was_rendered(handler, rate):
    """Where a policy judges prompts; nobody else's is held until its answer ends."""
    context = RequestContext("", Policy(prefill_keep_rate=rate), 0.0)
    token = CURRENT.set(context)
    try:
        options = {"template_kwargs": {}, "encode_kwargs": {}, "use_cache": False}
        handler._render_and_encode_chat_template([QUESTION], tools=None, **options)
    finally:
        CURRENT.reset(token)
    assert context.conversation == (Conversation([QUESTION], None, {}) if rate != 1 else None)
