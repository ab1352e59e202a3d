"""Slow-Fast Inference by the book: Algorithms 1 and 2 in plain PyTorch, one request, explicit masks.

Works on a Transformers decoder in float32. Keys are cached and every step reads them all under a mask, so a step
costs what dense decoding costs.
"""

import itertools
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import torch
from oracles import attending


@dataclass(frozen=True)
class Settings:
    """The paper's numbers under the paper's names; counts in tokens."""

    sink: int = 4
    recent: int = 256
    k: int = 2048
    t_max: int = 64
    gap: int = 0  # fast steps that must follow a slow one before a trigger counts; the trigger is remembered
    alpha: float = 0.5
    gamma: float = 0.5
    beta: float = 0.568
    p: float = 1.8
    eta: float = 0.4
    lambda_clip: float = 0.02
    alpha_soft: float = 0.5
    radius: int = 16
    alpha_cross: float = 0.35
    temperature: float = 2.0
    eps: float = 1e-8
    devices: int = 1  # that have as many heads each; only the heads of one compete


def settings_of(config, selector) -> Settings:
    """The engine's numbers of a request and of its Selector under the paper's names."""
    return Settings(
        sink=config.sink,
        recent=config.recent,
        k=config.selected,
        t_max=config.refresh_budget,
        gap=config.minimum_gap,
        alpha=selector.power,
        gamma=selector.norm_decay,
        beta=selector.position_decay,
        p=selector.position_curve,
        eta=selector.tail_brake,
        lambda_clip=selector.prior_clip,
        alpha_soft=selector.nms_strength,
        radius=selector.nms_radius,
        alpha_cross=selector.cross_head,
        temperature=selector.temperature,
        eps=selector.epsilon,
    )


def fused_score(logits: torch.Tensor, norms: torch.Tensor, s: Settings) -> tuple[torch.Tensor, float]:
    """Eqs. 6 to 18 for one KV head.

    Args:
        logits: [queries, |J|] of all query rows that read this head; norms: [|J|].

    Returns:
        s(j), [|J|], and lambda*.
    """
    count = logits.shape[1]
    mu = torch.zeros(count)
    for row in logits:
        e = torch.exp(row - row.max())
        mu += (e / e.sum()) ** s.alpha
    mu /= len(logits)
    f = mu ** (1 / s.alpha)
    f = f / f.sum()
    u = torch.arange(count, dtype=torch.float32) / (count - 1 + s.eps)
    prior = (norms + s.eps) ** -s.gamma
    prior = prior * torch.exp(-s.beta * u**s.p) * (1 - u + s.eps) ** s.eta
    r = prior / prior.sum()
    f2, r2 = f.double(), r.double()  # the differences below cancel where f and r are close
    top = float(f2 @ f2 - f2 @ r2)
    bottom = float(f2 @ f2 - 2 * (f2 @ r2) + r2 @ r2)
    lam = min(max(top / bottom, 0.0), s.lambda_clip) if bottom > 0 else 0.0
    return (1 - lam) * f + lam * r, lam


def refined_scores(scores: list[torch.Tensor], s: Settings) -> list[torch.Tensor]:
    """Eqs. 19 to 23 for the KV heads of one layer, each [|J|]."""
    suppressed = []
    for head in scores:
        z = torch.log(head + s.eps)
        peak = z.clone()
        for shift in range(1, min(s.radius, len(z) - 1) + 1):
            peak[shift:] = torch.maximum(peak[shift:], z[:-shift])
            peak[:-shift] = torch.maximum(peak[:-shift], z[shift:])
        suppressed.append(z - s.alpha_soft * torch.clamp(peak - z, min=0))
    column = torch.stack(suppressed)
    e = torch.exp((column - column.max(0).values) / s.temperature)
    responsibility = e / e.sum(0)
    return [
        z + s.alpha_cross * torch.log(torch.clamp(share, min=s.eps))
        for z, share in zip(suppressed, responsibility, strict=True)
    ]


def selector(
    logits: list[torch.Tensor], norms: list[torch.Tensor], candidates: range, s: Settings
) -> list[list[int]]:
    """Algorithm 2 for one layer: per KV head the chosen positions, ascending.

    Args:
        logits: per KV head [queries, length]; norms: per KV head [length].
    """
    if not len(candidates):
        return [[] for _ in logits]
    own = slice(candidates.start, candidates.stop)
    fused = [fused_score(rows[:, own], n[own], s)[0] for rows, n in zip(logits, norms, strict=True)]
    chosen, size = [], len(fused) // s.devices
    for device in range(s.devices):
        for z in refined_scores(fused[device * size : (device + 1) * size], s):
            best = torch.argsort(z, descending=True, stable=True)[: s.k]
            chosen.append(sorted(candidates.start + int(j) for j in best))
    return chosen


@dataclass
class Generation:
    """What one request did. Entry i of ``slow``, ``selected`` and ``logits[i + 1]`` belongs to ``tokens[i + 1]``.

    Attributes:
        tokens: generated ids, the first one from prefill.
        slow: per decode step.
        selected: per decode step, [layer][KV head] positions chosen in it; None for a fast step.
        logits: float32 [vocabulary] per token.
    """

    tokens: list[int] = field(default_factory=list)
    slow: list[bool] = field(default_factory=list)
    selected: list[list[list[list[int]]] | None] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)


class CachedModel:
    """A Transformers model whose attention reads a cache of plain tensors under a mask."""

    def __init__(self, model, capacity: int) -> None:
        config = model.config
        self.model = model
        self.kv_heads = config.num_key_value_heads
        self.heads = config.num_attention_heads
        self.dim = getattr(config, "head_dim", None) or config.hidden_size // self.heads
        shape = (config.num_hidden_layers, self.kv_heads, capacity, self.dim)
        self.keys, self.values = torch.zeros(shape), torch.zeros(shape)
        self.length = 0

    def forward(self, ids: list[int], visible) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Run the next tokens.

        Args:
            visible: (layer) -> bool mask that broadcasts to [kv_heads, n, length].

        Returns:
            Logits of the last token [vocabulary]; per layer the masked attention logits [kv_heads, group, n,
            length].
        """
        positions = torch.arange(self.length, self.length + len(ids))
        self.length += len(ids)
        observed = []

        def attend(i, q, k, v, scale):
            self.keys[i, :, positions], self.values[i, :, positions] = k, v
            cached = (x[i, :, : self.length] for x in (self.keys, self.values))
            mixed, logits = attending.masked(q, *cached, visible(i), scale)
            observed.append(logits)
            return mixed

        return attending.forward(self.model, ids, attend, positions)[-1], observed


@torch.inference_mode()
def generate(
    model,
    prompt: list[int],
    new_tokens: int,
    triggers: Collection[int],
    s: Settings = Settings(),
    exists: Callable[[int], Collection[int]] | None = None,
) -> Generation:
    """Algorithm 1: greedy decoding of ``new_tokens`` tokens (no stop at EOS).

    Args:
        exists: layer (from 0) -> prompt positions that are kept there; None for all. A layer's sink, candidates and
            recent tokens are counted among what exists at it; a layer with less than the sink is read whole until
            the next refresh.
    """
    result = Generation()
    capacity = len(prompt) + new_tokens
    cached = CachedModel(model, capacity)
    there = torch.ones(cached.keys.shape[0], capacity, dtype=torch.bool)
    if exists is not None:
        for i, row in enumerate(there):
            row[: len(prompt)] = False
            row[sorted(exists(i))] = True

    def table(i: int) -> torch.Tensor:
        """Positions that layer i holds, ascending."""
        return there[i, : cached.length].nonzero().flatten()

    def choose(observed: list[torch.Tensor]) -> list[list[list[int]]]:
        per_layer = []
        for i, scores in enumerate(observed):
            own = table(i)
            candidates = range(s.sink, max(len(own) - s.recent, s.sink))
            rows = [head.reshape(-1, cached.length)[:, own] for head in scores]
            norms = [k[own].norm(dim=-1) for k in cached.keys[i]]
            chosen = selector(rows, norms, candidates, s)
            per_layer.append([own[torch.tensor(head, dtype=torch.long)].tolist() for head in chosen])
        return per_layer

    chunk = 512
    cuts = [*range(0, len(prompt), chunk), len(prompt)]
    for begin, end in itertools.pairwise(cuts):
        row, column = torch.arange(begin, end).unsqueeze(1), torch.arange(end)

        def causal(i, row=row, column=column):
            return ((column <= row) & (there[i, : len(column)] | (column == row))).unsqueeze(0)

        logits, _ = cached.forward(prompt[begin:end], causal)
    result.tokens.append(int(logits.argmax()))
    result.logits.append(logits)

    def sink_and_selected(selection: list[list[list[int]]]) -> list[torch.Tensor]:
        """Per layer [kv_heads, 1, capacity] bool."""
        masks = [torch.zeros(cached.kv_heads, 1, capacity, dtype=torch.bool) for _ in selection]
        for i, (mask, heads) in enumerate(zip(masks, selection, strict=True)):
            own = table(i)
            mask[..., own[: s.sink]] = True
            if len(own) < s.sink:
                mask[..., cached.length :] = True
            for h, chosen in enumerate(heads):
                mask[h, 0, chosen] = True
        return masks

    def recent_of(i: int) -> torch.Tensor:
        """[capacity] bool, the last entries of layer i."""
        mask = torch.zeros(capacity, dtype=torch.bool)
        mask[table(i)[-s.recent :]] = True
        return mask

    selection: list[list[list[int]]] | None = None
    kept: list[torch.Tensor] = []
    fast_run, boundary = 0, result.tokens[0] in triggers
    while len(result.tokens) < new_tokens:
        slow = selection is None or fast_run >= s.t_max or (boundary and fast_run >= s.gap)
        length = cached.length + 1
        if slow:
            logits, observed = cached.forward(result.tokens[-1:], lambda i: there[i, :length][None, None])  # noqa: B023
            # There is nothing to reuse before all sink tokens exist: shorter contexts stay slow.
            if length >= s.sink:
                selection = choose(observed)
                kept = sink_and_selected(selection)
                fast_run, boundary = 0, False
        else:
            logits, _ = cached.forward(
                result.tokens[-1:],
                lambda i: kept[i][..., :length] | recent_of(i)[:length],  # noqa: B023
            )
            fast_run += 1
        result.slow.append(slow)
        result.selected.append(selection if slow else None)
        result.tokens.append(int(logits.argmax()))
        result.logits.append(logits)
        boundary = boundary or result.tokens[-1] in triggers
    return result
