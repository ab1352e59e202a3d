"""Sliding windows as the models were trained with, where SGLang's are of another size."""

from typing import Any

import torch

from fathom.runtime.sglang_host.attention.attention_layers import layers_of


def settle(model: torch.nn.Module, config: Any) -> None:
    """Have no layer see one position too many.

    A window of W tokens is the token itself and W - 1 before it, and the latter is what SGLang's layers are to be
    told. Some of its models (Cohere 2, and those that it runs by Transformers' code) tell them W.

    Args:
        config: SGLang's of the model.
    """
    window = getattr(config.hf_text_config, "sliding_window", None)
    for layer in layers_of(model):
        if window and layer.sliding_window_size == window:
            layer.sliding_window_size = window - 1
