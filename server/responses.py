"""``/v1/responses``: the client's limit of output tokens is what it gets.

SGLang keeps two tokens of it back, as it does of what is left of the context when the client names no limit.
"""

from typing import Any


def install() -> None:
    """Put our function around SGLang's."""
    from sglang.srt.entrypoints.openai.protocol import ResponsesRequest

    to_sampling_params = ResponsesRequest.to_sampling_params

    def with_limit(self: Any, default_max_tokens: int, *args: Any, **kwargs: Any) -> dict[str, Any]:
        params = to_sampling_params(self, default_max_tokens, *args, **kwargs)
        if self.max_output_tokens is not None:
            params["max_new_tokens"] = min(self.max_output_tokens, default_max_tokens)
        return params

    ResponsesRequest.to_sampling_params = with_limit
