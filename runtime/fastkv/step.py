"""FastKV's part of a prefill plan: where it narrows, and what is kept after prefill. Token counts are exact."""

from collections.abc import Mapping
from typing import Any

from fathom.runtime.fastkv.config import FastKVConfig
from fathom.runtime.fastkv.select import Sizes
from fathom.runtime.plan import SCORED, Retention, Step

MECHANISM = "FastKV"


def config_of(policy: Mapping[str, Any], tsp_layer: int | None) -> FastKVConfig:
    """The numbers that a policy's fields ask for; neutral for an empty policy."""
    if not policy:
        return FastKVConfig(tsp_rate=1.0)
    return FastKVConfig(
        tsp_layer=tsp_layer,
        tsp_rate=policy["tsp_rate"],
        retention_rate=policy["kv_retention_rate"],
        retention_policy=policy["retention_policy"],
    )


def propagated_count(rate: float, window: int, entered: int, anchored: bool) -> int:
    """Tokens that go on above the selection layer, of ``entered``.

    Args:
        anchored: whether a deeper step needs token 0, which then counts in the budget.
    """
    return min(max(Sizes(entered, entered, window).budget(rate), window + anchored), entered)


def propagation_step(config: FastKVConfig, entered: int, anchored: bool) -> Step | None:
    """The step for a prompt of which ``entered`` tokens enter the model; None where all of them go on."""
    if config.tsp_layer is None or config.tsp_rate == 1 or entered == 0:
        return None
    rate, window = config.tsp_rate, config.window
    kept = propagated_count(rate, window, entered, anchored)
    if kept >= entered:
        return None
    return Step(config.tsp_layer, MECHANISM, SCORED, anchor=False, rate=rate, window=window, kept=kept)


def retention(config: FastKVConfig, entered: int) -> Retention | None:
    """What is kept of a prompt of which ``entered`` tokens enter the model; None where all of it is."""
    if config.retention_rate == 1 or entered == 0:
        return None
    budget = Sizes(entered, entered, config.window).budget(config.retention_rate)
    if budget >= entered:
        return None
    return Retention(config.retention_rate, budget, config.window, config.pool, config.retention_policy)
