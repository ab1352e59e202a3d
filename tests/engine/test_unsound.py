"""A request whose logits are no numbers ends with an error, and nobody else notices."""

import json
import threading
from types import SimpleNamespace

import pytest
import torch
from conftest import save_random_model
from safetensors.torch import load_file, save_file

from fathom.runtime.sglang_host.sampling import unsound

POISON = 7
"""A token whose embedding is none."""
PROMPT = [10 + i * 37 % 1900 for i in range(60)]
NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("row", "marked"),
    [
        ([1.0, 2.0], False),
        ([-INF, 2.0], False),
        ([-INF, -INF], False),
        ([NAN, 2.0], True),
        ([1.0, NAN], True),
        ([1.0, INF], True),
    ],
)
def test_a_row_is_marked_if_no_token_can_be_taken(row, marked):
    output = SimpleNamespace(next_token_logits=torch.tensor([[3.0, 4.0], row]))
    unsound.mark(output)
    assert getattr(output, unsound.MARKS).tolist() == [False, marked]


@pytest.fixture(scope="module")
def poisoned(start_server, tmp_path_factory):
    model = save_random_model(tmp_path_factory.mktemp("poisoned"))
    weights = load_file(model / "model.safetensors")
    weights["model.embed_tokens.weight"][POISON] = NAN
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    return start_server(model, "--dtype", "float32", "--max-total-tokens", "8000")


def ask(server, prompt, tokens=8, sampling=None, **members):
    given = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True} | (sampling or {})
    return server.client.post("/generate", json={"input_ids": prompt, "sampling_params": given, **members})


def errors(server):
    found = server.series("fathom:requests_total")
    return sum(value for name, value in found.items() if 'outcome="error"' in name)


@pytest.mark.parametrize(
    "members",
    [
        {},
        {"sampling": {"temperature": 1.0}},
        {"sampling": {"temperature": 1.0, "top_p": 0.5, "sampling_seed": 3}},
        {"sampling": {"regex": "[a-z]+"}},
        {"return_logprob": True, "top_logprobs_num": 2},
        {"fathom": {"decode": "slow_fast", "kv_retention_rate": 0.5}},
    ],
    ids=json.dumps,
)
def test_it_ends_with_an_error_and_nobody_else_notices(poisoned, members):
    expected = ask(poisoned, PROMPT, 40).json()["output_ids"]
    before, neighbours = errors(poisoned), []
    thread = threading.Thread(target=lambda: neighbours.append(ask(poisoned, PROMPT, 40)))
    thread.start()
    reply = ask(poisoned, [*PROMPT, POISON], **members)
    thread.join()
    assert reply.status_code == 500, reply.text
    assert neighbours[0].json()["output_ids"] == expected
    assert errors(poisoned) == before + 1
    assert unsound.REASON in poisoned.log.read_text()


def test_a_stream_ends_with_the_reason(poisoned):
    reply = ask(poisoned, [*PROMPT, POISON], stream=True)
    last = json.loads(reply.text.split("data: ")[-2])
    found = last.get("error") or last["meta_info"]["finish_reason"]
    assert unsound.REASON in json.dumps(found)


def test_its_kv_is_nobody_elses(poisoned):
    prompt = [POISON + 50, *PROMPT[::-1], POISON]
    assert ask(poisoned, prompt).status_code == 500
    assert ask(poisoned, prompt[:-1]).json()["meta_info"]["cached_tokens"] == 0
