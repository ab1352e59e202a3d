"""Keep the first tokens and the latest ones, whatever the prompt says (StreamingLLM, section 3.2)."""

from dataclasses import dataclass

import torch

from fathom.runtime.fastkv.policies import RetentionContext


@dataclass(frozen=True)
class Streaming:
    """Attributes: sinks: first tokens that rank above all others, tokens (4 in StreamingLLM, section 3.2)."""

    sinks: int = 4
    needs_saliency: bool = False

    def scores(self, context: RetentionContext) -> torch.Tensor:
        # Exact in float64, unlike large positions in a shorter type.
        recency = context.positions.double()
        ranked = torch.arange(len(recency), device=recency.device)
        first = torch.where(ranked < self.sinks, float("inf"), recency)
        return first.expand(context.kv_heads, -1)
