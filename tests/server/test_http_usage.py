"""What an answer's ``usage`` says of tokens that were in the prefix cache, by each route's own names."""

import json

import pytest

DOCUMENT = [{"role": "user", "content": "What of all this is red? " + "A red box, a blue hat. " * 40}]
ROUTES = {
    "/v1/chat/completions": {"messages": DOCUMENT, "max_tokens": 2},
    "/v1/completions": {"prompt": DOCUMENT[0]["content"], "max_tokens": 2},
    "/v1/responses": {"input": DOCUMENT, "max_output_tokens": 2},
    "/v1/messages": {"messages": DOCUMENT, "max_tokens": 2},
}


def usage_of(client, route, body, stream):
    """All that an answer says of its usage, and its account."""
    if not stream:
        reply = client.post(route, json=body).json()
        return reply["usage"], reply["fathom"]
    reply = client.post(route, json=body | {"stream": True, "stream_options": {"include_usage": True}})
    events = [line.removeprefix("data: ") for line in reply.text.splitlines() if line.startswith("data: {")]
    told = [json.loads(event) for event in events]
    told += [event[part] for event in told for part in ("response", "message") if part in event]
    (account,) = {json.dumps(event["fathom"]) for event in told if "fathom" in event}
    usage = {}
    for event in told:
        usage |= event.get("usage") or {}
    return usage, json.loads(account)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("route", ROUTES)
def test_tokens_from_the_cache_are_in_the_usage(server, tiny_model, route, stream):
    server.flush()
    body = {"model": str(tiny_model), "temperature": 0} | ROUTES[route]
    for known in (False, True):
        usage, account = usage_of(server.client, route, body, stream)
        prompt, cached = account["prompt_tokens"], account["cached_tokens"]
        assert cached == (prompt - 1 if known else 0)
        if route == "/v1/messages":  # whose input tokens are those that were not cached
            assert usage.get("cache_read_input_tokens", 0) == cached
            assert usage["input_tokens"] == prompt - cached
        else:
            before = "input" if route == "/v1/responses" else "prompt"
            assert usage[f"{before}_tokens"] == prompt
            assert ((usage.get(f"{before}_tokens_details") or {}).get("cached_tokens") or 0) == cached
