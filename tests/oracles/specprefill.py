"""SpecPrefill's selection by the book, on the full attention matrix of one prompt, in float64 and plain loops."""

import math
from collections.abc import Iterable, Sequence
from decimal import Decimal

import torch


def token_scores(
    queries: Sequence[torch.Tensor], keys: Sequence[torch.Tensor], scale: float, pool: int = 13
) -> torch.Tensor:
    """[rows, N] from each layer's queries [rows, heads, dim] and prompt keys [N, kv_heads, dim] (section 3.2.2)."""
    per_layer_and_head = []
    for query, key in zip(queries, keys, strict=True):
        heads, share = query.shape[1], query.shape[1] // key.shape[1]
        for head in range(heads):
            logits = query[:, head].double() @ key[:, head // share].double().T * scale
            attention = torch.exp(logits) / torch.exp(logits).sum(-1, keepdim=True)
            padded = torch.cat(
                [torch.zeros(len(query), pool // 2), attention, torch.zeros(len(query), pool // 2)], 1
            )
            per_layer_and_head.append(padded.unfold(1, pool, 1).sum(-1) / pool)
    return torch.stack(per_layer_and_head).max(0).values


def chunk_means(tokens: Sequence[float], chunk: int) -> list[float]:
    """Mean score of each chunk; the last one over its own tokens."""
    parts = [tokens[i : i + chunk] for i in range(0, len(tokens), chunk)]
    return [sum(part) / len(part) for part in parts]


def must_stay(n: int, spans: Iterable[tuple[int, int]], chunk: int) -> set[int]:
    """Chunks that stay in any case: the first, the last, and those with a protected token."""
    protected = {t for start, stop in spans for t in range(start, stop)} | {0, n - 1}
    return {t // chunk for t in protected}


def kept_chunks(means: Sequence[float], forced: set[int], count: int) -> set[int]:
    """The ``count`` best chunks, forced ones first; ties to the lower index."""
    best_first = sorted(range(len(means)), key=lambda c: (c not in forced, -means[c], c))
    return set(best_first[: max(count, len(forced))])


def budget(rate: float, total: int) -> int:
    return math.ceil(Decimal(str(rate)) * total)


def kept_tokens(
    scores: torch.Tensor,
    spans: Iterable[tuple[int, int]],
    rate: float | str,
    chunk: int = 32,
    share: float = 0.95,
    min_rate: float = 0.05,
) -> list[int]:
    """Positions that enter the target, from scores [rows, N].

    Args:
        rate: of chunks, or "auto" for as few as hold the ``share`` of the score mass, at least ``min_rate``.
    """
    n = scores.shape[1]
    means, forced = chunk_means(scores.double().mean(0).tolist(), chunk), must_stay(n, spans, chunk)
    if rate == "auto":
        sizes = [min(chunk, n - start) for start in range(0, n, chunk)]
        count = smallest_count(means, sizes, forced, share, min_rate)
    else:
        count = budget(rate, len(means))
    kept = kept_chunks(means, forced, count)
    return [t for t in range(n) if t // chunk in kept]


def smallest_count(
    means: Sequence[float], sizes: Sequence[int], forced: set[int], share: float, min_rate: float
) -> int:
    """By trying every count: the first whose kept chunks hold the share of the mass, and at least ``min_rate``."""
    mass = [m * s for m, s in zip(means, sizes, strict=True)]
    for count in range(budget(min_rate, len(means)), len(means)):
        held = sum(mass[c] for c in kept_chunks(means, forced, count))
        if held >= share * sum(mass):
            return max(count, len(forced))
    return len(means)
