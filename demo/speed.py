"""SPEED-aware fine-tune of the target: `python -m fathom.demo.speed --init TARGET.pt --out DIR`.

Training-time visibility of the paper (SPEED, Eq. 5, Appendix A): prompt tokens stop after layer K; answer
tokens run all layers and see, above K, the BoS anchor, their own turn's last prompt token and the answer so
far. Steps alternate between the cutoffs, so that one checkpoint serves each of them. The shallow layers start as
copies of deeper ones that read the prompt: layers grown as no-ops have nothing to adapt.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor

from .model import Llama, rms_norm, rope_tables
from .train import Batch, Stage, Trainer, collate, guide_loss, parser

ANCHOR, PADDING = -2, -1
EXTRA_COPY = ((2, 1), (3, 1))
LOWERED = {2: 4, 3: 6}


def decode_rows(batch: Batch) -> tuple[Tensor, Tensor]:
    """Positions [B, M] of the tokens that run all layers (BoS, then every turn's predicting positions) and
    the turn [B, M] each belongs to (ANCHOR, PADDING or 0, 1, ...)."""
    most = 1 + max(sum(e - s for s, e, _ in r.spans) for r in batch.rows)
    index = torch.zeros(len(batch.rows), most, dtype=torch.long)
    turn = torch.full(index.shape, PADDING)
    for b, row in enumerate(batch.rows):
        places, turns = [0], [ANCHOR]
        for i, (s, e, _) in enumerate(row.spans):
            places += range(s - 1, e - 1)
            turns += [i] * (e - s)
        index[b, : len(places)], turn[b, : len(turns)] = torch.tensor(places), torch.tensor(turns)
    return index, turn


def upper_mask(index: Tensor, turn: Tensor) -> Tensor:
    """Visibility [B, M, M] above the cutoff: same turn and not later, or the anchor."""
    same = (turn[:, :, None] == turn[:, None, :]) & (index[:, :, None] >= index[:, None, :])
    return same | (turn[:, None, :] == ANCHOR) | torch.eye(index.shape[1], dtype=torch.bool)


def decode_states(
    model: Llama, ids: Tensor, index: Tensor, turn: Tensor, cutoff: int, dtype: torch.dtype = torch.bfloat16
) -> tuple[Tensor, dict[int, tuple[Tensor, Tensor]]]:
    """Final states [B, M, hidden] of the rows `index` when the prompt stops after layer `cutoff`.

    Also (q, k) of the layers up to the cutoff. ids: [B, T].
    """
    cfg, kept = model.cfg, {}
    cos, sin = rope_tables(torch.arange(ids.shape[1])[None], cfg, dtype)
    x = F.embedding(ids, model.embedding).to(dtype)
    for i, layer in enumerate((model.compiled or list(model.layers))[:cutoff]):
        x, q, k = layer(x, cos, sin, None, True)
        kept[i] = (q, k)
    x = x.gather(1, index[..., None].expand(-1, -1, cfg.hidden))
    cos, sin = rope_tables(index, cfg, dtype)
    mask = upper_mask(index, turn)[:, None]
    for layer in list(model.layers)[cutoff:]:
        x = layer(x, cos, sin, mask)
    return rms_norm(x, model.norm, cfg.eps), kept


class SpeedTrainer(Trainer):
    """Fine-tunes under the SPEED mask, one cutoff per step in turn."""

    def __init__(self, args: argparse.Namespace):
        self.cutoffs = [int(k) for k in args.cutoffs.split(",")]
        super().__init__(args)
        if not self.step:
            self.lower()

    @torch.no_grad()
    def lower(self) -> None:
        """Start layers 3 and 4 as copies of 5 and 7, which read the prompt above the lower cutoff."""
        layers = self.model.layers
        for low, high in LOWERED.items():
            if high < len(layers):
                layers[low].load_state_dict(layers[high].state_dict())

    def train_step(self, stage: Stage, lr: float) -> dict[str, float]:
        """One step at the next cutoff; answers only."""
        cutoff, cfg = self.cutoffs[self.step % len(self.cutoffs)], self.cfg
        batch = collate([self.builder.chat_row(self.rng, stage.length) for _ in range(stage.rows)])
        index, turn = decode_rows(batch)
        states, kept = decode_states(self.model, batch.ids[:, :-1], index, turn, cutoff)
        used = turn >= 0
        logits = F.linear(states[used], self.model.embedding.to(states.dtype)).float()
        labels = batch.ids.gather(1, index + 1)[used]
        ce = F.cross_entropy(logits, labels)
        heads = tuple(h for h in cfg.copy_guides + EXTRA_COPY if h[0] < cutoff)
        copy, mass = guide_loss(kept, heads, batch.copy, cfg)
        (ce + self.args.guide * copy).backward()
        norm = self.optimizer.step(lr)
        self.step += 1
        self.tokens += batch.ids.numel()
        hit = torch.ones(index.shape, dtype=torch.bool)
        hit[used] = logits.argmax(-1) == labels
        out = {"loss": ce.item(), "norm": norm, "copy": mass.item()}
        for b, row in enumerate(batch.rows):
            for i, (_, _, task) in enumerate(row.spans):
                out.setdefault(f"em_{task}_k{cutoff}", []).append(bool(hit[b][turn[b] == i].all()))
        return out


def main(argv: list[str] | None = None) -> None:
    p = parser(__doc__)
    p.add_argument("--cutoffs", default="4,6")
    p.set_defaults(model="target", lr=1.5e-3, decay=0.6, warmup=20, guide=0.2)
    SpeedTrainer(p.parse_args(argv)).run()


if __name__ == "__main__":
    main()
