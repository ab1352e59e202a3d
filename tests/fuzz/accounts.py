"""The account of a greedy answer, field by field, against what the oracle did."""

from collections.abc import Mapping
from typing import Any

from fuzz.clients import Wrong
from fuzz.requests import Request
from fuzz.worlds import World
from oracles import combined

from fathom.runtime.config import DEFAULTS, SPECS, Policy


def in_effect(request: Request, account: Mapping[str, Any], world: World) -> dict[str, Any]:
    """What of the policy changes the answer, as the account tells it; it has to be what was asked for.

    Drafting is not among it: it changes no token.
    """
    told, asked = vars(Policy(**account["policy"])), vars(Policy(**request.policy))
    if account.get("adapter") != request.adapter:
        raise Wrong(f"the account says adapter {account.get('adapter')}, {request.adapter} was asked for")
    for name, value in ((name, asked[name]) for name in request.policy):
        tuned = SPECS[name].tunes
        idle = tuned and told[tuned] == SPECS[tuned].neutral
        whole = name == "depth_cutoff" and value == world.target.layers
        if name != "preset" and told[name] != value and not (idle or whole):
            raise Wrong(f"the account says {name} {told[name]}, {value} was asked for")
    unseen = ("speculative", "draft_tokens", "preset")
    policy = {name: v for name, v in told.items() if name not in unseen and v != DEFAULTS[name]}
    if "prefill_keep_rate" in policy:
        policy |= {name: told[name] for name in ("min_prompt_tokens", "lookahead")}
    if account["dense_fallbacks"]:
        if told["decode"] != "slow_fast":
            raise Wrong("a dense fallback of a request that decodes densely")
        policy["decode"] = "full"
    if len(request.prompt) > world.buffer:
        policy.pop("tsp_rate", None)
    return policy


def check(
    world: World,
    prompt_tokens: int,
    policy: Mapping[str, Any],
    want: combined.Answer,
    tokens: int,
    stopped: bool,
    account: Mapping[str, Any],
) -> None:
    """Of a request that was not taken back.

    Args:
        policy: as it took effect. tokens: of the answer.
        stopped: whether a token ended it; where it was drafted, steps behind it may have been counted.

    Raises:
        Wrong: with every field that is not as expected.
    """
    expected = dict(_prompt(world, prompt_tokens, policy, want))
    drafting = account["policy"]["speculative"]
    if not (stopped and drafting):
        expected |= _steps(world, policy, want, tokens)
        expected["accepted_tokens"] = tokens - 1 - account["decode_steps"]
    expected["decode_steps"] = account["slow_steps"] + account["fast_steps"]
    if not drafting:
        expected |= _memory(world, prompt_tokens, want, tokens)
    if policy.get("decode") != "slow_fast":
        expected |= {"fast_steps": 0, "compact_bytes": 0}
    elif tokens > 1:
        expected["compact_bytes"] = world.compact_bytes
    if account["policy"]["tsp_rate"] == 1 or prompt_tokens <= world.buffer:
        expected["propagation_skipped"] = False
    found = {name: account[name] for name in expected}
    wrong = [f"{name} {found[name]}, not {value}" for name, value in expected.items() if found[name] != value]
    if account["kv_bytes_peak"] < account["kv_bytes"]:
        wrong.append("kv_bytes_peak below kv_bytes")
    if account["decode_steps"] + account["accepted_tokens"] < tokens - 1:
        wrong.append("fewer steps than tokens")
    if wrong:
        raise Wrong(f"account: {'; '.join(wrong)}", expected)


def _prompt(world: World, prompt_tokens: int, policy: Mapping[str, Any], want: combined.Answer):
    """Prompt tokens that were computed and kept; means are over the spans."""
    computed, kept = [len(positions) for positions in want.sets], _kept(want)
    starts = range(0, world.target.layers, world.span)
    layer = world.tsp_layer
    selected = layer and policy.get("tsp_rate", 1) != 1 and computed[layer] < computed[layer - 1]
    return {
        "prompt_tokens": prompt_tokens,
        "kept_tokens": round(sum(computed[i] for i in starts) / len(starts)),
        "deep_tokens": computed[-1],
        "retained_tokens": round(sum(kept[i] for i in starts) / len(starts)),
        "propagated_tokens": computed[layer] if selected else None,
    }


def _steps(world: World, policy: Mapping[str, Any], want: combined.Answer, tokens: int) -> dict[str, int]:
    if policy.get("decode") != "slow_fast":
        return {}
    causes = want.causes[: tokens - 1]
    renewed = {f"{cause}_refreshes": causes.count(cause) for cause in ("trigger", "timeout")}
    return renewed | {"slow_steps": sum(want.slow[: tokens - 1])}


def _memory(world: World, prompt_tokens: int, want: combined.Answer, tokens: int) -> dict[str, int]:
    """Bytes of the pages that hold prompt and answer; the last token has none."""

    def held(count: int) -> int:
        return -(-(count + tokens - 1) // world.page) * world.page * world.target.token_bytes

    return {
        "kv_bytes": sum(held(count) for count in _kept(want)),
        "kv_bytes_dense": held(prompt_tokens) * world.target.layers,
    }


def _kept(want: combined.Answer) -> list[int]:
    """Prompt entries that each KV head of a layer keeps."""
    return [len(heads[0]) for heads in want.kept]
