"""The per-request policy: what may be asked for, by whom it is defined, and what is legal.

Every field carries one :class:`Spec`. Validation, error messages, the JSON schema, the command-line flags and
their help all come from it. Nothing here imports the engine: the HTTP face and the scheduler both read it.
"""

import argparse
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, NoReturn

from fathom.runtime.fastkv.policies import RETENTION_POLICIES, propagation_problem
from fathom.runtime.sfi.rules import SELECTION_RULES
from fathom.runtime.spec import Spec

MECHANISMS: frozenset[str] = frozenset({"SPEED", "FastKV", "SFI", "SpecPrefill", "drafting"})
"""Mechanisms this build can run. A policy that asks for another one is refused, never ignored."""

DRAFTED = ("SpecPrefill", "drafting")
"""Mechanisms that need a draft model."""

PRESETS: dict[str, dict[str, Any]] = {"exact": {}}
"""Presets this build can run: field values that differ from the defaults."""

CUSTOM = "custom"
"""Reported as the preset of a policy whose values are no preset's. Not accepted in a request."""


class PolicyError(ValueError):
    """An illegal policy. The message names the field, the value given and what is legal.

    Attributes:
        field: name of the offending field, or "" when the whole object is at fault.
    """

    def __init__(self, message: str, name: str = ""):
        super().__init__(message)
        self.field = name


@dataclass(frozen=True)
class Limits:
    """What the served model allows.

    Attributes:
        layers: number of transformer layers, or None while no model is loaded.
        span: consecutive layers that share one page table; a cutoff must be a multiple of it.
        lacking: mechanisms of this build that the served model or machine cannot run, each with the reason.
        tsp_layer: layers below FastKV's selection; 0 where the layers have no boundary for it, None while unknown.
        sfi_selected: entries per KV head that a compact buffer of SFI's has room for beside the sink.
    """

    layers: int | None = None
    span: int = 1
    lacking: Mapping[str, str] = field(default_factory=dict)
    tsp_layer: int | None = None
    sfi_selected: int | None = None

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
        words=("exact", "balanced", "turbo"),
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
        help="prompt tokens that are kept above the cutoff",
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
        high=16,
        mechanism="drafting",
        tunes="speculative",
    )

    def canonical(self) -> "Policy":
        """This policy with fields that can have no effect at their defaults, and an honest preset name."""
        idle = {
            name: _DEFAULTS[name]
            for name, spec in SPECS.items()
            if spec.tunes and getattr(self, spec.tunes) == SPECS[spec.tunes].neutral
        }
        floats = [name for name, spec in SPECS.items() if spec.kind is float]
        numbers = {n: float(v) for n in floats if not isinstance(v := getattr(self, n), str)}
        result = replace(self, **numbers | idle)
        same = (name for name in PRESETS if preset(name)._values() == result._values())
        return replace(result, preset=next(same, CUSTOM))

    def _values(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in SPECS if name != "preset"}

    @property
    def drops_tokens(self) -> bool:
        """Whether some prompt token may not be computed at some layer."""
        exact = preset("exact")
        return any(
            getattr(self, name) != getattr(exact, name)
            for name in ("prefill_keep_rate", "depth_cutoff", "tsp_rate")
        )

    def differences(self) -> dict[str, Any]:
        """The values that are not the fields' defaults."""
        return {name: value for name, value in self._values().items() if value != _DEFAULTS[name]}

    def fingerprint(self) -> str:
        """A short name of the values, equal for equal policies: part of the prefix cache's key."""
        if self._values() == preset("exact")._values():
            return "exact"
        text = json.dumps(self._values(), sort_keys=True)
        return hashlib.blake2s(text.encode(), digest_size=8).hexdigest()

    def to_wire(self) -> dict[str, str | int | float | bool]:
        """The policy as a flat JSON object."""
        return {"preset": self.preset} | self._values()

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> "Policy":
        """The policy that :meth:`to_wire` wrote.

        Raises:
            PolicyError: when a field is missing, unknown or out of range: sender and receiver differ.
        """
        if wire.keys() != SPECS.keys():
            raise PolicyError(f"not a policy of this version: fields {sorted(wire)}")
        _check({name: value for name, value in wire.items() if name != "preset"}, Limits())
        return cls(**wire)


SPECS: dict[str, Spec] = {item.name: item.metadata["spec"] for item in fields(Policy)}
_DEFAULTS: dict[str, Any] = {item.name: item.default for item in fields(Policy)}


def preset(name: str) -> Policy:
    """The policy of a preset of this build.

    Raises:
        PolicyError: when the preset is unknown, or known but not in this build.
    """
    if name in PRESETS:
        return replace(Policy(), preset=name, **PRESETS[name])
    if name in SPECS["preset"].words:
        legal = ", ".join(f'"{known}"' for known in PRESETS)
        raise PolicyError(f'fathom.preset: "{name}" is not available in this build; legal: {legal}', "preset")
    raise _illegal("preset", name, Limits())


def _shown(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "..."


def _illegal(name: str, value: Any, limits: Limits) -> PolicyError:
    return PolicyError(f"fathom.{name} must be {SPECS[name].legal(limits)}, got {_shown(value)}", name)


def _check(values: Mapping[str, Any], limits: Limits) -> None:
    for name, value in values.items():
        if not SPECS[name].accepts(value, limits):
            raise _illegal(name, value, limits)


def validate(policy: Policy, limits: Limits = Limits()) -> Policy:
    """The canonical form of a policy that this build can run on this model.

    Raises:
        PolicyError: when a value is out of the model's range, or asks for a mechanism that is not there.
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
    return policy.canonical()


def _raise_off_span(cutoff: int, limits: Limits) -> NoReturn:
    below = cutoff - cutoff % limits.span
    nearest = [str(value) for value in (below, below + limits.span) if value >= limits.span]
    message = f"fathom.depth_cutoff must be a multiple of {limits.span} layers, got {cutoff}; nearest: "
    raise PolicyError(message + ", ".join(nearest), "depth_cutoff")


def parse(
    request: Any, default: Policy, limits: Limits = Limits(), tunings: Mapping[str, Any] | None = None
) -> Policy:
    """The policy that a request's ``fathom`` object asks for.

    Args:
        request: the object as decoded from JSON; None asks for ``default``.
        default: the policy whose values apply where the object names no preset and no value.
        limits: what the served model allows.
        tunings: the operator's values of fields that only refine another one, for requests that give none.

    Raises:
        PolicyError: for anything but an object with known fields and legal values.
    """
    if request is None:
        return default
    if not isinstance(request, Mapping):
        raise PolicyError(f"fathom must be an object, got {_shown(request)}")
    for name in request:
        if name not in SPECS:
            unknown, legal = str(name)[:60], ", ".join(SPECS)
            raise PolicyError(f"fathom.{unknown} is not a policy field; legal fields: {legal}", unknown)
    _check(request, limits)
    base = preset(request["preset"]) if "preset" in request else default
    refined = dict(tunings or {})
    # What the preset, or the default, says of such a field itself goes before.
    stated = PRESETS.get(request["preset"], {}) if "preset" in request else default.differences()
    given = {name: value for name, value in request.items() if name != "preset"}
    return validate(replace(base, **{**refined, **stated, **given}), limits)


def tunings_of(arguments: argparse.Namespace, defaults: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """What the flags of :func:`add_arguments` say of fields that only refine another one.

    Args:
        defaults: values for flags that are not given.
    """
    given = {name: getattr(arguments, name) for name, spec in SPECS.items() if spec.tunes}
    return {**(defaults or {}), **{name: value for name, value in given.items() if value is not None}}


def json_schema() -> dict[str, Any]:
    """JSON Schema of a request's ``fathom`` object."""
    properties = {name: spec.schema() | {"default": _DEFAULTS[name]} for name, spec in SPECS.items()}
    return {"type": "object", "additionalProperties": False, "properties": properties}


def describe(limits: Limits = Limits()) -> dict[str, dict[str, Any]]:
    """Every field's meaning, range, unit, source, default, and whether it can be asked for."""
    return {
        name: {
            "help": spec.help,
            "legal": spec.legal(limits),
            "default": _DEFAULTS[name],
            "unit": spec.unit,
            "source": spec.source,
            "mechanism": spec.mechanism,
            "available": spec.mechanism is None or limits.why_not(spec.mechanism) is None,
        }
        for name, spec in SPECS.items()
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add one flag per field: the policy of requests that bring none."""
    group = parser.add_argument_group("policy of requests that ask for none")
    for name, spec in SPECS.items():
        flag = "--" + name.replace("_", "-")
        text = f"{spec.help}; {spec.legal(Limits())} (default: {_DEFAULTS[name]}; {spec.source})".replace(
            "%", "%%"
        )
        if spec.kind is bool:
            group.add_argument(flag, action=argparse.BooleanOptionalAction, default=None, help=text)
        else:
            group.add_argument(flag, type=spec.from_text, metavar="VALUE", default=None, help=text)


def from_arguments(arguments: argparse.Namespace, limits: Limits = Limits()) -> Policy:
    """The policy that the flags of :func:`add_arguments` ask for.

    Raises:
        PolicyError: with the flag's name in place of the field's.
    """
    given = {name: getattr(arguments, name) for name in SPECS if getattr(arguments, name) is not None}
    try:
        return parse(given, Policy(), limits)
    except PolicyError as error:
        raise PolicyError(as_flag(error), error.field) from error


def as_flag(error: PolicyError) -> str:
    """The error's message with the flag's name in place of the field's."""
    return str(error).replace(f"fathom.{error.field}", "--" + error.field.replace("_", "-"))
