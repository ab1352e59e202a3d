"""Streams of chats, in events of any size: no token loses its log-probabilities."""

import pytest
from streams import choices_of, logprobs_of

CHAT = "/v1/chat/completions"


@pytest.mark.parametrize("several", [1, 2])
def test_a_character_of_several_tokens(server, several):
    turns = [{"role": "user", "content": "Where?"}]
    body = {"model": "any", "messages": turns, "temperature": 0, "logprobs": True, "top_logprobs": 2}
    body |= {"max_tokens": 80, "n": several, "regex": "(字|漢|é|a){20}"}
    whole, pieces = (choices_of(server, CHAT, body | {"stream": stream}) for stream in (False, True))
    for choice in whole:
        mine = [piece for piece in pieces if piece["index"] == choice["index"]]
        text = "".join(piece["delta"].get("content") or "" for piece in mine)
        assert len(text) == 20 and text == choice["message"]["content"]
        got, want = logprobs_of(mine), logprobs_of([choice])
        assert len(want) > 25
        assert (
            got == want[: len(got)] and len(got) >= len(want) - 1
        )  # but for one without text, which ends it
