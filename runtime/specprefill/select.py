"""Which prompt tokens enter the target: decisions on the scores that the draft's attention gave.

``scores`` come from ``kernels/window_scores.pooled_max_scores``, run over all draft layers. What is returned lives
on the CPU: scheduling, page tables and input tensors are built from it.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from fathom.runtime.retain import kept_count, top_indices
from fathom.runtime.specprefill.config import AUTO, SpecPrefillConfig

Span = tuple[int, int]
"""Tokens ``start .. stop - 1`` of the prompt."""


@dataclass(frozen=True)
class Selection:
    """What was decided for one prompt.

    Attributes:
        tokens: [kept] int64, ascending original positions of the tokens that enter the target. Token 0 and the last
            prompt token are always among them.
        prompt_tokens: N.
        chunks: number of chunks of the prompt.
        kept_chunks: number of chunks kept.
        forced_chunks: number of chunks that had to stay whatever their score.
        rate: the keep rate that was applied: what was asked for, what "auto" chose, or 1.0 for a prompt left whole.
    """

    tokens: torch.Tensor
    prompt_tokens: int
    chunks: int
    kept_chunks: int
    forced_chunks: int
    rate: float

    @property
    def whole(self) -> bool:
        """Whether the prompt enters the target as it is."""
        return len(self.tokens) == self.prompt_tokens


def chunk_scores(scores: torch.Tensor, chunk: int = 32) -> torch.Tensor:
    """Mean over the rows, then over each chunk's own tokens (section 3.2.2 and 3.2.3).

    Args:
        scores: [rows, N] of one prompt, N >= 1; a row whose draft met the end of sequence is not among them.

    Returns:
        [⌈N / chunk⌉] float32.
    """
    tokens = scores.float().mean(0)
    full = len(tokens) // chunk * chunk
    parts = [tokens[:full].view(-1, chunk).mean(1)]
    if full < len(tokens):
        parts.append(tokens[full:].mean().view(1))
    return torch.cat(parts)


def forced_chunks(prompt_tokens: int, spans: Iterable[Span], chunk: int = 32) -> torch.Tensor:
    """The first chunk, the last one, and every chunk that a span touches; ascending int64, without repetition.

    Raises:
        ValueError: for a span that does not lie in the prompt.
    """
    count = -(-prompt_tokens // chunk)
    forced = torch.zeros(count, dtype=torch.bool)
    forced[0] = forced[-1] = True
    for start, stop in spans:
        if not 0 <= start <= stop <= prompt_tokens:
            raise ValueError(f"span {start}..{stop} does not lie in a prompt of {prompt_tokens} tokens")
        if start < stop:
            forced[start // chunk : (stop - 1) // chunk + 1] = True
    return forced.nonzero().view(-1)


def auto_count(
    scores: torch.Tensor, sizes: torch.Tensor, forced: torch.Tensor, share: float, min_rate: float
) -> int:
    """How many chunks to keep so that they just hold ``share`` of the score mass, at least ⌈min_rate · chunks⌉.

    The mass of a chunk is the sum of its tokens' scores. Scores without any mass decide nothing: all chunks stay.

    Args:
        scores: [chunks] mean scores; sizes: [chunks] tokens of each chunk.
        forced: [f] indices of the chunks that are kept first.
    """
    chunks = len(scores)
    mass = scores.double() * sizes
    total = float(mass.sum())
    if not 0 < total < float("inf"):
        return chunks
    rank = scores.double().clone()
    rank[forced] = float("inf")
    held = mass[rank.argsort(descending=True, stable=True)].cumsum(0)
    # All chunks hold all of the mass, though the sum in this order may differ in its last bits.
    needed = int((held < min(share * total, float(held[-1]))).sum()) + 1
    return max(needed, kept_count(min_rate, chunks))


def whole_prompt(prompt_tokens: int, chunk: int = 32) -> Selection:
    """The selection of a prompt that is left as it is."""
    chunks = -(-prompt_tokens // chunk)
    return Selection(torch.arange(prompt_tokens), prompt_tokens, chunks, chunks, chunks, 1.0)


def select_prompt(scores: torch.Tensor, spans: Iterable[Span], config: SpecPrefillConfig) -> Selection:
    """Which tokens of one prompt enter the target.

    Args:
        scores: [rows, N] float32 of the prompt, from the draft.
        spans: what must stay: the chat template's generation header and what the request protects. Chunks that they
            touch, the first chunk and the last one count in the budget; if they alone exceed it, all of them stay.
        config: rate and sizes; a prompt it does not apply to is left whole.

    Raises:
        ValueError: for a span that does not lie in the prompt.
    """
    prompt_tokens = scores.shape[1]
    forced = forced_chunks(prompt_tokens, spans, config.chunk)
    if not config.applies_to(prompt_tokens):
        return whole_prompt(prompt_tokens, config.chunk)
    mean = chunk_scores(scores, config.chunk).cpu()
    chunks = len(mean)
    sizes = torch.full((chunks,), config.chunk)
    sizes[-1] = prompt_tokens - (chunks - 1) * config.chunk
    if config.keep_rate == AUTO:
        budget = auto_count(mean, sizes, forced, config.auto_share, config.auto_min_rate)
        rate = budget / chunks
    else:
        rate = float(config.keep_rate)
        budget = kept_count(rate, chunks)
    kept = top_indices(mean, budget, forced)
    stays = torch.zeros(chunks, dtype=torch.bool).index_fill_(0, kept, True)
    tokens = stays.repeat_interleave(sizes).nonzero().view(-1)
    return Selection(tokens, prompt_tokens, chunks, len(kept), len(forced), rate)
