"""The ``fathom`` objects of requests, drawn at random: legal ones, and ones with a value that is not."""

import random
from typing import Any

from fuzz.worlds import World

DROPPING = ("prefill_keep_rate", "min_prompt_tokens", "lookahead", "prefill_selection", "prefill_protect")
DROPPING += ("depth_cutoff", "anchors", "tsp_rate")
"""Fields of mechanisms that drop prompt tokens, with which prompt log-probabilities are refused."""
UNUSED = "bogus"
"""A field that no policy has."""


def draw(rng: random.Random, world: World) -> dict[str, Any]:
    """A legal policy; each mechanism with a chance that is drawn first, so that many and few meet."""
    policy: dict[str, Any] = {}
    chance = rng.choice([0.2, 0.4, 0.7, 0.9])
    if world.own_default and rng.random() < 0.6:
        policy["preset"] = "exact"
    if world.draft and rng.random() < chance:
        policy |= _specprefill(rng)
    if rng.random() < chance:
        policy["depth_cutoff"] = rng.randrange(world.span, world.target.layers + 1, world.span)
        if rng.random() < 0.4:
            policy["anchors"] = "none"
    if rng.random() < chance:
        policy |= _fastkv(rng, world, policy.get("depth_cutoff", world.target.layers))
    if rng.random() < chance:
        policy |= _slow_fast(rng, world)
    if world.draft and rng.random() < chance:
        policy["speculative"] = True
        if rng.random() < 0.6:
            policy["draft_tokens"] = rng.choice([1, 2, 4, 8, 16])
    return policy


def _specprefill(rng: random.Random) -> dict[str, Any]:
    policy = {
        "prefill_keep_rate": rng.choice([0.05, 0.1, 0.3, 0.5, 0.7, 0.9, 0.99, "auto"]),
        "min_prompt_tokens": rng.choice([0, 1, 33, 64, 100]),
    }
    if rng.random() < 0.7:
        policy["lookahead"] = rng.choice([1, 2, 3, 8, 20, 64])
    if rng.random() < 0.1:
        policy["prefill_selection"] = "random"
    return policy


def _fastkv(rng: random.Random, world: World, cutoff: int) -> dict[str, Any]:
    policy: dict[str, Any] = {}
    if world.tsp_layer and cutoff > world.tsp_layer and rng.random() < 0.7:
        policy["tsp_rate"] = rng.choice([0.01, 0.1, 0.2, 0.4, 0.5, 0.9, 0.999])
    if rng.random() < 0.8:
        policy["kv_retention_rate"] = rng.choice([0.001, 0.1, 0.2, 0.3, 0.5, 0.9, 0.999])
        if rng.random() < 0.35:
            policy["retention_policy"] = rng.choice(["streaming", "streaming", "random"])
    return policy


def _slow_fast(rng: random.Random, world: World) -> dict[str, Any]:
    policy: dict[str, Any] = {"decode": "slow_fast"}
    if rng.random() < 0.35:
        policy["sfi_selection"] = rng.choice(["frozen", "random", "none"])
    if rng.random() < 0.3:
        policy["sfi_budget"] = rng.randint(1, world.settings.k)
    if rng.random() < 0.3:
        policy["sfi_window"] = rng.choice([1, 3, 20, 100])
    return policy


def preset(rng: random.Random, world: World) -> dict[str, Any]:
    """A preset's name, now and then with values of its own beside it."""
    beside = draw(rng, world) if rng.random() < 0.3 else {}
    if "tsp_rate" not in beside:  # the preset's own selection may lie above this cutoff
        beside = {name: value for name, value in beside.items() if name not in ("depth_cutoff", "anchors")}
    return beside | {"preset": rng.choice(["exact", "turbo", "balanced", "conversation"])}


def without_dropping(policy: dict[str, Any], world: World) -> dict[str, Any]:
    """The policy as it goes with the prompt's log-probabilities."""
    kept = {name: value for name, value in policy.items() if name not in DROPPING}
    return {"preset": "exact"} | kept if world.own_default else kept


def illegal(rng: random.Random, world: World) -> tuple[dict[str, Any], str]:
    """A policy with one illegal value, and the field that has it."""
    layers = world.target.layers
    values: list[tuple[str, list[Any]]] = [
        ("depth_cutoff", [0, -1, layers + 1, 1.5, "deep", True]),
        ("anchors", ["x"]),
        ("tsp_rate", [0, 1.01, 5, "0.5"]),
        ("kv_retention_rate", [-0.1, None, [0.5]]),
        ("retention_policy", ["x"]),
        ("decode", ["fast"]),
        ("sfi_budget", [0, world.settings.k + 1]),
        ("sfi_window", [0, 2.5]),
        ("sfi_selection", ["x"]),
        ("speculative", [1, "yes"]),
        ("draft_tokens", [0, 17]),
        ("prefill_keep_rate", [0, 2, "all"]),
        ("lookahead", [0, 65]),
        ("min_prompt_tokens", [-1]),
        ("preset", ["x"]),
        (UNUSED, [1]),
    ]
    if world.span > 1:
        values[0][1].append(world.span + 1 if world.span < layers else 1)
    field, wrong = rng.choice([(name, value) for name, several in values for value in several])
    beside = draw(rng, world) if rng.random() < 0.3 else {}
    return beside | {field: wrong}, field
