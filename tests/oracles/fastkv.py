"""FastKV by the book, on the full causal attention matrix of one layer, in float64 and plain loops."""

import math
from collections.abc import Collection
from decimal import Decimal

import torch


def attention(query: torch.Tensor, key: torch.Tensor, scale: float) -> torch.Tensor:
    """[heads, n, n] of query [n, heads, dim] and key [n, kv_heads, dim], causal."""
    n, heads = query.shape[:2]
    share = heads // key.shape[1]
    past = torch.ones(n, n, dtype=torch.bool).tril()
    rows = []
    for head in range(heads):
        logits = query[:, head].double() @ key[:, head // share].double().T * scale
        rows.append(torch.where(past, logits, -math.inf).softmax(-1))
    return torch.stack(rows)


def saliency(matrix: torch.Tensor, groups: int, window: int = 8, pool: int = 7) -> list[list[float]]:
    """Eq. 1 and 2: one list per group of heads, over the tokens before the window."""
    heads, n, _ = matrix.shape
    before, reach = max(n - window, 0), pool // 2
    per_head = []
    for head in range(heads):
        mean = matrix[head, before:].mean(0)[:before].tolist()
        per_head.append([max(mean[max(i - reach, 0) : i + reach + 1]) for i in range(before)])
    share = heads // groups
    return [
        [sum(per_head[h][i] for h in range(g * share, (g + 1) * share)) / share for i in range(before)]
        for g in range(groups)
    ]


def budget(rate: float, total: int) -> int:
    return math.ceil(Decimal(str(rate)) * total)


def keep(
    scores: list[float],
    present: int,
    entered: int,
    rate: float,
    window: int = 8,
    forced: Collection[int] = (),
) -> list[int]:
    """⌈rate · entered⌉ of ``present`` tokens: window, forced ones, then the best; ties to the lower index."""
    stay = set(range(max(present - window, 0), present)) | set(forced)
    count = min(budget(rate, entered), present)
    for token in sorted(range(len(scores)), key=lambda i: (-scores[i], i)):
        if len(stay) >= count:
            break
        stay.add(token)
    return sorted(stay)
