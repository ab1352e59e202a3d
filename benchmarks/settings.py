"""Policies that are measured for speed and asked for fidelity under the same names: each mechanism alone, and all.

They fit the demo target (8 layers in spans of 2) and any generated model of 8 layers. The presets of this build are
asked by name.
"""

from __future__ import annotations

from typing import Any

from fathom.runtime import config

SPECPREFILL: dict[str, Any] = {"prefill_keep_rate": 0.5, "min_prompt_tokens": 0}
SPEED: dict[str, Any] = {"depth_cutoff": 6}
FASTKV: dict[str, Any] = {"tsp_rate": 0.2, "kv_retention_rate": 0.2}
SFI: dict[str, Any] = {"decode": "slow_fast", "sfi_budget": 256, "sfi_window": 64}
DRAFTING: dict[str, Any] = {"speculative": True}

SINGLES: dict[str, dict[str, Any]] = {
    "specprefill": SPECPREFILL,
    "speed": SPEED,
    "fastkv": FASTKV,
    "sfi": SFI,
    "drafting": DRAFTING,
}
COMBINED: dict[str, dict[str, Any]] = {
    "all-four": SPECPREFILL | SPEED | FASTKV | SFI,
    "all-five": SPECPREFILL | SPEED | FASTKV | SFI | DRAFTING,
}
BY_NAME: dict[str, dict[str, Any]] = {
    name: {"preset": name} | ({"min_prompt_tokens": 0} if "prefill_keep_rate" in values else {})
    for name, values in config.PRESETS.items()
    if values
}
"""Short prompts are not left whole: the questions' documents are shorter than those whose time is measured."""

COMPARED = SINGLES | COMBINED | BY_NAME
