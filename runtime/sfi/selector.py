"""The Selector: which entries the fast steps read, from one look at everything (Slow-Fast Inference, Algorithm 2).

The entries of a request's table are ranked in order: index j stands for the position of the paper's equations. The
candidates of a request are one range ``[begin, end)``: everything but its sink and its recent tokens.
"""

from dataclasses import dataclass

import torch

from fathom.kernels.selector_scores import selector_scores
from fathom.kernels.stable_top_k import stable_top_k
from fathom.runtime.sfi.config import SelectorConfig, SfiConfig


@dataclass(frozen=True)
class Selection:
    """What the Selector chose in one layer.

    Attributes:
        indices: [requests, kv_heads, width] int32, ascending, padded with -1.
        counts: [requests] int32; all heads of a request take the same number.
    """

    indices: torch.Tensor
    counts: torch.Tensor


def candidates(lengths: torch.Tensor, config: SfiConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Ranges [begin, end) of the candidate indices J (Eq. 2); empty ones have begin == end.

    Args:
        lengths: [requests] entries in the table, the current token included.
    """
    end = (lengths - config.recent).clamp(min=0)
    return torch.full_like(end, config.sink).minimum(end), end


def select(
    logits: torch.Tensor,
    key_norms: torch.Tensor,
    begin: torch.Tensor,
    end: torch.Tensor,
    selected: int,
    config: SelectorConfig,
) -> Selection:
    """Choose at most ``selected`` entries per KV head (Eqs. 6 to 24).

    Args:
        logits: [requests, kv_heads, query_rows, n] float32, masked attention logits of all query rows that read a
            KV head (its query heads times the window). Values outside the candidate range are ignored.
        key_norms: [requests, kv_heads, n] float32, Euclidean norms of the keys.
        begin, end: [requests] int, the candidate ranges.
    """
    scores = selector_scores(logits, key_norms, begin, end, config)
    index = torch.arange(logits.shape[-1], device=logits.device)
    valid = (index >= begin.unsqueeze(-1)) & (index < end.unsqueeze(-1))
    budget = torch.full_like(begin, selected).unsqueeze(-1)
    indices, counts = stable_top_k(scores, valid.unsqueeze(1), budget, min(selected, logits.shape[-1]))
    return Selection(indices, counts[:, 0])
