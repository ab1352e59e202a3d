"""``/v1/detokenize``: token ids are checked before the tokenizer, to which some are a failure of its own."""

from typing import Any

from sglang.srt.entrypoints.openai.serving_tokenize import OpenAIServingDetokenize


def install() -> None:
    """Serve the route with our class."""
    from sglang.srt.entrypoints import http_server

    http_server.OpenAIServingDetokenize = FathomDetokenize


class FathomDetokenize(OpenAIServingDetokenize):
    """SGLang's handler, with a check."""

    def _validate_request(self, request: Any) -> str | None:
        for entry in request.tokens:
            for token in entry if isinstance(entry, list) else [entry]:
                if type(token) is int and not 0 <= token < 1 << 32:
                    return f"tokens must be integers in [0, {(1 << 32) - 1}], got {token}"
        return None
