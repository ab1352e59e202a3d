"""SpecPrefill's step of a prefill plan: from the first layer on, only chosen prompt tokens exist."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from fathom.runtime.plan import SCORED, Step
from fathom.runtime.retain import kept_count
from fathom.runtime.specprefill.config import AUTO, SpecPrefillConfig
from fathom.runtime.specprefill.select import Span, forced_chunks

MECHANISM = "SpecPrefill"
RANDOM = "random"


def config_of(policy: Mapping[str, Any]) -> SpecPrefillConfig:
    """The numbers that a policy's fields ask for; neutral for an empty policy."""
    if not policy:
        return SpecPrefillConfig()
    return SpecPrefillConfig(
        keep_rate=policy["prefill_keep_rate"],
        lookahead=policy["lookahead"],
        min_prompt_tokens=policy["min_prompt_tokens"],
    )


def most_kept(config: SpecPrefillConfig, prompt_tokens: int, spans: Iterable[Span]) -> int:
    """The most tokens that a selection may keep: exact for a rate, the whole prompt for "auto".

    Raises:
        ValueError: for a span that does not lie in the prompt.
    """
    chunks = -(-prompt_tokens // config.chunk)
    forced = len(forced_chunks(prompt_tokens, spans, config.chunk))
    if config.keep_rate == AUTO:
        return prompt_tokens
    kept = max(kept_count(float(config.keep_rate), chunks), forced)
    # The last chunk, which may be short, is always among them.
    return (kept - 1) * config.chunk + prompt_tokens - (chunks - 1) * config.chunk


def step(config: SpecPrefillConfig, prompt_tokens: int, spans: Iterable[Span]) -> Step | None:
    """The step for one prompt; None where it stays whole whatever its scores."""
    if not config.applies_to(prompt_tokens):
        return None
    kept = most_kept(config, prompt_tokens, spans)
    if kept >= prompt_tokens and config.keep_rate != AUTO:
        return None
    return Step(0, MECHANISM, SCORED, anchor=False, kept=kept)


def random_scores(prompt: Sequence[int], chunk: int) -> torch.Tensor:
    """Scores without any meaning, the same for the same prompt: the control for what the draft's scores are worth.

    Returns:
        [1, N] float32, one value per chunk.
    """
    seed = hashlib.blake2s(repr(list(prompt)).encode(), digest_size=7).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(seed, "big"))
    chunks = -(-len(prompt) // chunk)
    return torch.rand(chunks, generator=generator).repeat_interleave(chunk)[: len(prompt)].view(1, -1)
