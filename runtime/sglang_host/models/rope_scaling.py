"""Tables of rotations as Transformers has them, where SGLang's are of another model.

Some of its models pass over scaling altogether, and its tables end, or go on as something else, behind the
positions that a model says it was scaled for.
"""

import math
from typing import Any

import torch
from sglang.srt.layers.rotary_embedding import get_rope
from sglang.srt.layers.rotary_embedding.base import LinearScalingRotaryEmbedding, RotaryEmbedding
from sglang.srt.layers.rotary_embedding.rope_variant import (
    DynamicNTKScalingRotaryEmbedding,
    Phi3LongRoPEScaledRotaryEmbedding,
)
from sglang.srt.layers.rotary_embedding.yarn import YaRNScalingRotaryEmbedding
from sglang.srt.utils.hf_transformers_utils import get_rope_config

from fathom.runtime.sglang_host.models import longrope
from fathom.runtime.sglang_host.models.rope_overrides import kind_of

ALIKE = ("linear", "dynamic", "yarn", "llama3", "longrope")
"""Scaling that is the same in all layers."""


def settle(model: torch.nn.Module, config: Any) -> None:
    """Give all layers the rotations that the model's config asks for, at all positions that there may be.

    Args:
        config: SGLang's of the model, whose ``context_len`` is the longest request in tokens.
    """
    if not config.is_multimodal:
        _scale(model, get_rope_config(config.hf_text_config)[1])
    for layer in model.modules():
        if isinstance(layer, RotaryEmbedding):
            with layer.cos_sin_cache.device:
                _lengthen(layer, config.context_len + longrope.SPARE)
    longrope.settle(model, config.context_len)


def _scale(model: torch.nn.Module, parameters: Any) -> None:
    """Scale the rotations of a model of whose layers none is scaled."""
    if kind_of(parameters) not in ALIKE:
        return
    places = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent._modules.items()
        if isinstance(child, RotaryEmbedding | Phi3LongRoPEScaledRotaryEmbedding)
    ]
    if any(type(child) is not RotaryEmbedding for *_, child in places):
        return
    for parent, name, plain in places:
        shape = plain.head_size, plain.rotary_dim, plain.max_position_embeddings, plain.base
        with plain.cos_sin_cache.device:
            scaled = get_rope(*shape, plain.is_neox_style, parameters, plain.dtype)
        setattr(parent, name, scaled)


def _lengthen(layer: RotaryEmbedding, rows: int) -> None:
    """SGLang's ``_ensure_cos_sin_cache_length``, which goes on as something else where these are scaled."""
    gain = 1.0
    if type(layer) is YaRNScalingRotaryEmbedding:
        factor, gain = layer.scaling_factor, layer.mscale
        frequencies = layer._compute_inv_freq(factor)
    elif type(layer) is LinearScalingRotaryEmbedding:
        (factor,) = layer.scaling_factors
        frequencies = layer._compute_inv_freq(layer.base) / factor
    elif type(layer) is DynamicNTKScalingRotaryEmbedding:
        factor, dim = layer.scaling_factor, layer.rotary_dim
        stretch = (factor * factor - (factor - 1)) ** (dim / (dim - 2))
        frequencies = layer._compute_inv_freq(layer.base * stretch)
    else:
        return layer._ensure_cos_sin_cache_length(rows - 1)
    begin = math.ceil(layer.max_position_embeddings * factor)
    if rows > begin:
        angles = torch.arange(begin, rows, dtype=torch.float32)[:, None] * frequencies
        beyond = torch.cat((angles.cos(), angles.sin()), -1) * gain
        layer.cos_sin_cache = torch.cat((layer.cos_sin_cache[:begin], beyond.to(layer.cos_sin_cache.dtype)))
