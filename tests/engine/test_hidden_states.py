"""Hidden states of requests whose neighbours drop rows or have drafted ones, against Transformers'."""

import random
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from greedy import body_of
from noisy import draft_flags
from transformers import AutoModelForCausalLM
from waiting import slowed, wait_until

DRAFT = {"speculative": True}
JUDGED = {"prefill_keep_rate": 0.5, "min_prompt_tokens": 0} | DRAFT
CASES = (
    (40, {"depth_cutoff": 2} | DRAFT, 12, False),
    (23, {}, 7, True),
    (31, {"tsp_rate": 0.3}, 9, False),
    (70, JUDGED, 12, False),
    (17, {}, 11, "last"),
    (45, {}, 9, True),
)
"""Prompt, policy and answer of requests, and whose states are asked for."""
TOLERANCE = 1e-3


@pytest.mark.parametrize("mode", ["full", "last"])
def test_each_state_is_its_own_tokens(start_server, tiny_model, close_draft, mode):
    """Of the prompt and each token before the last, or of the last of these alone."""
    flags = ("--dtype", "float32", "--max-total-tokens", "4000", "--return-hidden-states-mode", mode)
    server = start_server(tiny_model, *flags, *draft_flags(close_draft))
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    rng, bodies = random.Random(1), []
    for length, policy, tokens, states in CASES:
        body = body_of([rng.randrange(6, 2000) for _ in range(length)], policy, tokens)
        asked = "last" if states and mode == "last" else states
        bodies.append(body | {"return_logprob": False, "return_hidden_states": asked})

    def ask(body):
        reply = server.client.post("/generate", json=body)
        assert reply.status_code == 200, reply.text
        return reply.json()

    def came():
        engine = server.engine()
        return engine["waiting_requests"] + engine["open_accounts"]

    with ThreadPoolExecutor(len(bodies) + 1) as pool:
        begun = []
        with slowed(server, 0.3):
            for body in (body_of([6, 7, 8], {}, 9), *bodies):
                begun.append(pool.submit(ask, body))
                wait_until(lambda: begun[-1].done() or came() == len(begun))
        _, *answers = [each.result() for each in begun]
    assert max(answer["meta_info"]["fathom"]["accepted_tokens"] for answer in answers) > 0
    for body, answer in zip(bodies, answers, strict=True):
        if not (states := body["return_hidden_states"]):
            continue
        said, found = answer["output_ids"], answer["meta_info"]["hidden_states"]
        with torch.no_grad():
            ids = torch.tensor([body["input_ids"] + said[:-1]])
            want = model(ids, output_hidden_states=True).hidden_states[-1][0]
        if states == "last":
            got, want = torch.tensor(found), want[-1]
        else:
            got = torch.tensor([*found[0], *found[1:]])
        torch.testing.assert_close(got, want, atol=TOLERANCE, rtol=TOLERANCE)
