"""Top-K of many rows, each with its own budget and candidates; ties to the lower index, no wait for a GPU."""

import torch


def stable_top_k_reference(
    scores: torch.Tensor, valid: torch.Tensor, budget: torch.Tensor
) -> list[list[int]]:
    """Reference for :func:`stable_top_k`: one ascending list per row of the flattened leading dimensions."""
    rows = zip(scores.flatten(0, -2), valid.flatten(0, -2), budget.flatten().tolist(), strict=True)
    chosen = []
    for row, mask, k in rows:
        own = [i for i, there in enumerate(mask.tolist()) if there]
        chosen.append(sorted(sorted(own, key=lambda i: (-float(row[i]), i))[:k]))
    return chosen


def stable_top_k(
    scores: torch.Tensor, valid: torch.Tensor, budget: torch.Tensor, width: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices of each row's highest scores among its candidates.

    Args:
        scores: [..., n] float, not NaN.
        valid: bool, broadcastable to [..., n]; the candidates.
        budget: int, broadcastable to [...]; a row gives at most this many, and all candidates if it has fewer.
        width: largest budget, known to the host.

    Returns:
        indices [..., width] int32, ascending, padded with -1, and counts [...] int32.
    """
    n = scores.shape[-1]
    if n == 0 or width == 0:
        shape = scores.shape[:-1]
        return scores.new_full((*shape, width), -1, dtype=torch.int32), scores.new_zeros(
            shape, dtype=torch.int32
        )
    there = valid.expand(*valid.shape[:-1], n).sum(-1).expand(scores.shape[:-1])
    valid = valid.expand(scores.shape)
    counts = torch.minimum(there, budget.expand(scores.shape[:-1]).long()).clamp(min=0, max=width)
    if scores.device.type == "cpu" and scores.dtype == torch.float32:
        from fathom.kernels.refresh_cpu import stable_top_k_cpu

        return stable_top_k_cpu(scores, valid, counts, width), counts.int()
    # A candidate's own score may be the lowest there is; `valid` decides between it and what is no candidate.
    masked = scores.masked_fill(~valid, float("-inf"))
    largest = masked.topk(min(width, n), dim=-1).values
    threshold = largest.gather(-1, (counts - 1).clamp(min=0).unsqueeze(-1))
    above = (masked > threshold) & valid
    level = (masked == threshold) & valid
    room = counts.unsqueeze(-1) - above.sum(-1, keepdim=True)
    taken = above | (level & (level.cumsum(-1, dtype=torch.int32) <= room))
    taken &= counts.unsqueeze(-1) > 0
    place = taken.cumsum(-1, dtype=torch.int32) - 1
    # Column `width` collects what is not taken and is cut off.
    index = torch.where(taken, place, width).long()
    source = torch.arange(n, dtype=torch.int32, device=scores.device).expand(scores.shape)
    indices = scores.new_full((*scores.shape[:-1], width + 1), -1, dtype=torch.int32)
    indices.scatter_(-1, index, source)
    return indices[..., :width], counts.int()
