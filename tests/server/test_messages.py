"""``/v1/messages``: which status an answer has where SGLang notices late that it cannot be given."""

import asyncio
import json
from types import SimpleNamespace

import pytest
from starlette.exceptions import HTTPException

from fathom.runtime.sglang_host import torchvision_ops
from fathom.server import messages


@pytest.fixture
def answer(monkeypatch):
    """The answer to a request whose prompt cannot be made, for this reason."""
    torchvision_ops.declare()
    from sglang.srt.entrypoints.anthropic.protocol import AnthropicMessagesRequest
    from sglang.srt.entrypoints.anthropic.serving import AnthropicServing
    from sglang.srt.entrypoints.openai.serving_chat import OpenAIServingChat

    replaced = (
        *((AnthropicServing, name) for name in ("_error_response", "handle_count_tokens")),
        (OpenAIServingChat, "_generate_chat_stream"),
    )
    for kind, name in replaced:
        monkeypatch.setattr(kind, name, getattr(kind, name))  # put back at the end
    messages.install()

    def answered(error, stream):
        def fail(*_):
            raise error

        chat = SimpleNamespace(
            _validate_request=lambda request: None,
            _convert_to_internal_request=fail,
            tokenizer_manager=SimpleNamespace(tokenizer=SimpleNamespace(chat_template=None)),
        )
        turn = {"role": "user", "content": "Where?"}
        request = AnthropicMessagesRequest(model="m", max_tokens=4, messages=[turn], stream=stream)
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
