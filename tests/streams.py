"""Answers of the chat route, whole and in pieces."""

import json


def choices_of(server, route, body):
    """The choices of an answer; of a stream, those of all its events."""
    reply = server.client.post(route, json=body)
    assert reply.status_code == 200, reply.text
    if not body.get("stream"):
        return reply.json()["choices"]
    events = [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: {")]
    return [choice for event in events for choice in event["choices"]]


def logprobs_of(choices):
    """Each token with its log-probability, rounded as another batch may round it, and with its alternatives."""
    told = [entry for choice in choices if choice["logprobs"] for entry in choice["logprobs"]["content"]]
    return [
        (entry["token"], round(entry["logprob"], 3), [other["token"] for other in entry["top_logprobs"]])
        for entry in told
    ]
