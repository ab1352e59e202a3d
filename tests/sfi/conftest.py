"""Random models that the references decode with."""

import functools

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM


@pytest.fixture(scope="session")
def random_model():
    """``random_model(layers)``: a Llama of 4 heads on 2 and 128 tokens, in float32; the same one each time."""

    @functools.cache
    def make(layers):
        torch.manual_seed(3)
        config = LlamaConfig(
            vocab_size=128,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=8192,
            tie_word_embeddings=False,
            initializer_range=0.2,
        )
        return LlamaForCausalLM(config).float().eval()

    return make
