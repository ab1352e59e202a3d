"""Named measurements of `fathom bench` as data: the flags that each stands for. Flags beside the name go on top."""

from __future__ import annotations

import json
from typing import Any

from fathom.benchmarks import settings
from fathom.server.command.checks import demo_model


def _policies(policies: dict[str, dict[str, Any]]) -> list[str]:
    return [word for name, body in policies.items() for word in ("--policy", f"{name}={json.dumps(body)}")]


SMALL = ["--variants", "fathom", "--one-server", "--model-shape", "layers=8,heads=8,vocab=8k"]
"""Eight layers, as the demo target has; half of the standard model's query heads, whose attention is most of a long
prefill; a vocabulary whose LM head is a small part of the draft."""

PREFILL: dict[str, dict[str, Any]] = {
    **{
        f"specprefill-{rate:.0f}": {"prefill_keep_rate": rate / 100, "min_prompt_tokens": 0}
        for rate in (10, 20, 50)
    },
    "fastkv-20": settings.FASTKV,
}
DECODE: dict[str, dict[str, Any]] = {"retain-10": {"kv_retention_rate": 0.1}, "sfi": {"decode": "slow_fast"}}
TARGET, DRAFT = "{target}", "{draft}"
"""The demo's models, wherever this installation has them."""
DRAFTED = json.dumps(settings.DRAFTING)

# fmt: off
STUDIES: dict[str, list[str]] = {
    "prefill": [
        *SMALL, "--warmup-prompt", "1k", "--prompts", "2k,8k,16k", "--batches", "1", "--output", "8",
        "--rounds", "2", *_policies(PREFILL), "--name", "prefill",
    ],
    "decode": [
        *SMALL, "--documents", "8", "--prompts", "4k,8k,16k,32k", "--batches", "1,8", "--output", "66",
        "--rounds", "2", *_policies(DECODE), "--name", "decode",
    ],
    "drafting": [
        "--variants", "fathom", "--model", TARGET, "--draft", DRAFT,
        "--prompts", "1k,4k", "--batches", "1", "--output", "96", "--rounds", "24", "--warmups", "2",
        "--policy", f"drafting={DRAFTED}", "--poor-draft", f"poor-draft={DRAFTED}", "--name", "drafting",
    ],
    "all": [
        *SMALL, "--warmup-prompt", "1k", "--prompts", "8k,16k", "--batches", "1", "--output", "66", "--rounds", "2",
        *_policies(settings.COMPARED), "--name", "all",
    ],
}
# fmt: on


def expand(argv: list[str]) -> list[str]:
    """The command line with `--study NAME` (`--all` is `--study all`) replaced by its flags, which come first.

    Raises:
        ValueError: for an unknown name.
        StartError: for one that needs the demo's models, where this installation has none.
    """
    words: list[str] = []
    for word in argv:
        if word == "--all":
            words += ["--study", "all"]
        elif word.startswith("--study="):
            words += word.split("=", 1)
        else:
            words.append(word)
    found: list[str] = []
    while "--study" in words:
        at = words.index("--study")
        name = words[at + 1] if at + 1 < len(words) else ""
        if name not in STUDIES:
            raise ValueError(f"unknown study {name!r}; known: {', '.join(STUDIES)}")
        found += [
            str(demo_model(word.strip("{}"))) if word in (TARGET, DRAFT) else word for word in STUDIES[name]
        ]
        del words[at : at + 2]
    return [*found, *words]
