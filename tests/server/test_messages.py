"""``/v1/messages``: which status an answer has where SGLang notices late that it cannot be given."""

import asyncio
import json
from functools import partial
from types import SimpleNamespace

import pytest
from starlette.exceptions import HTTPException

from fathom.runtime.config import Policy
from fathom.runtime.sglang_host.machine import torchvision_ops
from fathom.server.api import messages
from fathom.server.requests.context import CURRENT, RequestContext
from fathom.server.routes import CHAT, MESSAGES

torchvision_ops.declare()

from sglang.srt.entrypoints.anthropic.protocol import AnthropicMessagesRequest  # noqa: E402
from sglang.srt.entrypoints.anthropic.serving import AnthropicServing  # noqa: E402
from sglang.srt.entrypoints.openai.serving_chat import OpenAIServingChat  # noqa: E402

TURN = {"role": "user", "content": "Where?"}


@pytest.fixture
def installed(monkeypatch):
    """Our functions around SGLang's, of which one that says what it was given stands for what makes a stream."""

    async def scripted(self, events):
        for event in events:
            yield event

    for name in ("_error_response", "handle_count_tokens", "_convert_to_chat_completion_request"):
        monkeypatch.setattr(AnthropicServing, name, getattr(AnthropicServing, name))  # put back at the end
    monkeypatch.setattr(OpenAIServingChat, "_generate_chat_stream", scripted)
    messages.install()


@pytest.fixture
def answer(installed):
    """The answer to a request whose prompt cannot be made, for this reason."""

    def answered(error, stream):
        def fail(*_):
            raise error

        chat = SimpleNamespace(
            _validate_request=lambda request: None,
            _convert_to_internal_request=fail,
            tokenizer_manager=SimpleNamespace(tokenizer=SimpleNamespace(chat_template=None)),
        )
        request = AnthropicMessagesRequest(model="m", max_tokens=4, messages=[TURN], stream=stream)
        reply = asyncio.run(AnthropicServing(chat).handle_messages(request, None))
        return reply.status_code, json.loads(reply.body)["error"]

    return answered


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "kind", "message"),
    [
        (ValueError("roles must alternate"), 400, "invalid_request_error", "roles must alternate"),
        (HTTPException(503, "the queue is full"), 503, "overloaded_error", "the queue is full"),
        (HTTPException(404, "no such adapter"), 404, "not_found_error", "no such adapter"),
        (RuntimeError("/a/path"), 500, "api_error", "Internal server error"),
    ],
    ids=["client", "queue", "adapter", "server"],
)
def test_who_is_at_fault(answer, error, status, kind, message, stream):
    assert answer(error, stream) == (status, {"type": kind, "message": message})


@pytest.fixture
def switched(installed):
    """What the chat template is told of thoughts, on a server with this reasoning parser."""

    def told(parser, toggle, thinking):
        config = SimpleNamespace(toggle_param=toggle, default_enabled=False, special_case=None)
        chat = SimpleNamespace(
            reasoning_parser=parser,
            template_manager=SimpleNamespace(reasoning_config=config),
            tokenizer_manager=SimpleNamespace(tokenizer=SimpleNamespace(chat_template=None)),
            _get_reasoning_toggle_param=lambda: toggle,
        )
        chat.apply_reasoning_enabled = partial(OpenAIServingChat.apply_reasoning_enabled, chat)
        request = AnthropicMessagesRequest(model="m", max_tokens=4, messages=[TURN], thinking=thinking)
        return AnthropicServing(chat)._convert_to_chat_completion_request(request).chat_template_kwargs

    return told


ADAPTIVE, DISABLED = {"type": "adaptive"}, {"type": "disabled"}
ENABLED = {"type": "enabled", "budget_tokens": 1024}


@pytest.mark.parametrize(
    ("parser", "toggle"), [(None, None), ("qwen3", None)], ids=["no parser", "no toggle"]
)
def test_thoughts_that_are_left_to_a_model_without_any(switched, parser, toggle):
    assert switched(parser, toggle, ADAPTIVE) is None
    assert switched(parser, toggle, DISABLED) is None
    with pytest.raises(ValueError, match="thinking is not supported"):
        switched(parser, toggle, ENABLED)


def test_thoughts_of_a_model_that_has_them(switched):
    assert switched("qwen3", "enable_thinking", None) is None
    for thinking, told in ((ADAPTIVE, True), (ENABLED, True), (DISABLED, False)):
        assert switched("qwen3", "enable_thinking", thinking) == {"enable_thinking": told}


def chunk(reason=None, text="", **more):
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": reason}
    return f"data: {json.dumps({'choices': [choice]} | more)}\n\n"


TEXTS = [chunk(text="a"), chunk(text='"finish_reason": "stop"')]
END, COMPACT = chunk("stop"), chunk("length").replace(": ", ":").replace("data:", "data: ")
USAGE = {"prompt_tokens": 5, "completion_tokens": 2}
COUNT, DONE = f"data: {json.dumps({'choices': [], 'usage': USAGE})}\n\n", "data: [DONE]\n\n"


@pytest.mark.parametrize("route", [MESSAGES, CHAT, None])
@pytest.mark.parametrize(
    "events",
    [
        [*TEXTS, END, COUNT, DONE],
        [COMPACT, COUNT, DONE],
        [*TEXTS, END, DONE],
        [*TEXTS, END, TEXTS[0], COUNT],
        [*TEXTS, END],
        [END, END, COUNT],
        [*TEXTS, DONE],
        [],
    ],
)
def test_a_message_stream_has_its_usage_in_the_event_of_its_end(installed, events, route):
    """Where it follows at once. Every other event, and every one of a chat, is as it was and where it was."""

    async def told():
        return [event async for event in OpenAIServingChat._generate_chat_stream(None, events)]

    token = CURRENT.set(route and RequestContext(route, Policy(), 0.0))
    sent = asyncio.run(told())
    CURRENT.reset(token)
    assert len(sent) == len(events)
    for place, event in enumerate(events):
        if route == MESSAGES and event in (END, COMPACT) and events[place + 1 : place + 2] == [COUNT]:
            assert json.loads(sent[place][6:]) == json.loads(event[6:]) | {"usage": USAGE}
            assert sent[place].startswith("data: ") and sent[place].endswith("}\n\n")
        else:
            assert sent[place] == event


def test_only_the_end_of_a_message_waits_for_what_follows():
    async def step_by_step():
        begun = []

        async def events():
            for event in [*TEXTS, END, COUNT, DONE]:
                begun.append(event)
                yield event

        return [len(begun) async for _ in messages.with_usage_at_the_end(events())]

    assert asyncio.run(step_by_step()) == [1, 2, 4, 4, 5]


BILLING = "x-anthropic-billing-header: cc_version=2.1.197.%s; cc_entrypoint=sdk-cli;"


@pytest.fixture
def instructed(installed):
    """What the prompt has before the conversation, of the instructions of a message."""

    def told(system):
        tokenizer = SimpleNamespace(chat_template=None)
        chat = SimpleNamespace(tokenizer_manager=SimpleNamespace(tokenizer=tokenizer))
        request = AnthropicMessagesRequest(model="m", max_tokens=4, messages=[TURN], system=system)
        *first, turn = AnthropicServing(chat)._convert_to_chat_completion_request(request).messages
        assert turn.content == TURN["content"]
        return [message.content for message in first]

    return told


def block(text):
    return {"type": "text", "text": text}


@pytest.mark.parametrize("end", ["", "\n"])
def test_conversations_of_an_agent_begin_alike(instructed, end):
    said = [[block(BILLING % name + end), block("Be brief."), block("Be kind.")] for name in ("58e", "ce1")]
    assert [instructed(system) for system in said] == [["Be brief.\nBe kind."]] * 2


def test_instructions_that_are_for_the_model_stay(instructed):
    for text in (f"Say: {BILLING % 1}", f"{BILLING % 1}\nBe brief.", "x-anthropic-billing-header", " "):
        assert instructed([block(text), block("Be kind.")]) == [f"{text}\nBe kind."]
        assert instructed(text) == ([text] if text.strip() else [])
    assert instructed([block(BILLING % 1)]) == instructed([]) == instructed(None) == []
