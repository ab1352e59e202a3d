"""What a request of SGLang's asks of the engine, in Fathom's terms."""

from functools import lru_cache
from typing import Any

from sglang.srt.managers.schedule_batch import Req

from fathom.runtime.plan import PrefillPlan, build

POLICY_KEY = "fathom"  # in SamplingParams.custom_params


def policy_of(request: Req) -> dict[str, Any]:
    """The validated policy a request was admitted with; empty for SGLang's internal requests (warm-up, health)."""
    params = request.sampling_params.custom_params
    return dict(params.get(POLICY_KEY, {})) if isinstance(params, dict) else {}


@lru_cache(maxsize=4096)
def _plan(policy: tuple[tuple[str, Any], ...], layers: int, span: int) -> PrefillPlan:
    return build(dict(policy), layers, span)


def plan_of(request: Req, layers: int, span: int) -> PrefillPlan:
    """The request's prefill plan for a model of ``layers`` layers cut into spans of ``span``."""
    return _plan(tuple(sorted(policy_of(request).items())), layers, span)


def prompt_tokens(request: Req) -> int:
    """Length of the prompt; what a retracted request has generated so far is not prompt."""
    return len(request.origin_input_ids)
