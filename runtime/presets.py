"""Presets as data: what each asks for beyond the exact policy. ``docs/policies.md`` says how they are used.

Fields come in the order in which they are filled in: where two cannot be had together, the first stays. A preset
holds for any model: a ``depth_cutoff`` with a decimal point is a share of the layers and stands for the nearest
boundary between spans, the deeper one of two that are equally near.
"""

from collections.abc import Mapping
from typing import Any

Presets = Mapping[str, Mapping[str, Any]]

EXACT = "exact"

PRESETS: Presets = {
    EXACT: {},
    "conversation": {"decode": "slow_fast", "speculative": True},
    "balanced": {"prefill_keep_rate": 0.5, "kv_retention_rate": 0.2, "speculative": True},
    "turbo": {
        "depth_cutoff": 0.75,
        "prefill_keep_rate": 0.5,
        "tsp_rate": 0.2,
        "kv_retention_rate": 0.2,
        "decode": "slow_fast",
        "speculative": True,
    },
}


def boundary(share: float, layers: int, span: int) -> int | None:
    """The boundary between spans of ``span`` layers nearest to a share of ``layers``; None where there is none."""
    legal = range(span, layers, span)
    return min(legal, key=lambda layer: (abs(layer - share * layers), -layer), default=None)
