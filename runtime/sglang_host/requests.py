"""What a request of SGLang's asks of the engine, in Fathom's terms."""

from collections.abc import Callable, Hashable, Mapping
from functools import lru_cache
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from sglang.srt.managers.schedule_batch import Req

from fathom.runtime.cache_key import CACHE_KEY_PREFIX
from fathom.runtime.config import POLICY_KEY, PROTECTED_KEY
from fathom.runtime.fastkv.step import config_of as fastkv_config
from fathom.runtime.fastkv.step import propagation_step, retention
from fathom.runtime.plan import PrefillPlan, Step, build
from fathom.runtime.sglang_host.memory.kv_pool import LAYOUT
from fathom.runtime.specprefill.config import SpecPrefillConfig
from fathom.runtime.specprefill.select import Span
from fathom.runtime.specprefill.step import config_of, step

WHOLE_KEY = "whole/"
"""In the prefix cache's key of a prompt that its policy leaves whole: others of that policy keep less KV."""
UNPROPAGATED_KEY = "unpropagated/"
"""The same, where FastKV does not select from the prompt, which then has shared KV at all layers."""
ADAPTER_KEY = "adapter/"
"""Before the id of a LoRA adapter, which SGLang puts behind the client's part of the key."""


NO_POLICY: Mapping[str, Any] = {}


def policy_of(request: Req) -> Mapping[str, Any]:
    """The validated policy a request was admitted with; empty for SGLang's internal requests (warm-up, health).

    Asked for several times in every engine step: it is the request's own, which nobody changes.
    """
    params = request.sampling_params.custom_params
    return params.get(POLICY_KEY, NO_POLICY) if isinstance(params, dict) else NO_POLICY


def protected_spans(request: Req) -> tuple[Span, ...]:
    """What a selection must keep of the prompt; what lies behind a truncated prompt's end is left out."""
    params = request.sampling_params.custom_params
    given = params.get(PROTECTED_KEY, ()) if isinstance(params, dict) else ()
    end = prompt_tokens(request)
    return tuple((start, min(stop, end)) for start, stop in given if start < end)


def specprefill_of(request: Req) -> SpecPrefillConfig:
    """The numbers of the request's policy."""
    return config_of(policy_of(request))


Found = TypeVar("Found")
_SELECTIONS: WeakKeyDictionary[Req, tuple[Hashable, Step | None]] = WeakKeyDictionary()
_PLANS: WeakKeyDictionary[Req, tuple[Hashable, PrefillPlan]] = WeakKeyDictionary()


def _kept(
    known: WeakKeyDictionary[Req, tuple[Hashable, Found]],
    request: Req,
    depends_on: Hashable,
    find: Callable[[], Found],
) -> Found:
    """What was found for a request; found anew where what it depends on is another than then."""
    entry = known.get(request)
    if entry is None or entry[0] != depends_on:
        entry = known[request] = depends_on, find()
    return entry[1]


def selection_of(request: Req) -> Step | None:
    """SpecPrefill's step of the request's prompt; None where it stays whole.

    Asked for in every engine step: what a selection must keep may be thousands of spans, one per tool result.
    """
    length = prompt_tokens(request)

    def find() -> Step | None:
        return step(specprefill_of(request), length, protected_spans(request))

    return _kept(_SELECTIONS, request, length, find)


def is_judged(request: Req) -> bool:
    """Whether the draft decides which tokens of the prompt enter the target."""
    return selection_of(request) is not None


def speculates(request: Req) -> bool:
    """Whether the request wants drafted tokens."""
    return bool(policy_of(request).get("speculative", False))


def uses_draft(request: Req) -> bool:
    """Whether the draft reads this request's tokens."""
    return speculates(request) or is_judged(request)


def alternates(request: Req) -> bool:
    """Whether the request decodes slow and fast."""
    return policy_of(request).get("decode", "full") == "slow_fast"


def penalised(request: Req) -> bool:
    """Whether what the request has said makes tokens less likely, of which SGLang keeps account on the host."""
    p = request.sampling_params
    return p.frequency_penalty != 0 or p.presence_penalty != 0 or p.repetition_penalty != 1


def decides_its_next_step(request: Req) -> bool:
    """Whether the host has to know the request's last tokens to compose its next step.

    A chunk before the last of a prompt gives none. What slow-fast decoding reads, the device decides
    (``decode_step.Ahead``).
    """
    if request.inflight_middle_chunks:
        return False
    return speculates(request) or request.beam_group is not None or penalised(request)


def ends_of(request: Req) -> frozenset[int]:
    """Token ids that end the request's answer."""
    if request.sampling_params.ignore_eos:
        return frozenset()
    ends = set(request.eos_token_ids or ()) | set(request.sampling_params.stop_token_ids or ())
    if request.tokenizer is not None:
        ends |= {request.tokenizer.eos_token_id, *(request.tokenizer.additional_stop_token_ids or ())}
    return frozenset(ends - {None})


def separate_cache_key(request: Req) -> None:
    """Keep a prompt that stays whole under a selecting policy apart from those that do not, and each adapter's.

    What says so stands before the client's own part of the key, which could say the same, and where no client's key
    may begin.
    """
    key, policy, adapter = request.extra_key or "", policy_of(request), request.lora_id or ""
    prefix = CACHE_KEY_PREFIX
    if adapter:
        prefix += f"{ADAPTER_KEY}{adapter}/"
    if specprefill_of(request).keep_rate != 1 and not is_judged(request):
        prefix += WHOLE_KEY
    if policy.get("tsp_rate", 1.0) != 1 and not _propagates(request):
        prefix += UNPROPAGATED_KEY
    if prefix != CACHE_KEY_PREFIX and not key.startswith(prefix):
        request.extra_key = prefix + key.removesuffix(adapter).removeprefix(CACHE_KEY_PREFIX)


def _propagates(request: Req) -> bool:
    """Whether FastKV selects from this prompt: it is long enough to, and short enough for the buffer."""
    selection = selection_of(request)
    entered = prompt_tokens(request) if selection is None else selection.most_kept(prompt_tokens(request))
    config = fastkv_config(policy_of(request), LAYOUT.tsp_layer)
    anchored = policy_of(request).get("depth_cutoff", "full") != "full"
    anchored = anchored and policy_of(request).get("anchors") == "bos"
    return propagation_step(config, entered, anchored) is not None and not propagation_skipped(request)


def propagation_skipped(request: Req) -> bool:
    """Whether a propagation was asked for, and the prompt is too long for its hidden states to be kept.

    Decided by the prompt's length alone, so that an answer does not depend on chunks or on other requests.
    """
    config, prompt = fastkv_config(policy_of(request), LAYOUT.tsp_layer), prompt_tokens(request)
    return prompt > LAYOUT.propagation_buffer and propagation_step(config, prompt, False) is not None


@lru_cache(maxsize=4096)
def _plan(
    policy: tuple[tuple[str, Any], ...],
    layers: int,
    span: int,
    prompt: int,
    selection: Step | None,
    propagates: bool,
) -> PrefillPlan:
    fields = dict(policy)
    entering, fastkv = (
        build(fields, layers, span, [lambda *_: selection]),
        fastkv_config(fields, LAYOUT.tsp_layer),
    )
    entered = prompt if selection is None else selection.most_kept(prompt)
    propagation = propagation_step(fastkv, entered, entering.anchored_above(1)) if propagates else None
    builders = [lambda *_: selection, lambda *_: propagation]
    return build(fields, layers, span, builders, retention(fastkv, entered))


def plan_of(request: Req, layers: int, span: int) -> PrefillPlan:
    """The request's prefill plan for a model of ``layers`` layers cut into spans of ``span``."""
    length = prompt_tokens(request)

    def find() -> PrefillPlan:
        fields = tuple(sorted(policy_of(request).items()))
        selection, propagates = selection_of(request), not propagation_skipped(request)
        return _plan(fields, layers, span, length, selection, propagates)

    return _kept(_PLANS, request, (length, layers, span), find)


def prompt_tokens(request: Req) -> int:
    """Length of the prompt; what a retracted request has generated so far is not prompt."""
    return len(request.origin_input_ids)
