"""The draft's look-ahead (SpecPrefill, section 3.2.1): what it would say next, and what it looks at meanwhile."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from fathom.runtime.kv.lists import SlotLists
from fathom.runtime.sglang_host.draft.draft_attention import Captured
from fathom.runtime.sglang_host.draft.draft_model import SCRATCH_SLOTS, DraftModel, Read


@dataclass
class Prompt:
    """One prompt that the draft has read.

    Attributes:
        slots: [N] int32 virtual slots, on the pool's device.
        steps: tokens to decode at most.
        ends: token ids that end an answer.
        tokens: what the draft said, ``steps`` tokens or up to and with one of ``ends``.
        scratch: slots, likewise, that hold the draft's KV of ``tokens``, of the last one excepted, until the next
            look-ahead.
    """

    slots: torch.Tensor
    steps: int
    ends: frozenset[int]
    tokens: list[int] = field(default_factory=list)
    scratch: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int32))


def groups(prompts: Sequence[Prompt]) -> list[list[int]]:
    """Indices of the prompts, in groups whose look-aheads fit in the scratch slots together."""
    found: list[list[int]] = []
    for index in range(len(prompts)):
        longest = max(prompts[i].steps for i in [*(found[-1] if found else []), index])
        if found and (len(found[-1]) + 1) * longest <= SCRATCH_SLOTS:
            found[-1].append(index)
        else:
            found.append([index])
    return found


def look_ahead(
    draft: DraftModel, prompts: Sequence[Prompt], logits: torch.Tensor, first: Captured
) -> tuple[torch.Tensor, list[int]]:
    """Decode greedily from each prompt and score its tokens.

    Query rows are the last prompt token and the drafted ones but the last; a row whose draft met the end of the
    sequence stops there.

    Args:
        logits: [prompts, vocabulary] of the last prompt tokens; first: the queries of those tokens.

    Returns:
        scores [total rows, longest prompt], and the number of rows of each prompt.
    """
    rows = [1] * len(prompts)
    queries = {layer: [[parts[0][i]] for i in range(len(prompts))] for layer, parts in first.queries.items()}
    for prompt, token in zip(prompts, logits.argmax(-1).tolist(), strict=True):
        prompt.tokens.append(token)
    width = max(prompt.steps for prompt in prompts)
    for index, prompt in enumerate(prompts):
        prompt.scratch = draft.scratch_slots(index, width)
    lists = SlotLists([torch.cat([prompt.slots, prompt.scratch]) for prompt in prompts])
    while running := [i for i, prompt in enumerate(prompts) if _goes_on(prompt)]:
        captured = Captured(first.rows)
        logits = draft.read(lists, [_next_read(i, prompts[i]) for i in running], captured)
        for place, (i, token) in enumerate(zip(running, logits.argmax(-1).tolist(), strict=True)):
            prompts[i].tokens.append(token)
            rows[i] += 1
            for layer, parts in captured.queries.items():
                queries[layer][i].append(parts[0][place])
    packed = {layer: torch.stack([q for own in parts for q in own]) for layer, parts in queries.items()}
    return draft.scores(packed, rows, [prompt.slots for prompt in prompts], first.scale), rows


def _goes_on(prompt: Prompt) -> bool:
    return len(prompt.tokens) < prompt.steps and prompt.tokens[-1] not in prompt.ends


def _next_read(index: int, prompt: Prompt) -> Read:
    return Read(index, len(prompt.slots) + len(prompt.tokens), prompt.tokens[-1:])
