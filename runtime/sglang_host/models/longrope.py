"""One table of rotations for all requests of a model with longrope (Phi-3 and Phi-4-mini of 128K), in pairs too.

Such a model has frequencies for short prompts and others for long ones. SGLang takes the latter for a whole batch
once one of its tokens lies beyond the short prompts' positions: how a token is rotated, and what others find of its
KV in the prefix cache, would depend on the chunk and on the neighbours that it came with. Here it depends on the
longest request that the server takes, and on nothing else.

SGLang rotates the two halves of a head by these frequencies, and does not start where a model rotates pairs of
neighbours, as GLM-4 does.
"""

import logging
from typing import Any

import torch
from sglang.srt.layers.rotary_embedding import factory
from sglang.srt.layers.rotary_embedding.rope_variant import Phi3LongRoPEScaledRotaryEmbedding

logger = logging.getLogger(__name__)

SPARE = 256
"""Positions behind the longest request's, for a draft that looks ahead."""


class LongRope(Phi3LongRoPEScaledRotaryEmbedding):
    """SGLang's, and where a model rotates pairs the same of heads in another order.

    Args:
        head_size, rotary_dim, longest, short, base: as SGLang has them.
        is_neox_style: whether halves are rotated.
    """

    def __init__(
        self,
        head_size: int,
        rotary_dim: int,
        longest: int,
        short: int,
        base: int,
        is_neox_style: bool,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        super().__init__(head_size, rotary_dim, longest, short, base, True, *args, **kwargs)
        self.is_neox_style = is_neox_style

    def forward(
        self,
        positions: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        offsets: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.is_neox_style:
            return super().forward(positions, query, key, offsets)
        query, key = super().forward(positions, self._halved(query), self._halved(key), offsets)
        return self._paired(query), self._paired(key)

    def _halved(self, x: torch.Tensor) -> torch.Tensor:
        """Heads with the first of each pair before the second of each."""
        heads = x.unflatten(-1, (-1, self.head_size))
        first, second = heads[..., : self.rotary_dim : 2], heads[..., 1 : self.rotary_dim : 2]
        return torch.cat((first, second, heads[..., self.rotary_dim :]), -1).flatten(-2)

    def _paired(self, x: torch.Tensor) -> torch.Tensor:
        """What :meth:`_halved` takes."""
        heads = x.unflatten(-1, (-1, self.head_size))
        halves = heads[..., : self.rotary_dim].unflatten(-1, (2, -1))
        pairs = halves.transpose(-1, -2).flatten(-2)
        return torch.cat((pairs, heads[..., self.rotary_dim :]), -1).flatten(-2)


def install() -> None:
    """Let SGLang make our class. Before it loads a model."""
    factory.Phi3LongRoPEScaledRotaryEmbedding = LongRope


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
