"""What the cost model expects of a policy against dense Fathom, to be read beside what was measured.

The model counts FLOPs and bytes and knows neither the machine nor the kernels: it is the limit that a policy tends
to with long prompts, not a forecast of times.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from fathom.benchmarks.measure import Cell, Settings, Turn
from fathom.benchmarks.model import Shape, config_json
from fathom.benchmarks.variants import Variant
from fathom.runtime import config, cost
from fathom.runtime.plan import choose_span, choose_tsp_layer


def _policy(variant: Variant, shape: Shape) -> config.Policy:
    return config.choose(variant.policy, None, _limits(shape)).policy


def _limits(shape: Shape) -> config.Limits:
    span = choose_span(shape.layers, None)
    return config.Limits(shape.layers, span, {}, choose_tsp_layer(shape.layers, span, None) or 0)


def _draft(variant: Variant) -> cost.ModelShape | None:
    folder = variant.option("--draft-model-path")
    found = folder is not None and (file := Path(folder) / "config.json").is_file()
    return cost.ModelShape.from_config(json.loads(file.read_text())) if found else None


def check(variants: list[Variant], shape: Shape) -> None:
    """PolicyError when this build or this model cannot serve what a variant asks for: before anything starts."""
    for variant in variants:
        _policy(variant, shape)


def _slow_fast(turns: list[Turn]) -> cost.SlowFast:
    """Fast steps as the answers counted them: how many there are depends on the text."""
    reports = [reply.fathom for turn in turns for reply in turn.replies if reply.fathom]
    slow, fast = (sum(report[name] for report in reports) for name in ("slow_steps", "fast_steps"))
    return cost.SlowFast(slow_share=slow / (slow + fast)) if slow + fast else cost.SlowFast()


def _reported(turns: list[Turn]) -> float | None:
    """Dense KV bytes divided by those held, over all answers."""
    reports = [reply.fathom for turn in turns for reply in turn.replies if reply.fathom]
    held = sum(report["kv_bytes"] for report in reports)
    return sum(report["kv_bytes_dense"] for report in reports) / held if held else None


def _expected(
    variant: Variant, shape: Shape, cell: Cell, settings: Settings, turns: list[Turn]
) -> dict[str, float | None]:
    policy, draft = _policy(variant, shape), _draft(variant)
    found: dict[str, float | None] = dict.fromkeys(("ttft", "tpot", "tpot_kv", "kv"))
    if not isinstance(policy.prefill_keep_rate, str):
        slow_fast = _slow_fast(turns) if policy.decode == "slow_fast" else cost.SlowFast()
        plan = cost.policy_plan(
            policy,
            shape.layers,
            cell.prompt,
            draft=draft,
            tsp_layer=_limits(shape).tsp_layer,
            slow_fast=slow_fast,
        )
        model = cost.ModelShape.from_config(config_json(shape))
        found |= asdict(cost.predict(model, plan, settings.output, cell.batch))
        if settings.shared_prefix or (policy.prefill_keep_rate < 1 and draft is None):
            found["ttft"] = None
        if policy.speculative:
            found["tpot"] = found["tpot_kv"] = None
    return found | {"kv_reported": _reported(turns)}


def predictions(
    variants: list[Variant], shape: Shape, cell: Cell, settings: Settings, turns: list[Turn]
) -> dict[str, dict[str, float | None]]:
    """Ratios by "dense/policy", for every pair of Fathom servers of which the first drops nothing.

    Each is dense divided by policy: `ttft` by FLOPs of prefill, `tpot` by bytes that decode steps read, `tpot_kv`
    by their KV bytes alone, `kv` by KV bytes held; `kv_reported` is the latter as the answers report it. None where
    the model has no answer: TTFT with a cached prefix or a draft of unknown shape, TPOT with drafting, everything
    with a keep rate that is found per prompt.
    """
    ours = [variant for variant in variants if variant.engine == "fathom"]
    policies = [variant for variant in ours if not variant.dense]
    return {
        f"{dense.name}/{variant.name}": _expected(
            variant, shape, cell, settings, [turn for turn in turns if turn.variant == variant.name]
        )
        for dense in ours
        if dense.dense
        for variant in policies
        if ours.index(dense) < ours.index(variant)
    }
