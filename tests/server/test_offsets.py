"""Where the tokens of a completion begin in its text."""

import pytest
from streams import choices_of

from fathom.server.answers.offsets import AROUND, Places

COMPLETIONS = "/v1/completions"
BODY = {"model": "any", "prompt": "The key of", "temperature": 0, "logprobs": 1, "max_tokens": 40}
SPLIT = "(字|漢|é|a| the ){12}"


def told(choices, index):
    """The text of a choice, whole or of a stream, and its tokens with their offsets."""
    mine = [choice for choice in choices if choice["index"] == index]
    logprobs = [choice["logprobs"] for choice in mine if choice["logprobs"]]
    tokens = [pair for each in logprobs for pair in zip(each["tokens"], each["text_offset"], strict=True)]
    return "".join(choice["text"] for choice in mine), tokens


@pytest.mark.parametrize("more", [{"regex": SPLIT, "n": 2}, {}], ids=str)
def test_a_token_is_where_it_is_said_to_be(server, more):
    body = BODY | more
    whole, pieces = (choices_of(server, COMPLETIONS, body | {"stream": stream}) for stream in (False, True))
    for index in range(body.get("n", 1)):
        text, tokens = told(whole, index)
        assert told(pieces, index) == (text, tokens)
        offsets = [offset for _, offset in tokens]
        assert offsets == sorted(offsets) and offsets[0] == 0 and offsets[-1] <= len(text)
        if tokens[-1][1] == len(text):
            tokens.pop()  # the one that ends the answer is not in it
        ends, seen = 0, 0
        for token, offset in tokens:
            if "\ufffd" not in token and not token.startswith("<|"):  # special ones are hidden
                assert text[offset : offset + len(token)] == token and offset >= ends
                ends, seen = offset + len(token), seen + 1
        assert seen > 5


VOCABULARY = [b"a", b" the", b"\xe5", b"\xad\x97", b"\xad", b"\x97 b", b"<end>", b"the"]
VOCABULARY += [b"\xe5\xad\x97", b"\x97\xe5"]  # all of a character; the end of one and the begin of the next


def decode(ids):
    return b"".join(VOCABULARY[token] for token in ids).decode(errors="replace")


def entries(ids):
    return [(-1.0, token, decode([token])) for token in ids]


@pytest.mark.parametrize(
    ("ids", "offsets"),
    [
        ([0, 1, 0], [0, 1, 5]),
        ([0, 2, 3, 0], [0, 1, 1, 2]),
        ([2, 4, 5, 0], [0, 0, 0, 3]),
        ([0, 6, 1], [0, 1, 1]),
        ([2, 0], [0, 1]),
        ([2, 3, 8], [0, 0, 1]),
        ([2, 4, 9, 3], [0, 0, 0, 1]),
        ([2, 3, 0, 1, 2, 3, 0], [0, 0, 1, 2, 6, 6, 7]),
    ],
)
def test_parts_of_characters_and_tokens_that_are_hidden(ids, offsets):
    text = decode([token for token in ids if token != 6])
    assert Places(decode, {6}).add(text, entries(ids)) == offsets
    one_by_one = Places(decode, {6})
    assert [
        one_by_one.add(text if place == 0 else "", entries([token]))[0] for place, token in enumerate(ids)
    ] == (offsets)


def test_a_token_without_the_blank_that_it_begins_with():
    """As SentencePiece decodes one alone."""
    assert Places(decode, {6}).add("a the a", [*entries([0, 7]), (-1.0, 0, "a")]) == [0, 2, 6]
    long = 2 * AROUND * "a"
    pieces, places = [("a", "a"), (" the", "the"), (" " + long, long), (" a", "a")], Places(decode, {6})
    found = [places.add(text, [(-1.0, 0, own)]) for text, own in pieces]
    assert found == [[0], [2], [6], [7 + len(long)]]
