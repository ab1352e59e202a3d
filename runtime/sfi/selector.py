"""The Selector: which entries the fast steps read, from one look at everything (Slow-Fast Inference, Algorithm 2).

The entries of a request's table are ranked in order: index j stands for the position of the paper's equations. The
candidates of a request are one range ``[begin, end)``: everything but its sink and its recent tokens.
"""

from dataclasses import dataclass

import numpy as np
import torch

from fathom.kernels.murmur_hash import murmur_hash32
from fathom.kernels.selector_scores import selector_scores
from fathom.kernels.stable_top_k import stable_top_k
from fathom.runtime.sfi.config import SelectorConfig


@dataclass(frozen=True)
class Selection:
    """What the Selector chose in one layer.

    Attributes:
        indices: [requests, kv_heads, width] int32, ascending, padded with -1.
        counts: [requests] int32; all heads of a request take the same number.
    """

    indices: torch.Tensor
    counts: torch.Tensor


def candidates(lengths: np.ndarray, sink: int, recent: np.ndarray | int) -> tuple[np.ndarray, np.ndarray]:
    """Ranges [begin, end) of the candidate indices J (Eq. 2); empty ones have begin == end.

    Args:
        lengths: [requests] entries in the table, the current token included.
        recent: [requests] recent tokens of each request.
    """
    end = np.maximum(lengths - recent, 0)
    return np.minimum(end, sink), end


SHIFT = 24
"""Of 32 hashed bits those below count tokens or entries, the eight above a layer or a head."""


def random_scores(
    seeds: torch.Tensor, lengths: torch.Tensor, layer: int, kv_heads: int, entries: int
) -> torch.Tensor:
    """Scores without any meaning: the control for what the Selector's are worth.

    Args:
        seeds: [requests] int64, one per request; lengths: [requests] tokens of it at the time of the choice. A
            request gets the same scores in any batch. Below 2**24, as are entries; layers and heads are below 256.

    Returns:
        [requests, kv_heads, entries] float32.
    """
    heads = torch.arange(kv_heads, device=seeds.device).unsqueeze(1) << SHIFT
    columns = (heads + torch.arange(entries, device=seeds.device)).flatten()
    positions = lengths + (layer << SHIFT)
    return murmur_hash32(seeds, positions, columns).view(len(seeds), kv_heads, entries).float()


def select(
    logits: torch.Tensor,
    key_norms: torch.Tensor,
    begin: torch.Tensor,
    end: torch.Tensor,
    selected: int,
    config: SelectorConfig,
    budget: torch.Tensor | None = None,
    drawn: tuple[torch.Tensor, torch.Tensor] | None = None,
    pitch: torch.Tensor | None = None,
) -> Selection:
    """Choose at most ``selected`` entries per KV head (Eqs. 6 to 24).

    Args:
        logits: [requests, kv_heads, query_rows, n] float32, masked attention logits of all query rows that read a
            KV head (its query heads). Values outside the candidate range are ignored.
        key_norms: [requests, kv_heads, n] float32, Euclidean norms of the keys.
        begin, end: [requests] int, the candidate ranges.
        budget: [requests] int, what each request takes at most, if that is less than ``selected``.
        drawn: [requests, kv_heads, n] scores that take the place of the Selector's, and [requests] bool, for whom.
        pitch: as for ``selector_scores``.
    """
    scores = selector_scores(logits, key_norms, begin, end, config, pitch)
    if drawn is not None:
        assert pitch is None
        instead, at_random = drawn
        scores = torch.where(at_random.view(-1, 1, 1), instead, scores)
    most = torch.full_like(begin, selected) if budget is None else budget
    width = min(selected, logits.shape[-1]) if pitch is None else selected
    low, high, most = (each.unsqueeze(-1) for each in (begin, end, most))
    indices, counts = stable_top_k(scores, low, high, most, width, pitch)
    return Selection(indices, counts[:, 0])
