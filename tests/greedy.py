"""Greedy answers with log-probabilities, and their comparison with a reference's."""

import pytest

NEW_TOKENS = 6
TOP = 40
"""Log-probabilities per token."""
TOLERANCE = 1e-4


def body_of(prompt, policy, new_tokens=NEW_TOKENS, **sampling):
    """Of ``/generate``, for a prompt of token ids or a list of them; ``policy``: the `fathom` object, or None."""
    body = {
        "input_ids": prompt,
        "sampling_params": {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True, **sampling},
        "return_logprob": True,
        "top_logprobs_num": TOP,
    }
    return body if policy is None else body | {"fathom": policy}


def ask(server, *given, **sampling):
    """The answer, or the list of answers; arguments as of :func:`body_of`."""
    response = server.client.post("/generate", json=body_of(*given, **sampling))
    assert response.status_code == 200, response.text
    return response.json()


def check_tokens(answer, want, where):
    """Tokens and log-probabilities are those of ``want`` [tokens, vocabulary]."""
    assert answer["output_ids"] == want.argmax(-1).tolist(), where
    for row, entries in zip(want, answer["meta_info"]["output_top_logprobs"], strict=True):
        assert len(entries) == TOP
        got = [value for value, _, _ in entries]
        assert got == pytest.approx(row[[token for _, token, _ in entries]].tolist(), abs=TOLERANCE), where
