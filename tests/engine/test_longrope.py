"""A token's rotation does not depend on what else is in its batch, and is that of Transformers for long prompts."""

import pytest
import torch
import transformers
from sglang.srt.layers.rotary_embedding import factory
from sglang.srt.layers.rotary_embedding.rope_variant import Phi3LongRoPEScaledRotaryEmbedding
from transformers.models.glm4 import modeling_glm4
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding, apply_rotary_pos_emb

from fathom.runtime.sglang_host.models import longrope

DIM, SHORT, LONGEST = 16, 64, 256
FACTORS = {
    "short_factor": [1.0 + 0.1 * i for i in range(DIM // 2)],
    "long_factor": [2.0 + i for i in range(DIM // 2)],
}


@pytest.fixture
def rotary():
    made = Phi3LongRoPEScaledRotaryEmbedding(
        DIM, DIM, LONGEST, SHORT, 10000, True, torch.float32, *FACTORS.values()
    )
    return torch.nn.ModuleDict({"first": made, "second": made})  # SGLang's layers share one


def rotated(model, positions):
    """[tokens, 2, DIM]: queries and keys, alike at all positions."""
    query, key = torch.randn(2, 1, DIM, generator=torch.Generator().manual_seed(1))
    given = (x.repeat(len(positions), 1) for x in (query, key))
    return torch.stack(model["first"](torch.tensor(positions), *given), 1)


def expected(positions):
    """By Transformers, for a prompt of LONGEST tokens."""
    config = transformers.Phi3Config(
        hidden_size=DIM,
        num_attention_heads=1,
        max_position_embeddings=LONGEST,
        original_max_position_embeddings=SHORT,
        rope_parameters={"rope_type": "longrope", "rope_theta": 10000.0, **FACTORS},
    )
    query, key = torch.randn(2, 1, DIM, generator=torch.Generator().manual_seed(1))
    given = (x.repeat(LONGEST, 1)[None, None] for x in (query, key))
    tables = Phi3RotaryEmbedding(config)(query, torch.arange(LONGEST)[None])
    query, key = apply_rotary_pos_emb(*given, *tables)
    return torch.stack([query[0, 0], key[0, 0]], 1)[positions]


def test_pairs_are_rotated_by_the_same_frequencies(monkeypatch):
    """As in GLM-4, of whose heads a half is rotated."""
    monkeypatch.setattr(factory, "Phi3LongRoPEScaledRotaryEmbedding", None)
    longrope.install()
    said = {"rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 0.5, **FACTORS}
    config = transformers.Glm4Config(
        hidden_size=4 * DIM,
        head_dim=2 * DIM,
        num_attention_heads=2,
        max_position_embeddings=LONGEST,
        rope_parameters=said | {"original_max_position_embeddings": SHORT},
    )
    made = factory.get_rope(
        2 * DIM, 2 * DIM, LONGEST, 10000.0, False, config.rope_parameters, torch.float32, 0.5
    )
    longrope.settle(made, LONGEST)
    query, key = torch.randn(LONGEST, 2, 2 * DIM), torch.randn(LONGEST, 1, 2 * DIM)
    got = made(torch.arange(LONGEST), query.flatten(1), key.flatten(1))
    tables = modeling_glm4.Glm4RotaryEmbedding(config)(query, torch.arange(LONGEST)[None])
    heads = (x.transpose(0, 1)[None] for x in (query, key))
    for x, want in zip(got, modeling_glm4.apply_rotary_pos_emb(*heads, *tables), strict=True):
        torch.testing.assert_close(x, want[0].transpose(0, 1).flatten(1))


@pytest.mark.parametrize(
    "positions", [[3], [0, 3, SHORT - 1], [SHORT], [SHORT - 1, SHORT], [3, 200, LONGEST - 1]]
)
def test_every_token_is_rotated_as_in_a_long_prompt(rotary, positions):
    longrope.settle(rotary, LONGEST)
    torch.testing.assert_close(rotated(rotary, positions), expected(positions))


def test_a_server_of_short_requests_rotates_them_as_short_ones(rotary, caplog):
    before = rotated(rotary, [3, SHORT - 1])
    longrope.settle(rotary, SHORT)
    assert torch.equal(rotated(rotary, [3, SHORT - 1]), before)
    assert not torch.allclose(before, expected([3, SHORT - 1]))
    assert not caplog.records


def test_it_is_told_once(rotary, caplog):
    for _ in range(2):
        longrope.settle(rotary, LONGEST)
    (record,) = caplog.records
    assert f"--context-length {SHORT}" in record.message
