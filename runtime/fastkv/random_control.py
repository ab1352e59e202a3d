"""Keep random entries: the control that a policy has to beat at the same budget."""

from dataclasses import dataclass

import torch

from fathom.runtime.fastkv.policies import RetentionContext
from fathom.runtime.staging import send


@dataclass(frozen=True)
class Random:
    needs_saliency: bool = False

    def scores(self, context: RetentionContext) -> torch.Tensor:
        # Drawn on the CPU, so that a seed means the same on every machine and in every batch.
        generator = torch.Generator().manual_seed((context.seed * 1_000_003 + context.layer) % 2**63)
        drawn = torch.rand(context.kv_heads, len(context.positions), generator=generator, dtype=torch.float64)
        return send(drawn, context.positions.device)
