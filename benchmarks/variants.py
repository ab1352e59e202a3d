"""What can be compared. A variant is data: how its server is started and what its requests carry."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, replace
from pathlib import Path

from fathom.benchmarks.client import MODEL_NAME
from fathom.runtime.presets import EXACT, PRESETS

DENSE: tuple[dict, ...] = ({}, {"preset": EXACT})
"""The `fathom` objects that ask for nothing to be dropped."""


def filled(policy: dict) -> dict:
    """A `fathom` object with what its preset fills in."""
    return {**PRESETS.get(policy.get("preset", EXACT), {}), **policy}


@dataclass(frozen=True)
class Variant:
    """One server to measure.

    Attributes:
        name: how tables and JSON call it.
        engine: "sglang", "fathom" or "vllm": which proof of life applies (see `liveness`).
        command: argument list; `{…}` is filled from `Place`.
        env: environment variables on top of the common ones; filled the same way.
        body: members added to each request's JSON.
    """

    name: str
    engine: str
    command: tuple[str, ...]
    env: dict[str, str] = field(default_factory=dict)
    body: dict = field(default_factory=dict)

    @property
    def policy(self) -> dict:
        """The `fathom` object of its requests."""
        return self.body.get("fathom", {})

    @property
    def members(self) -> dict:
        """Its policy with what the preset fills in."""
        return filled(self.policy)

    @property
    def dense(self) -> bool:
        """Whether its requests ask for nothing to be dropped."""
        return self.policy in DENSE

    @property
    def drafted(self) -> bool:
        """Whether its requests need a draft model and its command names none."""
        policy = self.members
        asked = policy.get("prefill_keep_rate", 1) != 1 or policy.get("speculative", False)
        return asked and self.option("--draft-model-path") is None

    def option(self, name: str) -> str | None:
        """Value of a flag of its command, the last one given; None without it."""
        words = [word for part in self.command for word in part.split("=", 1)]
        at = [index for index, word in enumerate(words[:-1]) if word == name]
        return words[at[-1] + 1] if at else None


@dataclass(frozen=True)
class Place:
    """What a command line needs to know about this run.

    Attributes:
        model: folder of the model.
        port: of the server, on 127.0.0.1.
        dtype: of weights and KV.
        context: longest prompt plus output, in tokens.
        kv_tokens: KV pool, in tokens.
        kv_bytes: the same pool in bytes.
        vllm: vLLM's command.
    """

    model: Path
    port: int
    dtype: str
    context: int
    kv_tokens: int
    kv_bytes: int
    vllm: Path

    def fill(self, text: str) -> str:
        return text.format(**vars(self))


_ADDRESS = ("--host", "127.0.0.1", "--port", "{port}")
_SGLANG = (
    *("--model-path", "{model}", *_ADDRESS, "--served-model-name", MODEL_NAME, "--dtype", "{dtype}"),
    *("--context-length", "{context}", "--max-total-tokens", "{kv_tokens}"),
)
_STOCK_ON_CPU = (
    *("--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
    *("--disable-overlap-schedule", "--sleep-on-idle", "--mem-fraction-static", "0.5"),
)
"""The one attention backend that runs there; without the sleep an idle scheduler polls on a whole core."""

SGLANG = Variant(
    "sglang", "sglang", (sys.executable, "-m", "fathom.benchmarks.stock_sglang", *_SGLANG, *_STOCK_ON_CPU)
)
FATHOM = Variant("fathom", "fathom", (sys.executable, "-m", "fathom.server.cli", "serve", *_SGLANG))
VLLM = Variant(
    "vllm",
    "vllm",
    (
        *("{vllm}", "serve", "{model}", *_ADDRESS, "--served-model-name", MODEL_NAME, "--dtype", "{dtype}"),
        *("--max-model-len", "{context}", "--kv-cache-memory-bytes", "{kv_bytes}"),
    ),
    env={"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"},
)
"""vLLM keeps one core free for its scheduler unless told not to bind; here every server gets all cores."""

KNOWN = {variant.name: variant for variant in (SGLANG, VLLM, FATHOM)}


def with_body(name: str, fathom: dict) -> Variant:
    """Fathom's server with this `fathom` object in every request."""
    return replace(FATHOM, name=name, body={"fathom": fathom})


def asked_exact(variant: Variant) -> Variant:
    """The variant for a server that may have a preset of its own: a Fathom one without a policy asks for exact."""
    asks = variant.engine != "fathom" or variant.policy
    return variant if asks else replace(variant, body={"fathom": {"preset": EXACT}})


def with_flags(variant: Variant, flags: list[str]) -> Variant:
    """The variant with further server flags, which win over its own; braces in them stay as they are."""
    escaped = (flag.replace("{", "{{").replace("}", "}}") for flag in flags)
    return replace(variant, command=(*variant.command, *escaped))
