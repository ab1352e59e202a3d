"""The selection step that the mechanisms share: how many may stay, and which, from scores.

Counts are exact, ties go to the lower index, and what is forced counts in the budget. Nothing here waits for a GPU.
"""

from fractions import Fraction

import torch

from fathom.kernels.stable_top_k import stable_top_k


def kept_count(rate: float, total: int) -> int:
    """⌈rate · total⌉, with the rate taken as the decimal it is written as: 7 % of 100 are 7, not 8.

    Raises:
        ValueError: for a rate outside (0, 1].
    """
    if not 0 < rate <= 1:
        raise ValueError(f"a rate must be in (0, 1], got {rate}")
    return -(-Fraction(repr(float(rate))) * total // 1)


def top_indices(scores: torch.Tensor, count: int, forced: torch.Tensor | None = None) -> torch.Tensor:
    """Ascending indices of the ``count`` best entries along the last dimension, forced ones first.

    Args:
        scores: [..., n] floating, compared in float32; NaN ranks last.
        count: how many stay, the forced ones included; cut to [0, n].
        forced: [f] distinct indices that stay in every row, even where they alone exceed ``count``; None for none.

    Returns:
        [..., kept] int64 with ``kept = max(count, f)``, or n where that is more.
    """
    total, pinned = scores.shape[-1], 0 if forced is None else len(forced)
    kept = min(max(count, pinned, 0), total)
    if kept == total:
        return torch.arange(total, device=scores.device).expand(scores.shape)
    # Infinities become the largest numbers: they are left to the forced entries and to NaN.
    scores = scores.float().nan_to_num(nan=float("-inf"))
    if forced is not None:
        scores.index_fill_(-1, forced, float("inf"))
    none, everything, budget = (torch.full((), n, device=scores.device) for n in (0, total, kept))
    return stable_top_k(scores, none, everything, budget, kept)[0].long()
