"""Train one model of the demo pair from scratch: `python -m fathom.demo.train draft|target`.

Resumable (same command again), at most two threads, progress bar with teacher-forced exact match per task.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
from collections import defaultdict, deque
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from .model import Llama, ModelConfig, grow, structured_init
from .optim import Optimizer
from .rows import Row, RowBuilder, tokenizer_texts
from .tokenizer import load_tokenizer, train_tokenizer

SHAPES = {
    "draft": ModelConfig(vocab=0),
    "target": ModelConfig(
        vocab=0, layers=8, ffn=640, copy_guides=((4, 1), (6, 1), (7, 1)), topic_guides=((3, 1), (6, 0))
    ),
}
PLACES = (0, 1, 4, 6)
LM_SHARE, LM_WEIGHT = 0.12, 0.1
GUIDE_WEIGHT = 0.5
SAVE_EVERY = 100


@dataclass(frozen=True)
class Stage:
    """`steps` steps of `rows` rows with `length` tokens each."""

    length: int
    rows: int
    steps: int

    @staticmethod
    def parse(text: str) -> list[Stage]:
        """`256x5:1000,512x2:500` -> stages."""
        out = []
        for item in text.split(","):
            shape, steps = item.split(":")
            length, rows = shape.split("x")
            out.append(Stage(int(length), int(rows), int(steps)))
        return out


@dataclass
class Batch:
    """ids [B, T], loss weights [B, T], guides as (b, query, key, probability) columns."""

    ids: Tensor
    weights: Tensor
    rows: list[Row]
    copy: Tensor
    topic: Tensor


def collate(rows: list[Row]) -> Batch:
    """Stack rows of equal length."""

    def column(kind: str) -> Tensor:
        flat = [(b, *g) for b, r in enumerate(rows) for g in getattr(r, kind)]
        return torch.tensor(flat, dtype=torch.float64).reshape(-1, 4)

    ids = torch.tensor([r.ids for r in rows])
    return Batch(ids, torch.tensor([r.weights for r in rows]), rows, column("copy"), column("topic"))


def guide_loss(
    kept: dict[int, tuple[Tensor, Tensor]],
    heads: tuple[tuple[int, int], ...],
    guide: Tensor,
    cfg: ModelConfig,
) -> tuple[Tensor, Tensor]:
    """Cross-entropy of the guided heads' attention to the guides, and the mass on guided keys (0..1).

    kept: {layer: (q [B, H, T, d], k [B, KV, T, d])}; guide: [n, 4] columns batch, query, key, probability.
    """
    share = cfg.heads // cfg.kv_heads
    batch, query, key, prob = guide[:, 0].long(), guide[:, 1].long(), guide[:, 2].long(), guide[:, 3].float()
    length = next(iter(kept.values()))[1].shape[2]
    rows, inverse = (batch * length + query).unique(return_inverse=True)
    row_batch, row_query = rows // length, rows % length
    count = row_batch.bincount(minlength=int(batch.max()) + 1)
    slot = torch.arange(len(rows)) - (count.cumsum(0) - count)[row_batch]
    index = torch.zeros(len(count), int(count.max()), dtype=torch.long)
    index[row_batch, slot] = row_query
    future = torch.arange(length) > index[:, None, :, None]
    losses, masses = [], []
    for layer, group in heads:
        q, k = kept[layer]
        q = q[: len(count), group * share : (group + 1) * share]
        q = q.gather(2, index[:, None, :, None].expand(-1, share, -1, q.shape[-1]))
        scores = (q @ k[: len(count), group, None].mT).float() * cfg.head_dim**-0.5
        logp = scores.masked_fill(future, -1e9).log_softmax(-1)
        logp = logp[batch, :, slot[inverse], key]
        losses.append(-(logp * prob[:, None]).sum() / (len(rows) * share))
        masses.append(logp.detach().exp().sum() / (len(rows) * share))
    return torch.stack(losses).mean(), torch.stack(masses).mean()


class Trainer:
    """State of one run; `run` continues from the last checkpoint in `out`."""

    def __init__(self, args: argparse.Namespace):
        torch.set_num_threads(args.threads)
        torch.manual_seed(args.seed)
        self.args, self.out = args, Path(args.out)
        self.out.mkdir(parents=True, exist_ok=True)
        self.tokenizer = self._tokenizer(Path(args.tokenizer))
        self.builder = RowBuilder(self.tokenizer)
        self.cfg = replace(SHAPES[args.model], vocab=len(self.tokenizer))
        self.model = Llama(self.cfg)
        structured_init(self.model)
        self.optimizer = Optimizer(self.model, args.lr)
        self.rng = random.Random(args.seed + 123)
        self.noise = torch.Generator().manual_seed(args.seed + 1)
        self.step, self.tokens = 0, 0
        if args.init:
            self.model.load_state_dict(torch.load(args.init, weights_only=False)["model"])
        if args.grow:
            grow(self.model, torch.load(args.grow, weights_only=False)["model"], PLACES)
        if self.checkpoint.exists():
            self._resume()
        if args.compile:
            self.model.compile_layers()

    @property
    def checkpoint(self) -> Path:
        return self.out / "checkpoint.pt"

    @staticmethod
    def _tokenizer(path: Path):
        if not (path / "tokenizer.json").exists():
            train_tokenizer(tokenizer_texts()).save_pretrained(path)
        return load_tokenizer(path)

    def save(self) -> None:
        state = {
            "model": self.model.state_dict(),
            "config": self.cfg.as_dict(),
            "optimizer": self.optimizer.state_dict(),
            "rng": self.rng.getstate(),
            "noise": self.noise.get_state(),
            "step": self.step,
            "tokens": self.tokens,
        }
        part = self.checkpoint.with_suffix(".part")
        torch.save(state, part)
        os.replace(part, self.checkpoint)

    def _resume(self) -> None:
        state = torch.load(self.checkpoint, weights_only=False)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.rng.setstate(state["rng"])
        self.noise.set_state(state["noise"])
        self.step, self.tokens = state["step"], state["tokens"]

    def learning_rate(self, step: int, total: int) -> float:
        """Linear warm-up, constant, linear decay over the last `--decay` share of all steps."""
        up = min(1.0, (step + 1) / self.args.warmup)
        down = min(1.0, (total - step) / max(1.0, self.args.decay * total))
        return self.args.lr * up * max(down, 0.02)

    def train_step(self, stage: Stage, lr: float) -> dict[str, float]:
        """One optimizer step; returns losses and, per task, exact match of the batch's answers."""
        rows = [self.builder.row(self.rng, stage.length, self.args.repeat) for _ in range(stage.rows)]
        batch = collate(rows)
        x, y, weight = batch.ids[:, :-1], batch.ids[:, 1:], batch.weights[:, 1:]
        context = (torch.rand(weight.shape, generator=self.noise) < LM_SHARE) & (weight == 0) & (y != 0)
        chosen = ((weight > 0) | context).reshape(-1).nonzero()[:, 0]
        hidden, kept = self.model.hidden_states(x, keep=True)
        logits = F.linear(
            hidden.reshape(-1, self.cfg.hidden)[chosen], self.model.embedding.to(hidden.dtype)
        ).float()
        labels = y.reshape(-1)[chosen]
        ce = F.cross_entropy(logits, labels, reduction="none")
        answer = weight.reshape(-1)[chosen] > 0
        copy, copy_mass = guide_loss(kept, self.cfg.copy_guides, batch.copy, self.cfg)
        if len(batch.topic):
            topic, topic_mass = guide_loss(kept, self.cfg.topic_guides, batch.topic, self.cfg)
        else:
            topic, topic_mass = torch.zeros(()), torch.zeros(())
        loss = (
            ce[answer].mean() + LM_WEIGHT * ce[~answer].nan_to_num().mean() + self.args.guide * (copy + topic)
        )
        loss.backward()
        norm = self.optimizer.step(lr)
        hit = torch.ones(y.numel(), dtype=torch.bool)
        hit[chosen] = logits.argmax(-1) == labels
        self.step += 1
        self.tokens += batch.ids.numel()
        out = {"loss": ce[answer].mean().item(), "lm": ce[~answer].mean().item(), "norm": norm}
        out |= {"copy": copy_mass.item(), "topic": topic_mass.item()}
        hit = hit.view(y.shape)
        for b, row in enumerate(rows):
            for begin, end, task in row.spans:
                out.setdefault(f"em_{task}", []).append(bool(hit[b, begin - 1 : end - 1].all()))
        return out

    def run(self) -> None:
        stages = Stage.parse(self.args.stages)
        total = sum(s.steps for s in stages)
        bar = tqdm(total=total, initial=self.step, smoothing=0.02, disable=self.args.quiet)
        recent: dict[str, deque] = defaultdict(lambda: deque(maxlen=200))
        begin = 0
        for i, stage in enumerate(stages):
            while self.step < min(begin + stage.steps, total):
                got = self.train_step(stage, self.learning_rate(self.step, total))
                for k, v in got.items():
                    recent[k].extend(v if isinstance(v, list) else [v])
                bar.update(1)
                if self.step % 50 == 0:
                    self._report(recent, stage, bar)
                if self.step % SAVE_EVERY == 0:
                    self.save()
            begin += stage.steps
            if self.step == begin:
                self.save()
                shutil.copy(self.checkpoint, self.out / f"stage{i}.pt")
        bar.close()

    def _report(self, recent: dict[str, deque], stage: Stage, bar: tqdm) -> None:
        last = 50
        window = {k: list(v) if k.startswith("em_") else list(v)[-last:] for k, v in recent.items()}
        mean = {k: sum(v) / len(v) for k, v in window.items()}
        line = {"step": self.step, "tokens": self.tokens, "length": stage.length}
        line |= {k: round(v, 4) for k, v in mean.items()}
        with open(self.out / "log.jsonl", "a") as f:
            f.write(json.dumps(line) + "\n")
        shown = {k.removeprefix("em_"): f"{v:.2f}" for k, v in mean.items()}
        bar.set_postfix(shown | {"len": stage.length, "Mtok": f"{self.tokens / 1e6:.2f}"})


def parser(description: str | None) -> argparse.ArgumentParser:
    """The options shared by pre-training and fine-tuning."""
    p = argparse.ArgumentParser(
        description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    p.add_argument("--out", required=True, help="folder for checkpoint.pt and log.jsonl")
    p.add_argument("--tokenizer", required=True, help="tokenizer folder; trained there if missing")
    p.add_argument("--stages", default="256x5:400", help="comma list of LENGTHxROWS:STEPS")
    p.add_argument("--init", default="", help="checkpoint to start from (weights only)")
    p.add_argument("--grow", default="", help="draft checkpoint to grow the target from")
    p.add_argument("--lr", type=float, default=3e-3)
    p.add_argument("--warmup", type=int, default=50, help="steps")
    p.add_argument("--decay", type=float, default=0.25, help="share of all steps")
    p.add_argument("--guide", type=float, default=GUIDE_WEIGHT, help="weight of the attention guides")
    p.add_argument("--repeat", type=float, default=0.08, help="share of random-repetition rows")
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--compile", type=int, default=1)
    p.add_argument("--quiet", action="store_true")
    return p


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    p = parser(__doc__)
    p.add_argument("model", choices=sorted(SHAPES))
    return p.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    Trainer(parse_args(argv)).run()


if __name__ == "__main__":
    main()
