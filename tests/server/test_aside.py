"""While a long prompt is made from what a client sent, the event loop goes on; what comes of it is the same."""

import asyncio
import threading
import time
from types import SimpleNamespace

import pytest
from sglang.srt.entrypoints.anthropic.serving import AnthropicServing
from sglang.srt.entrypoints.ollama.protocol import OllamaChatRequest, OllamaMessage
from sglang.srt.entrypoints.openai.serving_chat import OpenAIServingChat
from sglang.srt.entrypoints.openai.serving_responses import OpenAIServingResponses
from sglang.srt.entrypoints.openai.serving_tokenize import OpenAIServingDetokenize, OpenAIServingTokenize
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from waiting import one_of_three

from fathom.runtime.config import Policy
from fathom.server.api.ollama import FathomOllamaServing
from fathom.server.requests import aside
from fathom.server.requests.context import CURRENT, RequestContext

PADDING = "x" * aside.LONG
REPLACED = {
    TokenizerManager: ("_tokenize_texts",),
    OpenAIServingChat: ("_convert_to_internal_request", "handle_request"),
    AnthropicServing: ("_handle_non_streaming", "_handle_streaming", "handle_count_tokens"),
    OpenAIServingResponses: ("_make_request",),
    OpenAIServingTokenize: ("_handle_non_streaming_request",),
    OpenAIServingDetokenize: ("_handle_non_streaming_request",),
}


class Chat(OpenAIServingChat):
    def __init__(self):
        self.tokenizer_manager = SimpleNamespace(request_logger=SimpleNamespace(log_requests=False))

    def _validate_request(self, request):
        return None

    async def _handle_non_streaming_request(self, adapted, processed, raw_request):
        return adapted


class Message(AnthropicServing):
    def __init__(self):
        self.openai_serving_chat = Chat()

    def _convert_openai_error_response(self, response):
        return response


def manager(tokenizer):
    made = TokenizerManager.__new__(TokenizerManager)
    made.tokenizer, made.async_dynamic_batch_tokenizer = tokenizer, None
    made.model_config = SimpleNamespace(is_embedding_gemma=False)
    return made


async def tokens(slow):
    def tokenizer(texts):
        return {"input_ids": [[slow()] for _ in texts]}

    tokenizer.is_fast = True
    return await manager(tokenizer)._tokenize_texts(PADDING)


async def chat(slow):
    return await Chat().handle_request(SimpleNamespace(stream=False), None)


async def message(slow):
    return await Message()._handle_non_streaming(SimpleNamespace(), None, None)


async def message_stream(slow):
    return await Message()._handle_streaming(SimpleNamespace(), None, None)


async def response(slow):
    return await OpenAIServingResponses.__new__(OpenAIServingResponses)._make_request(slow, None, None)


LONG_REQUEST = SimpleNamespace(headers={"content-length": str(aside.LONG)})


async def tokenized(slow):
    owner = OpenAIServingTokenize.__new__(OpenAIServingTokenize)
    return await owner._handle_non_streaming_request(None, slow, LONG_REQUEST)


async def detokenized(slow):
    owner = OpenAIServingDetokenize.__new__(OpenAIServingDetokenize)
    return await owner._handle_non_streaming_request(None, slow, SimpleNamespace(headers={}))


async def counted(slow):
    return await Message().handle_count_tokens(slow, LONG_REQUEST)


async def ollamas_chat(slow):
    made = FathomOllamaServing.__new__(FathomOllamaServing)
    tokenizer = SimpleNamespace(apply_chat_template=lambda *_, **__: slow())
    made.tokenizer_manager = SimpleNamespace(tokenizer=tokenizer, served_model_name="m")

    async def answer(asked, *_):
        return asked.input_ids

    made._generate_chat_response = answer
    message = OllamaMessage(role="user", content="a")
    return await made.handle_chat(OllamaChatRequest(model="m", messages=[message], stream=False), None)


@pytest.mark.parametrize(
    ("ask", "expected"),
    [
        (tokenized, 7),
        (detokenized, 7),
        (counted, 7),
        (ollamas_chat, 7),
        (tokens, ([7], None)),
        (chat, SimpleNamespace(made=7)),
        (message, SimpleNamespace(made=7)),
        (message_stream, ("a stream", 7)),
        (response, 7),
    ],
)
def test_the_loop_goes_on(monkeypatch, ask, expected):
    """What is slow here ends when another task of the loop says so."""
    said, calls = threading.Event(), []

    def slow():
        calls.append(CURRENT.get().route)
        assert said.wait(20), "the event loop stood still"
        return 7

    def convert(self, request, raw_request=None):
        made = SimpleNamespace(made=slow())
        return made, request

    async def make(self, request, prev_response, tokenizer):
        return request()

    async def count(self, request, raw_request):
        return request()

    async def tokenize(self, adapted_request, request, raw_request):
        return request()

    async def stream(self, request, given, raw_request):
        made, _ = self.openai_serving_chat._convert_to_internal_request(request, raw_request)
        return "a stream", made.made

    for owner, names in REPLACED.items():
        for name in names:
            monkeypatch.setattr(owner, name, getattr(owner, name))
    monkeypatch.setattr(OpenAIServingChat, "_convert_to_internal_request", convert)
    monkeypatch.setattr(OpenAIServingResponses, "_make_request", make)
    monkeypatch.setattr(AnthropicServing, "handle_count_tokens", count)
    monkeypatch.setattr(AnthropicServing, "_handle_streaming", stream)
    for owner in (OpenAIServingTokenize, OpenAIServingDetokenize):
        monkeypatch.setattr(owner, "_handle_non_streaming_request", tokenize)
    aside.install()

    async def both():
        CURRENT.set(RequestContext("/v1/x", Policy(), 0.0, body_bytes=aside.LONG))
        asked = asyncio.create_task(ask(slow))
        while not calls:
            await asyncio.sleep(0.001)
        said.set()
        return await asked

    found = asyncio.run(asyncio.wait_for(both(), 10))
    if isinstance(found, SimpleNamespace):
        found = SimpleNamespace(made=found.made)
    assert found == expected
    assert calls == ["/v1/x"]


def test_what_waits_is_not_taken_for_finished():
    async def waits():
        await asyncio.sleep(0)

    with pytest.raises(RuntimeError, match="waits"):
        aside.finished(waits)


@pytest.mark.alone
@one_of_three
def test_a_probe_is_answered_while_two_megabytes_become_a_prompt(server):
    def ask():
        text = "What is the key of Lena? " * 80_000
        began = time.monotonic()
        assert (
            server.client.post("/v1/completions", json={"model": "tiny", "prompt": text}).status_code == 400
        )
        took.append(time.monotonic() - began)

    took, waited = [], [0.0]
    thread = threading.Thread(target=ask)
    thread.start()
    while thread.is_alive():
        began = time.monotonic()
        server.client.get("/ready")
        waited.append(time.monotonic() - began)
    assert max(waited) < took[0] / 2


def bodies(padded):
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who is Lena?"}]
    common = {"model": "tiny", "temperature": 0} | ({"user": PADDING} if padded else {})
    yield "/v1/chat/completions", common | {"messages": chat, "max_tokens": 6}
    yield "/v1/completions", common | {"prompt": "Who is Lena?", "max_tokens": 6}
    yield (
        "/v1/chat/completions",
        common | {"messages": chat, "max_tokens": 6, "chat_template_kwargs": {"chat_template": "x"}},
    )
    yield "/v1/chat/completions", common | {"messages": chat, "max_tokens": 9000}
    metadata = {"metadata": {"user_id": PADDING}} if padded else {}
    yield (
        "/v1/messages",
        metadata | {"model": "tiny", "messages": chat[1:], "temperature": 0, "max_tokens": 6},
    )
    yield "/v1/messages", metadata | {"model": "tiny", "messages": chat[1:] * 3000, "max_tokens": 6}
    for route in ("/tokenize", "/v1/messages/count_tokens"):
        yield route, common | {"messages": chat[1:]}
    yield "/detokenize", common | {"tokens": [[5, 6], [7]]}
    yield "/v1/responses", common | {"input": "Who is Lena?", "max_output_tokens": 6}


TOLD = (
    *("message", "error", "content", "stop_reason"),
    *("tokens", "count", "max_model_len", "input_tokens", "text"),
)


def told(answer):
    """What an answer says beside ids and times."""
    content = answer.json()
    return (
        answer.status_code,
        [content.get(name) for name in TOLD],
        [choice.get("message", choice.get("text")) for choice in content.get("choices", ())],
        [item.get("content") for item in content.get("output", ())],
    )


def test_answers_and_refusals_are_those_of_short_bodies(server):
    for (path, short), (_, long) in zip(bodies(False), bodies(True), strict=True):
        first, second = (told(server.client.post(path, json=body)) for body in (short, long))
        for said in (first, second):
            for output in said[3]:
                for part in output or ():
                    part.pop("id", None)
        assert first == second, path
