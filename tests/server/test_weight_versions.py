"""``metadata`` of an answer, which OpenAI's clients take for texts by their names."""

import pytest

from fathom.server.api.weight_versions import metadata_of

FIRST, SECOND = ({"version": name, "start": at, "end": at + 4} for at, name in ((0, "a"), (4, "b")))


def test_weights_that_were_changed_within_an_answer_are_listed():
    assert metadata_of({"weight_version": "a"}) == {"weight_version": "a"}
    assert metadata_of({"weight_version": "a", "weight_versions": [FIRST]}) == {"weight_version": "a"}
    changed = {"weight_version": "b", "weight_versions": [FIRST, SECOND]}
    assert metadata_of({"prompt_tokens": 3} | changed) == changed


@pytest.mark.parametrize(
    ("route", "prompt"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Where?"}]}),
        ("/v1/completions", {"prompt": "Where?"}),
    ],
)
def test_an_answers_metadata_are_texts(server, route, prompt):
    answer = server.client.post(route, json={"model": "any", "max_tokens": 3} | prompt).json()
    assert answer["metadata"] == {"weight_version": "default"}
