"""Rotations of scaled models are Transformers' at every position, also where SGLang would leave scaling out."""

from types import SimpleNamespace

import pytest
import torch
import transformers
from sglang.srt.layers.rotary_embedding import base, get_rope
from sglang.srt.utils.hf_transformers_utils import get_rope_config
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from fathom.runtime.sglang_host.models import rope_overrides, rope_scaling

DIM, TRAINED, LONGEST = 32, 64, 320
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": TRAINED}
LONGROPE = {
    "rope_type": "longrope",
    "original_max_position_embeddings": TRAINED,
    "short_factor": [1.0 + 0.1 * i for i in range(DIM // 2)],
    "long_factor": [2.0 + i for i in range(DIM // 2)],
}
SCALED = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "linear, a whole factor": {"rope_type": "linear", "factor": 4},
    "llama3": YARN | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "YaRN": YARN,
    "YaRN, of little use": YARN | {"factor": 1.0},
    "YaRN, attention": YARN | {"attention_factor": 1.7},
    "YaRN, attention for all": YARN | {"attention_factor": 1.7, "mscale": 1.0, "mscale_all_dim": 0.5},
    "YaRN, scales": YARN | {"mscale": 1.0, "mscale_all_dim": 0.5},
    "YaRN, a scale of nothing": YARN | {"mscale": 0.7, "mscale_all_dim": 0},
    "longrope": LONGROPE,
    "longrope, attention": LONGROPE | {"attention_factor": 1.7},
    "longrope, factor": LONGROPE | {"factor": 16.0},
}


def config_of(said):
    return transformers.LlamaConfig(
        hidden_size=DIM,
        num_attention_heads=1,
        max_position_embeddings=TRAINED if said["rope_type"] == "linear" else LONGEST,
        rope_parameters=said | {"rope_theta": 50000.0},
        architectures=["LlamaForCausalLM"],
    )


@pytest.fixture
def rotary(tmp_path):
    """A function: what a config says, whether SGLang's model passes over it -> its layers, settled."""

    def make(said, passed_over):
        config_of(said).save_pretrained(tmp_path)
        config = rope_overrides.get_config(str(tmp_path), trust_remote_code=False)
        theta, parameters = get_rope_config(config)
        scaling = None if passed_over else parameters
        made = get_rope(DIM, DIM, config.max_position_embeddings, theta, True, scaling, torch.float32)
        model = torch.nn.ModuleDict({"first": made, "second": made})
        shape = SimpleNamespace(is_multimodal=False, hf_text_config=config, context_len=LONGEST)
        rope_scaling.settle(model, shape)
        return model

    return make


@pytest.mark.parametrize("passed_over", [False, True])
@pytest.mark.parametrize("kind", SCALED)
def test_every_position_is_rotated_as_by_transformers(rotary, kind, passed_over):
    """Also those of a draft that looks ahead of the longest request."""
    positions = torch.arange(LONGEST + 64)
    found = rotary(SCALED[kind], passed_over)
    query, key = torch.randn(2, len(positions), DIM)
    expected = LlamaRotaryEmbedding(config_of(SCALED[kind]))(query, positions[None])
    for layer in found.values():
        turned = layer(positions, query, key)
        for given, got in zip((query, key), turned, strict=True):
            want = transformers.models.llama.modeling_llama.apply_rotary_pos_emb(
                given[None, None], given[None, None], *expected
            )[0][0, 0]
            torch.testing.assert_close(got, want, atol=2e-4, rtol=1e-4)


def test_layers_of_which_some_are_scaled_are_left_as_they_are():
    """OLMo 3 scales those that see everything, and leaves out those with a window."""
    config = config_of(YARN)
    theta, parameters = get_rope_config(config)
    plain, scaled = (get_rope(DIM, DIM, LONGEST, theta, True, x, torch.float32) for x in (None, parameters))
    model = torch.nn.ModuleDict({"near": plain, "far": scaled})
    rope_scaling.settle(
        model, SimpleNamespace(is_multimodal=False, hf_text_config=config, context_len=LONGEST)
    )
    assert type(model["near"]) is base.RotaryEmbedding and model["far"] is scaled
