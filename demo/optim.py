"""Muon for the matrices (Newton-Schulz batched over equal shapes) and AdamW for the rest."""

from __future__ import annotations

import torch
from torch import Tensor, nn

_NS = (3.4445, -4.7750, 2.0315)


class BatchedMuon:
    """Muon (Jordan et al. 2024) with update RMS matched to AdamW (factor 0.2 * sqrt(larger side))."""

    def __init__(self, params: list[Tensor], lr: float, momentum: float = 0.95, weight_decay: float = 0.01):
        self.lr, self.momentum, self.weight_decay = lr, momentum, weight_decay
        self.groups: dict[tuple[int, int], list[Tensor]] = {}
        for p in params:
            self.groups.setdefault(tuple(sorted(p.shape)), []).append(p)
        self.buffers = {k: torch.zeros(len(v), *k) for k, v in self.groups.items()}

    @torch.no_grad()
    def step(self) -> None:
        a, b, c = _NS
        for shape, params in self.groups.items():
            grad = torch.stack([p.grad if tuple(p.shape) == shape else p.grad.T for p in params])
            buffer = self.buffers[shape]
            buffer.lerp_(grad, 1 - self.momentum)
            update = grad.lerp(buffer, self.momentum)
            x = (update / (update.norm(dim=(1, 2), keepdim=True) + 1e-7)).bfloat16()
            for _ in range(5):
                s = x @ x.mT
                x = a * x + (b * s + c * (s @ s)) @ x
            scale = 0.2 * max(shape) ** 0.5 * self.lr
            for p, u in zip(params, x.float(), strict=True):
                p.mul_(1 - self.lr * self.weight_decay)
                p.add_(u if tuple(p.shape) == shape else u.T, alpha=-scale)

    def state_dict(self) -> dict:
        return {str(k): v for k, v in self.buffers.items()}

    def load_state_dict(self, state: dict) -> None:
        for k, v in self.buffers.items():
            v.copy_(state[str(k)])


class Optimizer:
    """Both optimizers behind one learning rate."""

    def __init__(self, model: nn.Module, lr: float):
        named = list(model.named_parameters())
        self.params = [p for _, p in named]
        matrices = [p for n, p in named if p.ndim == 2 and n != "embedding"]
        rest = [p for n, p in named if p.ndim != 2 or n == "embedding"]
        self.muon = BatchedMuon(matrices, lr)
        self.adam = torch.optim.AdamW(rest, lr=lr, betas=(0.9, 0.98), weight_decay=0.0)

    def step(self, lr: float, clip: float = 1.0) -> float:
        """Clip, update, clear the gradients; returns the gradient norm before clipping."""
        norm = nn.utils.clip_grad_norm_(self.params, clip)
        self.muon.lr = lr
        for group in self.adam.param_groups:
            group["lr"] = lr
        self.muon.step()
        self.adam.step()
        for p in self.params:
            p.grad = None
        return float(norm)

    def state_dict(self) -> dict:
        return {"muon": self.muon.state_dict(), "adam": self.adam.state_dict()}

    def load_state_dict(self, state: dict) -> None:
        self.muon.load_state_dict(state["muon"])
        self.adam.load_state_dict(state["adam"])
