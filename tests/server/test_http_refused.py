"""Requests for log-probabilities that the engine refuses after the HTTP process let them through.

Each of them once ended the server for everybody.
"""

import pytest

GENERATE, CHAT = "/generate", "/v1/chat/completions"
LOGPROBS = {"return_logprob": True, "top_logprobs_num": 2, "token_ids_logprob": [5]}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": 5}}}
REFUSED = {
    "regex": (GENERATE, {"text": "a", "sampling_params": {"regex": "(("}, **LOGPROBS}),
    "schema": (GENERATE, {"text": "a", "sampling_params": {"json_schema": '{"type": 5}'}, **LOGPROBS}),
    "chat": (
        CHAT,
        {
            "model": "any",
            "messages": [{"role": "user", "content": "Where?"}],
            "response_format": SCHEMA,
            "logprobs": True,
            "top_logprobs": 2,
        },
    ),
}


@pytest.mark.parametrize(("route", "body"), REFUSED.values(), ids=REFUSED)
def test_what_the_engine_refuses_has_no_log_probabilities(server, route, body):
    refused = server.client.post(route, json=body)
    assert refused.status_code == 400 and "Failed to compile" in refused.text
    streamed = server.client.post(route, json=body | {"stream": True})
    assert "Failed to compile" in streamed.text
    assert server.process.poll() is None
    assert "Traceback" not in server.log.read_text()
