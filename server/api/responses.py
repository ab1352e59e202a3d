"""``/v1/responses``: limits of output tokens, and the status of what the engine refuses.

SGLang keeps two tokens of the client's limit back, as it does of what is left of the context when the client names
none. It takes 512 for what is left where it is less, and refuses the request for that. A full queue is status 400.
A response may have an id of the client's choice (``request_id``), and takes the place of a stored one that has it.
Stored ones, with the conversations before them, are never let go. Their items cannot be named by their ids
(``item_reference``), which is how Vercel's AI SDK sends all but the newest turn.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

from starlette.exceptions import HTTPException

LEAST_ROOM = 512
"""Tokens that SGLang gives an answer without a limit, where the context may have fewer left."""

STORED = 1024
"""Most responses that a later request can name (``--enable-response-store``)."""


class Recent(OrderedDict[str, Any]):
    """Entries by their last use, of which the oldest go when there are too many.

    Args:
        most: how many there may be beside those that stay.
        stays: whether an entry, by its key and value, is in use.
    """

    def __init__(self, most: int, stays: Callable[[str, Any], bool]):
        super().__init__()
        self._most, self._stays = most, stays

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        self.move_to_end(key)
        while len(self) > self._most:
            oldest = next((each for each, held in self.items() if not self._stays(each, held)), None)
            if oldest is None:
                return
            del self[oldest]

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a key, which counts as its use."""
        if key not in self:
            return default
        self.move_to_end(key)
        return self[key]


def is_being_made(_: str, response: Any) -> bool:
    """Whether a response of a background request is still to come."""
    return response.status in ("queued", "in_progress")


def with_items(given: list[Any], stored: Iterable[Any]) -> list[Any]:
    """A request's items, with those that it names by their ids (``item_reference``) in their places.

    Args:
        given: dictionaries, or pydantic's objects.
        stored: responses, whose ``output`` has the items that may be named.

    Raises:
        LookupError: with the id of an item that none of them has.
    """
    names = {place: item["id"] for place, item in enumerate(given) if _is_reference(item)}
    if not names:
        return given
    known = {item.id: item for response in stored for item in response.output if getattr(item, "id", None)}
    missing = [name for name in names.values() if name not in known]
    if missing:
        raise LookupError(missing[0])
    return [
        known[names[place]].model_dump(exclude_none=True) if place in names else item
        for place, item in enumerate(given)
    ]


def _is_reference(item: Any) -> bool:
    """Whether an item is no more than an id: its type may be left out, as in OpenAI's API."""
    if not isinstance(item, dict) or "id" not in item:
        return False
    return item.get("type") == "item_reference" or (
        item.get("type") is None and item.keys() <= {"id", "type"}
    )


def install() -> None:
    """Put our functions around SGLang's."""
    from sglang.srt.entrypoints.openai.protocol import ResponsesRequest
    from sglang.srt.entrypoints.openai.serving_responses import OpenAIServingResponses
    from sglang.srt.runtime_context import get_serving

    to_sampling_params = ResponsesRequest.to_sampling_params
    answer_whole = OpenAIServingResponses.responses_full_generator
    create = OpenAIServingResponses.create_responses
    begin = OpenAIServingResponses.__init__
    history_of = OpenAIServingResponses._response_input_history

    def with_bounds(self: Any, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        self.response_store = Recent(STORED, is_being_made)
        # Those of requests in flight, and of requests that failed, are among them.
        self.msg_store = Recent(2 * STORED, lambda key, _: key in self.response_store)

    def history(self: Any, request: Any) -> list[Any]:
        if request.request_id not in self.msg_store:
            return history_of(self, request)
        return list(self.msg_store[request.request_id])  # as it was when the request came

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
        if isinstance(request.input, list):
            try:
                request.input = with_items(request.input, list(self.response_store.values()))
            except LookupError as error:
                message = f"input names item {error.args[0]!r}, which is not stored: send the item itself"
                if not self.enable_response_store:
                    message += ' (in the AI SDK: "store": false), or serve with --enable-response-store'
                return self.create_error_response(message, param="input")
        self.msg_store.pop(request.request_id, None)  # of one that failed, which may have asked for else
        return await create(self, request, raw_request)

    OpenAIServingResponses.__init__ = with_bounds
    OpenAIServingResponses._response_input_history = history
    OpenAIServingResponses.create_responses = beside_others
    ResponsesRequest.to_sampling_params = with_limit
    OpenAIServingResponses.responses_full_generator = with_status
