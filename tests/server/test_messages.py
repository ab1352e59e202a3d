"""``/v1/messages``: which status an answer has where SGLang notices late that it cannot be given."""

import asyncio
import json
from functools import partial
from types import SimpleNamespace

import pytest
from starlette.exceptions import HTTPException

from fathom.runtime.sglang_host import torchvision_ops
from fathom.server import messages

TURN = {"role": "user", "content": "Where?"}


@pytest.fixture
def installed(monkeypatch):
    torchvision_ops.declare()
    from sglang.srt.entrypoints.anthropic.serving import AnthropicServing
    from sglang.srt.entrypoints.openai.serving_chat import OpenAIServingChat

    names = ("_error_response", "handle_count_tokens", "_convert_to_chat_completion_request")
    replaced = *((AnthropicServing, name) for name in names), (OpenAIServingChat, "_generate_chat_stream")
    for kind, name in replaced:
        monkeypatch.setattr(kind, name, getattr(kind, name))  # put back at the end
    messages.install()


@pytest.fixture
def answer(installed):
    """The answer to a request whose prompt cannot be made, for this reason."""
    from sglang.srt.entrypoints.anthropic.protocol import AnthropicMessagesRequest
    from sglang.srt.entrypoints.anthropic.serving import AnthropicServing

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
        (RuntimeError("/a/path"), 500, "api_error", "Internal server error"),
    ],
    ids=["client", "queue", "server"],
)
def test_who_is_at_fault(answer, error, status, kind, message, stream):
    assert answer(error, stream) == (status, {"type": kind, "message": message})


@pytest.fixture
def switched(installed):
    """What the chat template is told of thoughts, on a server with this reasoning parser."""
    from sglang.srt.entrypoints.anthropic.protocol import AnthropicMessagesRequest
    from sglang.srt.entrypoints.anthropic.serving import AnthropicServing
    from sglang.srt.entrypoints.openai.serving_chat import OpenAIServingChat

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
