"""A policy, and a schema, put into SGLang's request; and what cannot be had under a policy."""

import copy
import itertools
import json
from collections.abc import Sequence
from typing import Any

from sglang.srt.managers.io_struct import GenerateReqInput

from fathom.runtime import config
from fathom.runtime.cache_key import cache_key
from fathom.runtime.config import POLICY_KEY, PROTECTED_KEY, Policy


def constrain(obj: GenerateReqInput, json_schema: str) -> None:
    """Let a message's answer be of a JSON schema that its route does not read.

    Raises:
        ValueError: when its tools ask for another form.
    """
    sampling = dict(obj.sampling_params or {})
    if any(sampling.get(name) for name in ("json_schema", "structural_tag", "regex", "ebnf")):
        raise ValueError("output_config.format cannot be had together with tools that must be called")
    obj.sampling_params = sampling | {"json_schema": json_schema}


def refuse_prompt_outputs(obj: GenerateReqInput, policy: Policy) -> None:
    """Refuse outputs for prompt tokens under a policy that does not compute them all, and beams under most.

    Raises:
        ValueError: naming what was asked for.
    """
    beams = any((item.get("beam_width") or 1) > 1 for item in _listed(obj.sampling_params or {}))
    if beams and (policy.drops_tokens or policy.kv_retention_rate != 1):
        raise ValueError("beam search cannot be had under a policy that drops prompt tokens or their KV")
    if beams and policy.decode == "slow_fast":
        raise ValueError("beam search cannot be had together with decode slow_fast")
    if not policy.drops_tokens:
        return
    asked, starts = _listed(obj.return_logprob), _listed(obj.logprob_start_len)
    each_its_own = len(asked) == len(starts)
    prompts = zip(asked, starts, strict=True) if each_its_own else itertools.product(asked, starts)
    if any(wanted and start is not None and start >= 0 for wanted, start in prompts):
        raise ValueError(_not_with("log-probabilities of the prompt", policy))
    if any(_listed(obj.return_hidden_states)):
        raise ValueError(_not_with("hidden states", policy))


def _listed(value: Any) -> list[Any]:
    """What each prompt of several has of its own, or what all have."""
    return value if isinstance(value, list) else [value]


def _not_with(what: str, policy: Policy) -> str:
    values = " and ".join(f"fathom.{name} {json.dumps(value)}" for name, value in policy.dropping.items())
    legal = ", ".join(f'"{name}": {json.dumps(config.DEFAULTS[name])}' for name in policy.dropping)
    return (
        f"{what} cannot be had under a policy that drops prompt tokens, by {values}; legal with them: {legal}"
    )


def apply_policy(obj: GenerateReqInput, policy: Policy, protected: Sequence[tuple[int, int]] = ()) -> None:
    """Write the policy into the request's sampling parameters and its cache key.

    Args:
        protected: token ranges of the prompt that a selection must keep.

    Raises:
        ValueError: for ``custom_params`` that are no object, and for a reserved ``extra_key``.
    """
    sampling = obj.sampling_params
    if isinstance(sampling, list):
        obj.sampling_params = [_with_policy(item, policy, protected) for item in sampling]
    else:
        obj.sampling_params = _with_policy(sampling, policy, protected)
    if isinstance(obj.extra_key, list):
        obj.extra_key = [cache_key(key, policy) for key in obj.extra_key]
    else:
        obj.extra_key = cache_key(obj.extra_key, policy)


def _with_policy(
    sampling: dict[str, Any] | None, policy: Policy, protected: Sequence[tuple[int, int]]
) -> dict[str, Any]:
    sampling = copy.copy(sampling) or {}
    custom = sampling.get("custom_params")
    if custom is not None and not isinstance(custom, dict):
        raise ValueError("custom_params must be an object")
    sampling["custom_params"] = {**(custom or {}), POLICY_KEY: policy.to_wire()}
    if protected:
        sampling["custom_params"][PROTECTED_KEY] = [list(span) for span in protected]
    return sampling
