"""``/v1/responses``: whose place a response may not take."""

import asyncio
from types import SimpleNamespace

from sglang.srt.entrypoints.openai.protocol import ResponsesRequest
from sglang.srt.entrypoints.openai.serving_responses import OpenAIServingResponses

from fathom.server import responses


def test_a_response_takes_no_stored_ones_place(monkeypatch):
    async def create(self, request, raw_request=None):
        return "created"

    monkeypatch.setattr(OpenAIServingResponses, "create_responses", create)
    whole = OpenAIServingResponses.responses_full_generator
    monkeypatch.setattr(OpenAIServingResponses, "responses_full_generator", whole)
    monkeypatch.setattr(ResponsesRequest, "to_sampling_params", ResponsesRequest.to_sampling_params)
    responses.install()
    told = []
    serving = SimpleNamespace(
        response_store={"resp_a": 1}, create_error_response=lambda *a, **b: told.append(b)
    )
    for name in ("resp_b", "resp_a"):
        request = ResponsesRequest(input="x", model="m", request_id=name)
        answer = asyncio.run(OpenAIServingResponses.create_responses(serving, request))
        assert (answer == "created") == (name == "resp_b")
    assert told == [{"param": "request_id"}]
