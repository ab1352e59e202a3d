"""One table of rotations for all requests of a model with longrope (Phi-3 and Phi-4-mini of 128K).

Such a model has frequencies for short prompts and others for long ones. SGLang takes the latter for a whole batch
once one of its tokens lies beyond the short prompts' positions: how a token is rotated, and what others find of its
KV in the prefix cache, would depend on the chunk and on the neighbours that it came with. Here it depends on the
longest request that the server takes, and on nothing else.
"""

import logging

import torch
from sglang.srt.layers.rotary_embedding.rope_variant import Phi3LongRoPEScaledRotaryEmbedding

logger = logging.getLogger(__name__)

SPARE = 256
"""Positions behind the longest request's, for a draft that looks ahead."""


def settle(model: torch.nn.Module, longest: int) -> None:
    """Let all tokens be rotated by one table: that for long prompts, if there may be any.

    Args:
        longest: tokens of the longest request, ``--context-length``.
    """
    told, rows = False, longest + SPARE
    for layer in model.modules():
        if not isinstance(layer, Phi3LongRoPEScaledRotaryEmbedding):
            continue
        short, before = layer.original_max_position_embeddings, layer.long_cos_sin_cache
        if short >= rows:
            continue  # no request has more tokens, or the table is ours
        if longest > short:
            how = layer.long_factor, layer.long_mscale
        else:
            how = layer.short_factor, layer.short_mscale
        with before.device:
            table = layer._compute_cos_sin_cache(rows, *how).to(before.dtype)
        layer.long_short_cos_sin_cache, layer.original_max_position_embeddings = table, rows
        if longest > short and not told:
            told = True
            logger.warning(
                f"short prompts are rotated as long ones, since requests may have {longest} tokens; with "
                f"--context-length {short} all are rotated as short ones"
            )
