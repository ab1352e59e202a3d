"""Medians, spread and pairwise ratios of repeated measurements."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


def percentile(values: Sequence[float], q: float) -> float:
    """The q-th percentile (0..100), linear between order statistics (NumPy's default rule)."""
    if not values:
        raise ValueError("percentile of no values")
    if not 0 <= q <= 100:
        raise ValueError(f"percentile {q} is outside 0..100")
    ordered = sorted(values)
    at = (len(ordered) - 1) * q / 100
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def summary(values: Sequence[float]) -> dict[str, float]:
    """Count, median, extremes and quartiles."""
    return {
        "n": len(values),
        "median": percentile(values, 50),
        "min": min(values),
        "max": max(values),
        "q1": percentile(values, 25),
        "q3": percentile(values, 75),
    }


def pair_ratios(base: Sequence[float], other: Sequence[float]) -> list[float]:
    """base[i] / other[i] for measurements of the same round: drift of the machine that both met cancels.

    Above 1: `other` took less time; infinite where it took none. Dividing the medians instead would mix rounds.
    """
    if len(base) != len(other):
        raise ValueError(f"{len(base)} measurements cannot be paired with {len(other)}")
    return [b / o if o else math.inf for b, o in zip(base, other, strict=True)]


def order(names: Sequence[T], round_index: int) -> list[T]:
    """The order of one round: forwards, then backwards (ABBA), so that a steady drift favours nobody."""
    return list(names) if round_index % 2 == 0 else list(reversed(names))
