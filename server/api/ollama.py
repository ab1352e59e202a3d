"""Ollama's routes: SGLang's, with chats that work, streams to their last word and the true reason of the end."""

import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import jinja2
import orjson
from fastapi import HTTPException
from fastapi.responses import JSONResponse, StreamingResponse
from sglang.srt.entrypoints.ollama.protocol import (
    OllamaChatResponse,
    OllamaChatStreamResponse,
    OllamaGenerateResponse,
    OllamaGenerateStreamResponse,
    OllamaMessage,
)
from sglang.srt.entrypoints.ollama.serving import OllamaServing
from sglang.srt.managers.io_struct import GenerateReqInput

from fathom.server.answers.errors import clean, in_names_of
from fathom.server.requests.aside import LONG, aside
from fathom.server.requests.context import CURRENT, Conversation
from fathom.server.requests.protect import judged, protected
from fathom.server.routes import OLLAMA


def install() -> None:
    """Serve Ollama's routes with our class."""
    from sglang.srt.entrypoints import http_server

    http_server.OllamaServing = FathomOllamaServing


FORMAT = "format"
"""A member of the request, given to SGLang's conversion of its options as one more of these."""


def with_format(request: Any) -> Any:
    """The request, with what its answer must be among the options."""
    return request.model_copy(update={"options": {**(request.options or {}), FORMAT: request.format}})


def said(text: str) -> dict[str, Any]:
    """The member of a chat's answer that holds its text."""
    return {"message": OllamaMessage(role="assistant", content=text)}


def written(text: str) -> dict[str, Any]:
    """The same of a completion's."""
    return {"response": text}


class FathomOllamaServing(OllamaServing):
    """Answers to ``/api/chat`` and ``/api/generate``, streamed as lines of JSON."""

    def _convert_options_to_sampling_params(self, options: dict[str, Any] | None = None) -> dict[str, Any]:
        """SGLang's conversion, which knows neither of a negative ``num_predict``, for no limit, nor of seeds."""
        sampling = super()._convert_options_to_sampling_params(options)
        if type(limit := sampling["max_new_tokens"]) is int and limit < 0:
            sampling["max_new_tokens"] = None
        if "seed" in sampling:
            sampling["sampling_seed"] = sampling.pop("seed")
        if (wanted := (options or {}).get(FORMAT)) is not None:
            schema = {"type": "object"} if wanted == "json" else wanted
            sampling["json_schema"] = orjson.dumps(schema).decode()
        return sampling

    async def handle_generate(self, request: Any, raw_request: Any) -> Any:
        return await super().handle_generate(with_format(request), raw_request)

    async def handle_chat(self, request: Any, raw_request: Any) -> Any:
        if not request.messages:  # asks only that the model be loaded
            return OllamaChatResponse(**self._head(), **said(""), done_reason="load")
        tokenizer = self.tokenizer_manager.tokenizer
        messages = [{"role": message.role, "content": message.content} for message in request.messages]

        def render() -> list[int]:
            prompt: list[int] = tokenizer.apply_chat_template(
                messages, tokenize=True, add_generation_prompt=True, return_dict=False
            )
            if (context := judged()) is not None:
                kinds = context.policy.prefill_protect
                context.protected = protected(tokenizer, Conversation(messages), prompt, kinds)
            return prompt

        context = CURRENT.get()
        try:
            long = context is not None and context.body_bytes >= LONG
            prompt = await aside(render) if long else render()
        except jinja2.TemplateError as error:
            return _refusal(ValueError(f"the chat template does not take these messages: {error}"))
        except ValueError as error:  # the model has none
            return _refusal(error)
        sampling = self._convert_options_to_sampling_params(with_format(request).options)
        asked = GenerateReqInput(input_ids=prompt, sampling_params=sampling, stream=request.stream)
        answer = self._stream_chat_response if request.stream else self._generate_chat_response
        return await answer(asked, raw_request, self.tokenizer_manager.served_model_name)

    async def _generate_chat_response(self, gen_request: Any, raw_request: Any, model_name: str) -> Any:
        return await self._whole(gen_request, raw_request, said, OllamaChatResponse)

    async def _generate_generate_response(self, gen_request: Any, raw_request: Any, model_name: str) -> Any:
        return await self._whole(gen_request, raw_request, written, OllamaGenerateResponse)

    async def _stream_chat_response(self, gen_request: Any, raw_request: Any, model_name: str) -> Any:
        lines = self._lines(gen_request, raw_request, said, OllamaChatStreamResponse, OllamaChatResponse)
        return self._stream(gen_request, lines)

    async def _stream_generate_response(self, gen_request: Any, raw_request: Any, model_name: str) -> Any:
        kinds = OllamaGenerateStreamResponse, OllamaGenerateResponse
        return self._stream(gen_request, self._lines(gen_request, raw_request, written, *kinds))

    def _stream(self, asked: GenerateReqInput, lines: AsyncIterator[bytes]) -> StreamingResponse:
        abort = self.tokenizer_manager.create_abort_task(asked)
        return StreamingResponse(lines, media_type="application/x-ndjson", background=abort)

    async def _whole(
        self, asked: GenerateReqInput, raw_request: Any, form: Callable[[str], dict[str, Any]], kind: Any
    ) -> Any:
        begun = time.time_ns()
        try:
            output = await anext(self.tokenizer_manager.generate_request(asked, raw_request))
        except ValueError as error:
            return _refusal(error)
        return kind(**self._head(), **form(output["text"]), **_end(output["meta_info"], begun))

    async def _lines(
        self,
        asked: GenerateReqInput,
        raw_request: Any,
        form: Callable[[str], dict[str, Any]],
        part: Any,
        last: Any,
    ) -> AsyncIterator[bytes]:
        begun, seen = time.time_ns(), 0
        try:
            async for output in self.tokenizer_manager.generate_request(asked, raw_request):
                text, meta = output["text"], output["meta_info"]
                if len(text) > seen:
                    yield _line(part(**self._head(), **form(text[seen:])))
                    seen = len(text)
                if meta["finish_reason"] is not None:
                    yield _line(last(**self._head(), **form(""), **_end(meta, begun)))
        except (ValueError, HTTPException) as error:
            yield orjson.dumps({"error": _told(getattr(error, "detail", error))}) + b"\n"

    def _head(self) -> dict[str, Any]:
        return {"model": self.tokenizer_manager.served_model_name, "created_at": self._get_timestamp()}


def _line(answer: Any) -> bytes:
    return orjson.dumps(answer.model_dump(exclude_none=True)) + b"\n"


def _end(meta: dict[str, Any], begun: int) -> dict[str, Any]:
    """What the last answer of a generation says of it."""
    return {
        "done_reason": "length" if meta["finish_reason"]["type"] == "length" else "stop",
        "total_duration": time.time_ns() - begun,
        "prompt_eval_count": meta["prompt_tokens"],
        "eval_count": meta["completion_tokens"],
    }


def _told(error: Any) -> str:
    """What was wrong, in the names of Ollama's options."""
    return in_names_of(OLLAMA[0], clean(str(error)))


def _refusal(error: Exception) -> JSONResponse:
    return JSONResponse({"error": _told(error)}, status_code=getattr(error, "status_code", 400))
