"""Offline proof that the pair can judge the mechanisms: exact attention, explicit masks, float32.

Every policy is scored by exact match of the whole answer. The answer is teacher-forced: greedy decoding
gives the expected answer exactly if every argmax along it agrees. Each selection has a random control of
equal size.

`python -m fathom.demo.judge --target demo/models/target --draft demo/models/draft`
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from .corpus import TASKS, eval_samples, prompt_ids
from .export import load_model
from .model import Llama, rms_norm, rope_tables
from .tokenizer import encode, load_tokenizer, trigger_ids

WINDOW, POOL = 8, 7
CHUNK, LOOKAHEAD, SMOOTH = 32, 8, 13
SINK, RECENT, SEED_ROWS = 4, 64, 16
Visible = Callable[[int, Tensor], Tensor | None]


@dataclass(frozen=True)
class Item:
    """A tokenised sample: prompt ids [n], answer ids with the end token [m]."""

    task: str
    prompt: list[int]
    answer: list[int]


@torch.no_grad()
def forward(model: Llama, ids: list[int], positions: list[int], visible: Visible | None = None) -> Tensor:
    """Logits [T, vocab]. `visible(layer, scores [H, T, T])` may narrow the causal mask by a bool mask that
    broadcasts to [H, T, T]; scores are scaled, before softmax, -inf in the future."""
    cfg = model.cfg
    cos, sin = rope_tables(torch.tensor([positions]), cfg, torch.float32)
    x = F.embedding(torch.tensor([ids]), model.embedding)
    future = torch.ones(len(ids), len(ids), dtype=torch.bool).triu(1)
    share = cfg.heads // cfg.kv_heads
    for i, layer in enumerate(model.layers):
        q, k, v = layer.project(x, cos, sin)
        k, v = k.repeat_interleave(share, 1), v.repeat_interleave(share, 1)
        if visible is None:
            x = layer.finish(x, F.scaled_dot_product_attention(q, k, v, is_causal=True))
            continue
        scores = (q @ k.mT)[0] * cfg.head_dim**-0.5
        scores.masked_fill_(future, -math.inf)
        mask = visible(i, scores)
        if mask is not None:
            scores = scores.masked_fill(~mask, -math.inf)
        x = layer.finish(x, (scores.softmax(-1) @ v[0])[None])
    return (rms_norm(x, model.norm, cfg.eps) @ model.embedding.T)[0]


def answered(logits: Tensor, answer: list[int]) -> bool:
    """Whether greedy decoding from these teacher-forced logits writes exactly `answer`."""
    rows = logits[-len(answer) - 1 : -1]
    return bool((rows.argmax(-1) == torch.tensor(answer)).all())


def top_mask(score: Tensor, count: int, rng: torch.Generator | None) -> Tensor:
    """Bool mask [..., n] of the `count` best entries (ties to the lower index), or of random ones."""
    if rng is not None:
        score = torch.rand(score.shape, generator=rng)
    order = torch.sort(score, dim=-1, descending=True, stable=True).indices[..., : max(0, count)]
    return torch.zeros(score.shape, dtype=torch.bool).scatter(-1, order, True)


def window_saliency(scores: Tensor, n: int, groups: int) -> Tensor:
    """FastKV saliency [groups, n - WINDOW] of the prompt tokens before the window. scores: [H, T, T]."""
    rows = scores[:, n - WINDOW : n, :n].softmax(-1).mean(1)[:, : n - WINDOW]
    rows = F.max_pool1d(rows[:, None], POOL, stride=1, padding=POOL // 2)[:, 0]
    return rows.view(groups, -1, rows.shape[-1]).mean(1)


def retention(
    model: Llama, n: int, rate: float, rng: torch.Generator | None = None, above: int = 0
) -> Visible:
    """After prefill each KV head keeps ceil(rate * n) prompt tokens in layers above `above`."""
    share = model.cfg.heads // model.cfg.kv_heads

    def visible(layer: int, scores: Tensor) -> Tensor | None:
        if layer < above:
            return None
        saliency = window_saliency(scores, n, model.cfg.kv_heads)
        keep = top_mask(saliency, math.ceil(rate * n) - WINDOW, rng).repeat_interleave(share, 0)
        mask = torch.ones(scores.shape, dtype=torch.bool)
        mask[:, n:, : n - WINDOW] = keep[:, None]
        return mask

    return visible


def propagation(n: int, depth: int, rate: float, rng: torch.Generator | None = None) -> Visible:
    """Above layer `depth` only ceil(rate * n) prompt tokens exist, chosen in layer `depth` over all heads."""
    keep: list[Tensor] = []

    def visible(layer: int, scores: Tensor) -> Tensor | None:
        if layer == depth - 1:
            saliency = window_saliency(scores, n, 1)[0]
            keep.append(top_mask(saliency, math.ceil(rate * n) - WINDOW, rng))
        if layer < depth:
            return None
        mask = torch.ones(scores.shape[1:], dtype=torch.bool)
        mask[:, : n - WINDOW] = keep[0]
        mask.fill_diagonal_(True)
        return mask

    return visible


def speed(n: int, cutoff: int, anchor: bool = True) -> Visible:
    """Above layer `cutoff` only the first token, the last prompt token and answer tokens exist (Eq. 5)."""

    def visible(layer: int, scores: Tensor) -> Tensor | None:
        if layer < cutoff:
            return None
        mask = torch.ones(scores.shape[1:], dtype=torch.bool)
        mask[:, int(anchor) : n - 1] = False
        return mask.fill_diagonal_(True)

    return visible


def slow_fast(
    model: Llama, ids: list[int], n: int, rate: float, triggers: set[int], rng: torch.Generator | None = None
) -> Visible:
    """Decode steps read sink, recent and the entries their last slow step selected, ceil(rate * n) in all.

    A slow step is one whose input is a trigger; the prompt's last rows seed the selection.
    """
    share = model.cfg.heads // model.cfg.kv_heads
    count = math.ceil(rate * n) - SINK - RECENT
    total = len(ids)

    def select(scores: Tensor, rows: slice, end: int) -> Tensor:
        """Mask [KV, T] for steps that follow row `end`: candidates are all but sink and recent."""
        weight = scores[:, rows, : end + 1].softmax(-1).mean(1)
        weight = weight.view(model.cfg.kv_heads, share, -1).mean(1)
        last = max(SINK, end + 1 - RECENT)
        keep = torch.zeros(model.cfg.kv_heads, total, dtype=torch.bool)
        keep[:, SINK:last] = top_mask(weight[:, SINK:last], count, rng)
        return keep

    def visible(layer: int, scores: Tensor) -> Tensor:
        mask = torch.ones(model.cfg.kv_heads, total, total, dtype=torch.bool)
        keep = select(scores, slice(n - SEED_ROWS, n), n - 1)
        for t in range(n, total):
            if ids[t] in triggers:
                keep = select(scores, slice(t, t + 1), t)
                continue
            row = keep.clone()
            row[:, :SINK] = True
            row[:, max(0, t + 1 - RECENT) :] = True
            mask[:, t] = row
        return mask.repeat_interleave(share, 0)

    return visible


@torch.no_grad()
def extend(
    model: Llama, ids: list[int], start: int, cache: list[tuple[Tensor, Tensor]]
) -> tuple[Tensor, list[Tensor]]:
    """Run `ids` at positions from `start` on behind `cache` (extended in place).

    Returns the logits [vocab] of the last row and, per layer, that row's scores [H, start + len(ids)].
    """
    cfg, seen = model.cfg, []
    cos, sin = rope_tables(torch.arange(start, start + len(ids))[None], cfg, torch.float32)
    x = F.embedding(torch.tensor([ids]), model.embedding)
    future = torch.ones(len(ids), start + len(ids), dtype=torch.bool).triu(start + 1)
    for i, layer in enumerate(model.layers):
        q, k, v = layer.project(x, cos, sin)
        if i == len(cache):
            cache.append((k, v))
        else:
            cache[i] = (torch.cat([cache[i][0], k], 2), torch.cat([cache[i][1], v], 2))
        keys, values = (t.repeat_interleave(cfg.heads // cfg.kv_heads, 1) for t in cache[i])
        scores = ((q @ keys.mT)[0] * cfg.head_dim**-0.5).masked_fill(future, -math.inf)
        seen.append(scores[:, -1])
        x = layer.finish(x, (scores.softmax(-1) @ values[0])[None])
    return rms_norm(x[0, -1], model.norm, cfg.eps) @ model.embedding.T, seen


def look_ahead(draft: Llama, prompt: list[int], end: int) -> tuple[Tensor, list[int]]:
    """SpecPrefill importance [n] per prompt token, and the draft's greedy look-ahead tokens."""
    n, rows = len(prompt), []
    cache: list = []
    logits, seen = extend(draft, prompt, 0, cache)
    ahead = [int(logits.argmax())]
    while True:
        weights = torch.stack(seen)[:, :, :n].softmax(-1)
        rows.append(F.avg_pool1d(weights, SMOOTH, stride=1, padding=SMOOTH // 2).amax((0, 1)))
        if ahead[-1] == end or len(ahead) == LOOKAHEAD:
            return torch.stack(rows).mean(0), ahead
        logits, seen = extend(draft, ahead[-1:], n + len(ahead) - 1, cache)
        ahead.append(int(logits.argmax()))


def kept_chunks(importance: Tensor, n: int, rate: float, rng: torch.Generator | None = None) -> list[int]:
    """Kept prompt positions: whole chunks, first and last always (the generation header is one token)."""
    chunks = math.ceil(n / CHUNK)
    score = torch.stack([importance[i * CHUNK : (i + 1) * CHUNK].mean() for i in range(chunks)])
    if rng is not None:
        score = torch.rand(chunks, generator=rng)
    score[0] = score[-1] = math.inf
    keep = top_mask(score, max(2, math.ceil(rate * chunks)), None)
    return [t for t in range(n) if keep[t // CHUNK]]


class Judge:
    """Scores policies for one pair."""

    def __init__(self, target: Llama, draft: Llama | None, tokenizer, seed: int = 0):
        self.target, self.draft, self.tokenizer, self.seed = target, draft, tokenizer, seed
        self.triggers = set(trigger_ids(tokenizer))
        self.end = tokenizer.eos_token_id
        self.importance: dict[int, Tensor] = {}

    def items(self, task: str, context: int, n: int) -> list[Item]:
        samples = eval_samples(task, context, n, self.seed, self.tokenizer)
        return [
            Item(task, prompt_ids(self.tokenizer, s.messages), [*encode(self.tokenizer, s.answer), self.end])
            for s in samples
        ]

    def score(self, item: Item, policy: str, rate: float = 0.2, control: bool = False) -> bool:
        """Exact match under `policy`; `control` replaces the selection by a random one of equal size."""
        model, n = self.target, len(item.prompt)
        ids = item.prompt + item.answer
        rng = torch.Generator().manual_seed(n) if control else None
        positions = list(range(len(ids)))
        if policy.startswith("specprefill"):
            if id(item) not in self.importance:
                assert self.draft is not None, "SpecPrefill is judged with a draft"
                self.importance[id(item)] = look_ahead(self.draft, item.prompt, self.end)[0]
            kept = kept_chunks(self.importance[id(item)], n, rate, rng)
            ids = [item.prompt[t] for t in kept] + item.answer
            return answered(forward(model, ids, kept + positions[n:]), item.answer)
        name, _, arg = policy.partition("@")
        visible = {
            "dense": lambda: None,
            "draft": lambda: None,
            "retention": lambda: retention(model, n, rate, rng, int(arg or 0)),
            "propagation": lambda: propagation(n, int(arg or model.cfg.layers // 2), rate, rng),
            "sfi": lambda: slow_fast(model, ids, n, rate, self.triggers, rng),
            "speed": lambda: speed(n, int(arg or 1)),
            "speed-no-anchor": lambda: speed(n, int(arg or 1), anchor=False),
        }[name]()
        scored = self.draft if name == "draft" else model
        return answered(forward(scored, ids, positions, visible), item.answer)

    def acceptance(self, items: list[Item]) -> float:
        """Share of answer tokens on which the draft's argmax equals the target's (answers teacher-forced)."""
        same = total = 0
        for item in items:
            ids = item.prompt + item.answer
            rows = slice(len(item.prompt) - 1, len(ids) - 1)
            places = list(range(len(ids)))
            picks = [forward(m, ids, places)[rows].argmax(-1) for m in (self.target, self.draft)]
            same += int((picks[0] == picks[1]).sum())
            total += len(item.answer)
        return same / max(1, total)

    def table(
        self, policies: list[tuple[str, float, bool]], tasks: list[str], context: int, n: int
    ) -> list[dict]:
        """One row per policy and task: exact match in percent of `n` samples."""
        rows = []
        for task in tasks:
            items = self.items(task, context, n)
            self.importance.clear()
            for policy, rate, control in tqdm(policies, desc=f"{task} {context}"):
                hits = sum(self.score(i, policy, rate, control) for i in items)
                row = {"context": context, "task": task, "policy": policy, "rate": rate}
                rows.append(row | {"random": control, "n": n, "exact_match": round(100 * hits / n, 1)})
        return rows


def standard_policies(rates: list[float]) -> list[tuple[str, float, bool]]:
    """Dense and, for every rate, each selection with its random control."""
    out = [("dense", 1.0, False), ("draft", 1.0, False)]
    for rate in rates:
        for policy in ("retention", "propagation", "specprefill", "sfi"):
            out += [(policy, rate, False), (policy, rate, True)]
    return out


def show(rows: list[dict]) -> str:
    """A Markdown table: policies down, tasks across."""
    tasks = list(dict.fromkeys(r["task"] for r in rows))
    lines = ["| policy | " + " | ".join(tasks) + " |", "|---" * (len(tasks) + 1) + "|"]
    table: dict[str, dict[str, float]] = {}
    for r in rows:
        rate = "" if r["rate"] == 1.0 else f" {r['rate']:.0%}"
        name = r["policy"] + rate + (" random" if r["random"] else "")
        table.setdefault(f"{name}, {r['context']}", {})[r["task"]] = r["exact_match"]
    for name, cells in table.items():
        lines.append(f"| {name} | " + " | ".join(f"{cells.get(t, math.nan):.0f}" for t in tasks) + " |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--target", required=True)
    p.add_argument("--draft", required=True)
    p.add_argument("--tokenizer", default="", help="default: the target's folder")
    p.add_argument("--tasks", default=",".join(TASKS))
    p.add_argument("--policies", default="", help="comma list of POLICY[@LAYER]; default: all, with controls")
    p.add_argument("--contexts", default="1024")
    p.add_argument("--rates", default="0.15,0.2")
    p.add_argument("-n", type=int, default=40)
    p.add_argument("--threads", type=int, default=1)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--acceptance", action="store_true")
    p.add_argument("--csv", default="")
    args = p.parse_args(argv)
    torch.set_num_threads(args.threads)
    random.seed(args.seed)
    tokenizer = load_tokenizer(args.tokenizer or args.target)
    judge = Judge(load_model(args.target), load_model(args.draft), tokenizer, args.seed)
    policies = standard_policies([float(r) for r in args.rates.split(",")])
    if args.policies:
        policies = [(x, 1.0, False) for x in args.policies.split(",")]
    rows = []
    for context in (int(c) for c in args.contexts.split(",")):
        rows += judge.table(policies, args.tasks.split(","), context, args.n)
        if args.acceptance:
            for task in args.tasks.split(","):
                rate = judge.acceptance(judge.items(task, context, args.n))
                print(json.dumps({"context": context, "task": task, "acceptance": round(rate, 4)}))
    print(show(rows))
    if args.csv:
        with Path(args.csv).open("w", newline="") as f:
            writer = csv.DictWriter(f, fieldnames=list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
