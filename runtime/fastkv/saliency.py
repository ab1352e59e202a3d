"""Keep what the prompt's last tokens attend to (FastKV, Eq. 1; SnapKV)."""

from dataclasses import dataclass

import torch

from fathom.runtime.fastkv.policies import RetentionContext


@dataclass(frozen=True)
class Saliency:
    needs_saliency: bool = True

    def scores(self, context: RetentionContext) -> torch.Tensor:
        assert context.saliency is not None
        return context.saliency
