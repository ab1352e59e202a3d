"""The per-request policy: what may be asked for, by whom it is defined, and what is legal.

Every field carries one :class:`Spec`. Nothing here imports the engine: the HTTP face and the scheduler both
read it.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple, NoReturn

from fathom.runtime.fastkv.policies import RETENTION_POLICIES, propagation_problem
from fathom.runtime.presets import EXACT, PRESETS, Presets, boundary
from fathom.runtime.sfi.rules import SELECTION_RULES
from fathom.runtime.spec import Spec
from fathom.runtime.specprefill.config import PROTECTABLE, PROTECTED

MECHANISMS: frozenset[str] = frozenset({"SPEED", "FastKV", "SFI", "SpecPrefill", "drafting"})
"""Mechanisms this build can run. A policy that asks for another one is refused, never ignored."""

DRAFTED = ("SpecPrefill", "drafting")
"""Mechanisms that need a draft model."""

MOST_DRAFTED = 16
"""Tokens that one step drafts for a request at most."""

CUSTOM = "custom"
"""Reported as the preset of a policy whose values are no preset's. Not accepted in a request."""

POLICY_KEY = "fathom"
"""Member of ``custom_params`` that holds a policy, and of an answer's ``meta_info`` that holds the account."""

PROTECTED_KEY = "fathom_protected"
"""Member of ``custom_params`` that holds ``[[start, stop], ...]``, tokens that a selection must keep."""


class PolicyError(ValueError):
    """An illegal policy. The message names the field, the value given and what is legal.

    Attributes:
        field: name of the offending field, or "" when the whole object is at fault.
    """

    def __init__(self, message: str, name: str = ""):
        super().__init__(message)
        self.field = name

    @property
    def reason(self) -> str:
        """The message without the field, the value and what is legal."""
        return str(self).removeprefix(f"fathom.{self.field}").lstrip(": ").split("; legal")[0]


@dataclass(frozen=True)
class Limits:
    """What the served model allows.

    Attributes:
        layers: number of transformer layers, or None while no model is loaded.
        span: consecutive layers that share one page table; a cutoff must be a multiple of it.
        lacking: mechanisms of this build that the served model or machine cannot run, each with the reason.
        tsp_layer: layers below FastKV's selection; 0 where the layers have no boundary for it, None while unknown.
        sfi_selected: entries per KV head that a compact buffer of SFI's has room for beside the sink.
        presets: what each preset asks for; a model's profile may bring its own numbers.
    """

    layers: int | None = None
    span: int = 1
    lacking: Mapping[str, str] = field(default_factory=dict)
    tsp_layer: int | None = None
    sfi_selected: int | None = None
    presets: Presets = field(default_factory=lambda: PRESETS)

    def why_not(self, mechanism: str) -> str | None:
        """Why a mechanism cannot be asked for; None when it can."""
        if mechanism not in MECHANISMS:
            return f"{mechanism} is not available in this build"
        reason = self.lacking.get(mechanism)
        return f"{mechanism} is not available here ({reason})" if reason else None


def without_draft() -> dict[str, str]:
    """What a server without a draft model lacks, with the reason."""
    return dict.fromkeys(DRAFTED, "no draft model is loaded; start with --draft-model-path")


def _field(default: Any, **spec: Any) -> Any:
    return field(default=default, metadata={"spec": Spec(**spec)})


@dataclass(frozen=True)
class Policy:
    """What one request asks of the engine. The defaults are the exact policy: nothing is dropped."""

    preset: str = _field(
        "exact",
        help="named set of values, refined by the other fields",
        unit="name",
        source="exact: same tokens as the unmodified model",
        words=tuple(PRESETS),
    )
    prefill_keep_rate: float | str = _field(
        1.0,
        help="share of prompt chunks that enter the model",
        unit="fraction of chunks",
        source="SpecPrefill, section 3.2.3",
        kind=float,
        high=1,
        words=("auto",),
        mechanism="SpecPrefill",
        neutral=1.0,
    )
    lookahead: int = _field(
        8,
        help="tokens the draft decodes to judge which prompt tokens matter",
        unit="tokens",
        source="SpecPrefill, section 3.2.1",
        kind=int,
        low=1,
        high=64,
        mechanism="SpecPrefill",
        tunes="prefill_keep_rate",
    )
    min_prompt_tokens: int = _field(
        4096,
        help="shorter prompts are left whole",
        unit="tokens",
        source="SpecPrefill, section 4.6, shows what short prompts lose",
        kind=int,
        low=0,
        high=1 << 30,
        mechanism="SpecPrefill",
        tunes="prefill_keep_rate",
    )
    prefill_selection: str = _field(
        "attention",
        help="how the kept prompt chunks are chosen (random is the control)",
        unit="rule",
        source="SpecPrefill, section 3.2",
        words=("attention", "random"),
        mechanism="SpecPrefill",
        tunes="prefill_keep_rate",
    )
    prefill_protect: tuple[str, ...] = _field(
        PROTECTED,
        help="what of a conversation always enters the model",
        unit="kinds of text",
        source="not in the paper",
        words=PROTECTABLE,
        mechanism="SpecPrefill",
        tunes="prefill_keep_rate",
        several=True,
    )
    depth_cutoff: int | str = _field(
        "full",
        help="layer above which prompt tokens do not exist; a model not trained for it loses answers at small ones",
        unit="layers",
        source="SPEED, Table 1",
        kind=int,
        low=1,
        words=("full",),
        mechanism="SPEED",
        neutral="full",
    )
    anchors: str = _field(
        "bos",
        help="prompt tokens that are kept above the cutoff, beside the last one",
        unit="set of tokens",
        source="SPEED, Table 1",
        words=("bos", "none"),
        mechanism="SPEED",
        tunes="depth_cutoff",
    )
    tsp_rate: float = _field(
        1.0,
        help="share of tokens that are propagated above the selection layer",
        unit="fraction of tokens",
        source="FastKV, section 4.2",
        kind=float,
        high=1,
        mechanism="FastKV",
        neutral=1.0,
    )
    kv_retention_rate: float = _field(
        1.0,
        help="share of prompt KV entries that each KV head keeps after prefill",
        unit="fraction of entries",
        source="FastKV, section 4.4",
        kind=float,
        high=1,
        mechanism="FastKV",
        neutral=1.0,
    )
    retention_policy: str = _field(
        "saliency",
        help="how the kept KV entries are chosen (random is the control)",
        unit="rule",
        source="FastKV, section 4.4",
        words=tuple(RETENTION_POLICIES),
        mechanism="FastKV",
        tunes="kv_retention_rate",
    )
    decode: str = _field(
        "full",
        help="what a decode step reads: everything, or a selection between dense steps",
        unit="schedule",
        source="SFI, Algorithm 1",
        words=("slow_fast", "full"),
        mechanism="SFI",
        neutral="full",
    )
    sfi_selection: str = _field(
        "fused",
        help="how the entries that fast steps read are chosen (the others are controls)",
        unit="rule",
        source="SFI, Algorithm 2",
        words=SELECTION_RULES,
        mechanism="SFI",
        tunes="decode",
    )
    sfi_budget: int | str = _field(
        "server",
        help="entries chosen per KV head at most; server is --sfi-selected",
        unit="tokens",
        source="SFI, section 5.1",
        kind=int,
        low=1,
        bound="sfi_selected",
        words=("server",),
        mechanism="SFI",
        tunes="decode",
    )
    sfi_window: int | str = _field(
        "server",
        help="last tokens that every fast step reads; server is --sfi-recent",
        unit="tokens",
        source="SFI, section 5.1",
        kind=int,
        low=1,
        high=1 << 30,
        words=("server",),
        mechanism="SFI",
        tunes="decode",
    )
    speculative: bool = _field(
        False,
        help="draft tokens with the draft model and verify them",
        unit="switch",
        source="speculative decoding with exact verification",
        kind=bool,
        mechanism="drafting",
        neutral=False,
    )
    draft_tokens: int = _field(
        4,
        help="tokens to draft per step at most; fewer while few are accepted",
        unit="tokens",
        source="speculative decoding with exact verification",
        kind=int,
        low=1,
        high=MOST_DRAFTED,
        mechanism="drafting",
        tunes="speculative",
    )

    def __post_init__(self) -> None:
        in_order = tuple(kind for kind in PROTECTABLE if kind in self.prefill_protect)
        object.__setattr__(self, "prefill_protect", in_order)

    def canonical(self) -> "Policy":
        """This policy with fields that can have no effect at their defaults."""
        idle = {
            name: DEFAULTS[name]
            for name, spec in SPECS.items()
            if spec.tunes and getattr(self, spec.tunes) == SPECS[spec.tunes].neutral
        }
        floats = [name for name, spec in SPECS.items() if spec.kind is float]
        numbers = {n: float(v) for n in floats if not isinstance(v := getattr(self, n), str)}
        return replace(self, **numbers | idle)

    def _values(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in SPECS if name != "preset"}

    @property
    def dropping(self) -> dict[str, Any]:
        """The values by which some prompt token may not be computed at some layer."""
        names = ("prefill_keep_rate", "depth_cutoff", "tsp_rate")
        return {name: value for name, value in self.differences().items() if name in names}

    @property
    def drops_tokens(self) -> bool:
        """Whether some prompt token may not be computed at some layer."""
        return bool(self.dropping)

    def differences(self) -> dict[str, Any]:
        """The values that are not the fields' defaults."""
        return {name: value for name, value in self._values().items() if value != DEFAULTS[name]}

    def fingerprint(self) -> str:
        """A short name of what decides the KV that a prompt leaves behind: part of the prefix cache's key.

        What a request keeps of its prompt (its own copies), how decode steps read, and how many tokens are drafted,
        changes nothing in it.
        """
        later = [name for name, spec in SPECS.items() if spec.mechanism == "SFI"]
        later += ["kv_retention_rate", "retention_policy", "draft_tokens"]
        prefill = replace(self, **{name: DEFAULTS[name] for name in later})
        if not prefill.differences():
            return EXACT
        text = json.dumps(prefill._values(), sort_keys=True)
        return hashlib.blake2s(text.encode(), digest_size=8).hexdigest()

    def to_wire(self) -> dict[str, str | int | float | bool | tuple[str, ...]]:
        """The policy as an object that JSON can say; its values are hashable."""
        return {"preset": self.preset} | self._values()


SPECS: dict[str, Spec] = {item.name: item.metadata["spec"] for item in fields(Policy)}
DEFAULTS: dict[str, Any] = {item.name: item.default for item in fields(Policy)}


def _shown(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "..."


def _illegal(name: str, value: Any, limits: Limits) -> PolicyError:
    return PolicyError(f"fathom.{name} must be {SPECS[name].legal(limits)}, got {_shown(value)}", name)


def _check(values: Mapping[str, Any], limits: Limits) -> None:
    for name, value in values.items():
        if not SPECS[name].accepts(value, limits):
            raise _illegal(name, value, limits)


def _possible(policy: Policy, limits: Limits) -> Policy:
    """A policy that this build can run on this model.

    Raises:
        PolicyError: when a value is out of the model's range, or asks for what is not there.
    """
    _check(policy._values(), limits)
    cutoff = policy.depth_cutoff
    if cutoff == limits.layers:
        policy = replace(policy, depth_cutoff="full")
    elif isinstance(cutoff, int) and cutoff % limits.span:
        _raise_off_span(cutoff, limits)
    for name, value in policy._values().items():
        spec = SPECS[name]
        if spec.mechanism and not spec.tunes and value != spec.neutral:
            reason = limits.why_not(spec.mechanism)
            if reason:
                legal = f"legal: {_shown(spec.neutral)}, got {_shown(value)}"
                raise PolicyError(f"fathom.{name}: {reason}; {legal}", name)
    if policy.tsp_rate != 1 and (problem := propagation_problem(policy.depth_cutoff, limits.tsp_layer)):
        raise PolicyError(f"fathom.tsp_rate {problem}; got {_shown(policy.tsp_rate)}", "tsp_rate")
    return policy


def _raise_off_span(cutoff: int, limits: Limits) -> NoReturn:
    below = cutoff - cutoff % limits.span
    nearest = [str(value) for value in (below, below + limits.span) if value >= limits.span]
    message = f"fathom.depth_cutoff must be a multiple of {limits.span} layers, got {cutoff}; nearest: "
    raise PolicyError(message + ", ".join(nearest), "depth_cutoff")


class Choice(NamedTuple):
    """The policy of a request.

    Attributes:
        policy: what it runs under, in canonical form.
        left_out: fields that its preset would have filled, each with the reason why it could not.
    """

    policy: Policy
    left_out: dict[str, str]


def choose(
    request: Any,
    asked: Mapping[str, Any] | None = None,
    limits: Limits = Limits(),
    tunings: Mapping[str, Any] | None = None,
) -> Choice:
    """The policy that a request's ``fathom`` object asks for, on top of what the operator asked for.

    A value that is given must be possible. A preset fills the fields that are left open, as far as that is possible
    on this server and together with the values that are given.

    Args:
        request: the object as decoded from JSON; None asks for nothing.
        asked: the operator's fields, which apply where the object names no preset and no value.
        limits: what the served model allows.
        tunings: the operator's values of fields that only refine another one, for requests that give none.

    Raises:
        PolicyError: for anything but an object with known fields and legal values.
    """
    request = {} if request is None else request
    if not isinstance(request, Mapping):
        raise PolicyError(f"fathom must be an object, got {_shown(request)}")
    for name in request:
        if name not in SPECS:
            unknown, legal = str(name)[:60], ", ".join(SPECS)
            raise PolicyError(f"fathom.{unknown} is not a policy field; legal fields: {legal}", unknown)
    _check(request, limits)
    given = dict(request) if "preset" in request else {**(asked or {}), **request}
    name = given.pop("preset", EXACT)
    choice = _fill(name, given, limits, tunings or {})
    return Choice(_named(choice.policy, name, limits, tunings or {}), choice.left_out)


def _fill(preset: str, given: Mapping[str, Any], limits: Limits, tunings: Mapping[str, Any]) -> Choice:
    policy, left_out = _possible(replace(Policy(), **{**tunings, **given}), limits), {}
    for name, value in limits.presets[preset].items():
        if name in given:
            continue
        try:
            policy = _possible(replace(policy, **{name: _in_layers(name, value, limits)}), limits)
        except PolicyError as error:
            left_out[name] = error.reason
    return Choice(policy.canonical(), left_out)


def _in_layers(name: str, value: Any, limits: Limits) -> Any:
    """A share of the layers as a layer; other values as they are."""
    if name != "depth_cutoff" or not isinstance(value, float):
        return value
    if limits.layers is None:
        return SPECS[name].neutral  # not known yet: the operator's preset is looked at again with the model
    layer = boundary(value, limits.layers, limits.span)
    if layer is None:
        raise PolicyError(f"fathom.{name}: the model's layers have no boundary between spans", name)
    return layer


def _named(policy: Policy, asked: str, limits: Limits, tunings: Mapping[str, Any]) -> Policy:
    """The policy under the name of the preset that it is: exact where it asks for nothing, custom for none."""
    for name in dict.fromkeys((EXACT, asked, *limits.presets)):
        if _fill(name, {}, limits, tunings).policy._values() == policy._values():
            return replace(policy, preset=name)
    return replace(policy, preset=CUSTOM)


def json_schema() -> dict[str, Any]:
    """JSON Schema of a request's ``fathom`` object."""
    properties = {name: spec.schema() | {"default": DEFAULTS[name]} for name, spec in SPECS.items()}
    return {"type": "object", "additionalProperties": False, "properties": properties}


def describe(limits: Limits = Limits()) -> dict[str, dict[str, Any]]:
    """Every field's meaning, range, unit, source, default, and whether it can be asked for."""
    return {
        name: {
            "help": spec.help,
            "legal": spec.legal(limits),
            "default": DEFAULTS[name],
            "unit": spec.unit,
            "source": spec.source,
            "mechanism": spec.mechanism,
            "available": spec.mechanism is None or limits.why_not(spec.mechanism) is None,
        }
        for name, spec in SPECS.items()
    }


def describe_presets(limits: Limits = Limits(), tunings: Mapping[str, Any] | None = None) -> dict[str, dict]:
    """What each preset comes to on this server: the values it sets, and what it has to leave out."""
    found = {name: _fill(name, {}, limits, tunings or {}) for name in limits.presets}
    return {
        name: {"values": choice.policy.differences(), "left_out": choice.left_out}
        for name, choice in found.items()
    }
