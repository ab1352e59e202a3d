"""Answers of the chat route, whole and in pieces."""

import json
from itertools import pairwise


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


def cut(text):
    """A text in two pieces, at every place, and in many of the same size."""
    yield from ([text[:place], text[place:]] for place in range(len(text)))
    for size in (1, 2, 3, 5, 8):
        places = [*range(0, len(text), size), len(text)]
        yield [text[begin:end] for begin, end in pairwise(places)]
