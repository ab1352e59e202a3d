"""What the cost model expects of a policy against dense Fathom, to be read beside what was measured.

The model counts FLOPs and bytes and knows neither the machine nor the kernels: it is the limit that a policy tends
to with long prompts, not a forecast of times.
"""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

from fathom.benchmarks.measure import Turn
from fathom.benchmarks.model import Shape, config_json
from fathom.benchmarks.prompts import Cell, Settings
from fathom.benchmarks.variants import Variant
from fathom.runtime import config, cost
from fathom.runtime.plan import choose_span, choose_tsp_layer


def _policy(variant: Variant, shape: Shape, turns: list[Turn] | None = None) -> config.Policy:
    """What a variant asks for, as its server has understood it where there are answers."""
    accounts = (reply.fathom for turn in turns or [] for reply in turn.replies if reply.fathom)
    served = next((account["policy"] for account in accounts if "policy" in account), variant.policy)
    fields = {name: value for name, value in served.items() if name != "preset" or served is variant.policy}
    return config.choose(fields, None, _limits(variant, shape)).policy


def _limits(variant: Variant, shape: Shape) -> config.Limits:
    span = choose_span(shape.layers, _number(variant, "--depth-span"))
    tsp_layer = choose_tsp_layer(shape.layers, span, _number(variant, "--tsp-layer"))
    return config.Limits(shape.layers, span, {}, tsp_layer or 0)


def _number(variant: Variant, flag: str) -> int | None:
    value = variant.option(flag)
    return None if value is None else int(value)


def _draft(variant: Variant) -> cost.ModelShape | None:
    folder = variant.option("--draft-model-path")
    found = folder is not None and (file := Path(folder) / "config.json").is_file()
    return cost.ModelShape.from_config(json.loads(file.read_text())) if found else None


def check(variants: list[Variant], shape: Shape) -> None:
    """PolicyError when this build or this model cannot serve what a variant asks for: before anything starts."""
    for variant in variants:
        _policy(variant, shape)


def appendix_e(target: cost.ModelShape, draft: cost.ModelShape, rate: float, prompt: int) -> float:
    """Dense over SpecPrefill, time to first token: FLOPs(base) / (FLOPs(spec) + rate * FLOPs(base)).

    SpecPrefill, appendix E, with FLOPs counted as in its Table 5: attention without the causal half, the LM head on
    every prompt token. It takes `rate` as the share of all of the target's work; in the cost model attention
    falls with the square of the kept tokens and counts causally, the head once.
    """
    base, spec = _table_5(target, prompt), _table_5(draft, prompt)
    return base / (spec + rate * base)


def _table_5(shape: cost.ModelShape, prompt: int) -> float:
    return cost.prefill_flops(shape, cost.make_plan(shape.layers, prompt), cost.SPECPREFILL_TABLE_5)


def draft_shares(target: cost.ModelShape, draft: cost.ModelShape, prompt: int) -> dict[str, float]:
    """FLOPs of the target's prefill over the draft's: as computed here, and as Table 5 counts them."""
    whole, part = (
        cost.prefill_flops(shape, cost.make_plan(shape.layers, prompt), cost.SERVED)
        for shape in (target, draft)
    )
    return {"computed": whole / part, "table_5": _table_5(target, prompt) / _table_5(draft, prompt)}


def shares_of(variants: list[Variant], shape: Shape, cells: list[Cell]) -> dict[str, dict[str, float]]:
    """:func:`draft_shares` by prompt length; empty without a draft of known shape."""
    drafts = [draft for variant in variants if (draft := _draft(variant)) is not None]
    target = cost.ModelShape.from_config(config_json(shape))
    lengths = sorted({cell.prompt for cell in cells}) if drafts else []
    return {str(length): draft_shares(target, drafts[0], length) for length in lengths}


def _counts(turns: list[Turn], *names: str) -> list[float]:
    """Sums over all answers that have an account."""
    reports = [reply.fathom for turn in turns for reply in turn.replies if reply.fathom]
    return [sum(report.get(name, 0) for report in reports) for name in names]


def _slow_fast(variant: Variant, policy: config.Policy, turns: list[Turn]) -> cost.SlowFast:
    """Fast steps as the answers counted them: how many there are depends on the text."""
    slow, fast = _counts(turns, "slow_steps", "fast_steps")
    found = cost.SlowFast(slow_share=slow / (slow + fast)) if slow + fast else cost.SlowFast()
    sizes = {name: _number(variant, f"--sfi-{name}") for name in ("sink", "recent", "selected")}
    found = replace(found, **{name: size for name, size in sizes.items() if size is not None})
    for name, field in (("sfi_budget", "selected"), ("sfi_window", "recent")):
        if isinstance(value := getattr(policy, name, None), int):
            found = replace(found, **{field: value})
    return found


def _scoring(turns: list[Turn]) -> float | None:
    """FastKV's scoring as a share of the time until the last first token of each turn; None without any."""
    spent = _counts(turns, "scoring_seconds")[0]
    return spent / sum(max(reply.ttft for reply in turn.replies) for turn in turns) if spent else None


def _counted(turns: list[Turn], settings: Settings) -> dict[str, float | None]:
    """What the answers' accounts say of the steps."""
    slow, fast, drafted, stood = _counts(turns, "slow_steps", "fast_steps", "draft_tokens", "accepted_tokens")
    whole, quick = _counts(turns, "decode_seconds", "fast_seconds")
    return {
        "kv_reported": _reported(turns),
        "scoring": None if settings.cached else _scoring(turns),
        "slow_share": slow / (slow + fast) if fast else None,
        "accepted": stood / drafted if drafted else None,
        "fast_seconds": quick / fast if fast else None,
        "slow_seconds": (whole - quick) / slow if slow and whole else None,
    }


def _reported(turns: list[Turn]) -> float | None:
    """Dense KV bytes divided by those held, over all answers."""
    reports = [reply.fathom for turn in turns for reply in turn.replies if reply.fathom]
    held = sum(report["kv_bytes"] for report in reports)
    return sum(report["kv_bytes_dense"] for report in reports) / held if held else None


def _expected(
    variant: Variant, shape: Shape, cell: Cell, settings: Settings, turns: list[Turn]
) -> dict[str, float | None]:
    policy, draft = _policy(variant, shape, turns), _draft(variant)
    found: dict[str, float | None] = dict.fromkeys(("ttft", "appendix_e", "tpot", "tpot_kv", "kv"))
    rate = policy.prefill_keep_rate
    if not isinstance(rate, str) and not settings.task:
        slow_fast = _slow_fast(variant, policy, turns) if policy.decode == "slow_fast" else cost.SlowFast()
        plan = cost.policy_plan(
            policy,
            shape.layers,
            cell.prompt,
            draft=draft,
            tsp_layer=_limits(variant, shape).tsp_layer,
            slow_fast=slow_fast,
        )
        model = cost.ModelShape.from_config(config_json(shape))
        found |= asdict(cost.predict(model, plan, settings.output, cell.batch))
        if settings.cached or (rate < 1 and draft is None):
            found["ttft"] = None
        elif rate < 1 and draft is not None and plan.computed[0] < cell.prompt:
            found["appendix_e"] = appendix_e(model, draft, rate, cell.prompt)
        if policy.speculative:
            found["tpot"] = found["tpot_kv"] = None
    return found | _counted(turns, settings)


def predictions(
    variants: list[Variant], shape: Shape, cell: Cell, settings: Settings, turns: list[Turn]
) -> dict[str, dict[str, float | None]]:
    """Ratios by "dense/policy", for every pair of Fathom servers of which the first drops nothing.

    Each is dense divided by policy: `ttft` by FLOPs of prefill, `appendix_e` by SpecPrefill's formula, `tpot` by
    bytes that decode steps read, `tpot_kv` by their KV bytes alone, `kv` by KV bytes held; `kv_reported` is that as
    the answers report it. None where the model has none: TTFT with a cached prefix or a draft of unknown shape,
    TPOT with drafting, everything with a keep rate that is found per prompt and for a trained model's answers.

    From the answers' accounts, None where there is nothing: the shares of FastKV's `scoring` in the time to first
    token, of slow steps (`slow_share`) and of drafted tokens that stood (`accepted`); seconds of a fast step and of
    another one.
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
