"""``/v1/responses``: limits of output tokens, and the status of what the engine refuses.

SGLang keeps two tokens of the client's limit back, as it does of what is left of the context when the client names
none. It takes 512 for what is left where it is less, and refuses the request for that. A full queue is status 400.
A response may have an id of the client's choice (``request_id``), and takes the place of a stored one that has it.
"""

from typing import Any

from starlette.exceptions import HTTPException

LEAST_ROOM = 512
"""Tokens that SGLang gives an answer without a limit, where the context may have fewer left."""


def install() -> None:
    """Put our functions around SGLang's."""
    from sglang.srt.entrypoints.openai.protocol import ResponsesRequest
    from sglang.srt.entrypoints.openai.serving_responses import OpenAIServingResponses
    from sglang.srt.runtime_context import get_serving

    to_sampling_params = ResponsesRequest.to_sampling_params
    answer_whole = OpenAIServingResponses.responses_full_generator
    create = OpenAIServingResponses.create_responses

    def with_limit(self: Any, default_max_tokens: int, *args: Any, **kwargs: Any) -> dict[str, Any]:
        params = to_sampling_params(self, default_max_tokens, *args, **kwargs)
        if self.max_output_tokens is not None:
            params["max_new_tokens"] = min(self.max_output_tokens, default_max_tokens)
        elif default_max_tokens <= LEAST_ROOM and not get_serving().allow_auto_truncate:
            params["max_new_tokens"] = None  # what is left, as on the chat route
        return params

    async def with_status(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return await answer_whole(self, *args, **kwargs)
        except HTTPException as error:
            return self.create_error_response(str(error.detail), status_code=error.status_code)

    async def beside_others(self: Any, request: Any, raw_request: Any = None) -> Any:
        if request.request_id in self.response_store:
            message = "request_id must not be that of a response that is stored"
            return self.create_error_response(message, param="request_id")
        return await create(self, request, raw_request)

    OpenAIServingResponses.create_responses = beside_others
    ResponsesRequest.to_sampling_params = with_limit
    OpenAIServingResponses.responses_full_generator = with_status
