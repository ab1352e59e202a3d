"""Decode steps of a bfloat16 model, whose layers take few rows in two calls, against its prefill, whose do not."""

import pytest
import torch
from conftest import save_random_model

from fathom.kernels.amx_cpu import has_amx
from fathom.kernels.bfloat16_cpu import has_bfloat16_products
from fathom.kernels.few_rows_linear_cpu import FEW_ROWS
from fathom.runtime.sglang_host.layers.cpu_linear import (
    PackedLinearMethod,
    WideLinearMethod,
    multiplies_bfloat16,
)

PACKED = multiplies_bfloat16()
pytestmark = pytest.mark.skipif(
    PACKED and not has_bfloat16_products(),
    reason="oneDNN packs weights here in a way that kernels do not read",
)

LAYERS, NEW_TOKENS = 4, 40
PROMPTS = [[6 + (7 * i + 11 * j) % 150 for j in range(100 + i)] for i in range(3)]
assert len(PROMPTS[0]) > FEW_ROWS


def run(server, prompts, **options):
    sampling = {"temperature": 0, "max_new_tokens": options.pop("new", NEW_TOKENS), "ignore_eos": True}
    request = {"input_ids": prompts, "sampling_params": sampling, "return_logprob": True} | options
    response = server.client.post("/generate", json=request)
    assert response.status_code == 200, response.text
    return response.json()


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("Llama", {}),
        ("Llama", {"intermediate_size": 96}),  # gates fill whole blocks of 32 outputs, and not of 64
        ("Qwen2", {"num_attention_heads": 6}),  # its heads do not share the hidden size
        ("Qwen3", {}),
    ],
)
def test_decoding_says_what_prefill_says_of_the_same_tokens(start_server, tmp_path, family, changes):
    method = PackedLinearMethod if PACKED else WideLinearMethod
    lines = method(torch.randn(2 * changes.get("intermediate_size", 64), 32).bfloat16()).lines
    joined = 0 if changes.get("intermediate_size", 0) % lines.shape[1] else LAYERS
    model = save_random_model(tmp_path, family, dtype="bfloat16", **changes)
    server = start_server(model, "--dtype", "bfloat16", "--max-total-tokens", "4000")
    assert server.engine()["joined_layers"] == joined
    engine = server.engine()
    assert engine["packed_weights" if PACKED else "wide_weights"] > LAYERS
    assert engine["bfloat16_products"] == has_bfloat16_products() and engine["amx"] == has_amx()
    answers = check_decoding(server, joined)
    (tmp_path / "other").mkdir()
    other = save_random_model(tmp_path / "other", family, seed=1, dtype="bfloat16", **changes)
    reply = server.client.post("/update_weights_from_disk", json={"model_path": str(other)})
    if PACKED:
        assert reply.status_code == 400 and "packed" in reply.json()["message"]
    else:
        assert reply.status_code == 200, reply.text
        assert check_decoding(server, joined) != answers, "both read the new weights"
    assert server.stop() == 0


def check_decoding(server, joined):
    """Log-probabilities of decode steps are those that a prefill has for the same tokens; the tokens."""
    before = server.engine()["joined_steps"]
    answers = run(server, PROMPTS)
    steps = server.engine()["joined_steps"] - before
    assert steps >= NEW_TOKENS - 1 if joined else steps == 0
    server.flush()
    whole = [prompt + answer["output_ids"] for prompt, answer in zip(PROMPTS, answers, strict=True)]
    starts = [len(prompt) - 1 for prompt in PROMPTS]
    judged = run(server, whole, new=1, logprob_start_len=starts)
    differences = []
    for tokens, answer, judge in zip(whole, answers, judged, strict=True):
        assert judge["meta_info"]["cached_tokens"] == 0
        own = [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]
        theirs = judge["meta_info"]["input_token_logprobs"][1:]
        assert [entry[1] for entry in theirs] == tokens[-NEW_TOKENS:]
        differences += [abs(a - b[0]) for a, b in zip(own, theirs, strict=True)]
    assert max(differences) < 0.1
    assert sum(differences) / len(differences) < 0.005
    alone = run(server, PROMPTS[:1])[0]
    assert alone["output_ids"] == answers[0]["output_ids"]
    return [answer["output_ids"] for answer in answers]
