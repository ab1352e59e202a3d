"""Intervals for shares of exact answers, and for the difference of two policies on the same samples."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

Z = 1.959964
"""Standard normal quantile of a two-sided 95 % interval."""


def wilson(right: int, n: int) -> tuple[float, float]:
    """95 % score interval (Wilson) of a share: right also for shares near 0 and 1 and for small `n`."""
    if n < 1 or not 0 <= right <= n:
        raise ValueError(f"{right} of {n} is no share")
    share, z2 = right / n, Z * Z
    middle = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = Z / (1 + z2 / n) * math.sqrt(share * (1 - share) / n + z2 / (4 * n * n))
    return max(0.0, middle - half), min(1.0, middle + half)


@dataclass(frozen=True)
class Paired:
    """One policy against the baseline on the same samples; shares in 0..1.

    Attributes:
        better: samples that only the policy answered exactly.
        worse: samples that only the baseline answered exactly.
        difference: share of the policy minus share of the baseline.
        low, high: 95 % interval of the difference.
        p: exact two-sided McNemar test; probability of a split at least this uneven if neither is better.
    """

    better: int
    worse: int
    difference: float
    low: float
    high: float
    p: float


def mcnemar(better: int, worse: int) -> float:
    """Exact two-sided McNemar test: the pairs that differ are fair coin throws under the null hypothesis."""
    n = better + worse
    tail = sum(math.comb(n, i) for i in range(min(better, worse) + 1))
    return min(1.0, 2 * tail / 2**n)


def paired(policy: Sequence[bool], baseline: Sequence[bool]) -> Paired:
    """Difference of two paired shares, with the adjusted Wald interval of Bonett and Price (2012)."""
    if len(policy) != len(baseline) or not policy:
        raise ValueError(f"{len(policy)} answers cannot be paired with {len(baseline)}")
    pairs = list(zip(policy, baseline, strict=True))
    better = sum(mine and not theirs for mine, theirs in pairs)
    worse = sum(theirs and not mine for mine, theirs in pairs)
    n = len(pairs)
    up, down = (better + 1) / (n + 2), (worse + 1) / (n + 2)
    half = Z * math.sqrt((up + down - (up - down) ** 2) / (n + 2))
    low, high = max(-1.0, up - down - half), min(1.0, up - down + half)
    return Paired(better, worse, (better - worse) / n, low, high, mcnemar(better, worse))
