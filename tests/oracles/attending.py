"""A Transformers model, of any family, whose attention is a function of the test's own."""

from collections.abc import Callable, Sequence

import torch
from transformers import AttentionInterface

Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]
"""(layer, query [heads, n, dim], key and value [kv_heads, n, dim], all rotated, scale) -> [heads, n, dim]."""

_asked: list[Attend] = []


def _attention(module, query, key, value, mask, scaling, **_):
    kept = (stored(x[0], getattr(module.config, "kv_dtype", None)) for x in (key, value))
    mixed = _asked[-1](module.layer_idx, query[0], *kept, scaling)
    return mixed.transpose(0, 1).unsqueeze(0), None


AttentionInterface.register("asked", _attention)


def stored(x: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """What is left of keys or values that are kept as numbers of 8 bits: the nearest, or the largest."""
    if dtype is None:
        return x
    most = torch.finfo(dtype).max
    return x.clamp(-most, most).to(dtype).to(x.dtype)


@torch.no_grad()
def forward(
    model, ids: Sequence[int], attend: Attend, positions: torch.Tensor | None = None, rows: int = 1
) -> torch.Tensor:
    """Run tokens through all layers; nothing is cached. A model whose config has a ``kv_dtype`` keeps its keys and
    values in it.

    Args:
        attend: called once per layer, in their order.
        positions: [n]; from 0 on if left out.
        rows: how many of the last tokens to return.

    Returns:
        Logits [rows, vocabulary] float32.
    """
    positions = torch.arange(len(ids)) if positions is None else positions
    before, model.config._attn_implementation = model.config._attn_implementation, "asked"
    _asked.append(attend)
    try:
        found = model(
            input_ids=torch.tensor([list(ids)]),
            position_ids=positions.unsqueeze(0),
            use_cache=False,
            logits_to_keep=rows,
        )
    finally:
        _asked.pop()
        model.config._attn_implementation = before
    return found.logits[0].float()


def masked(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, visible: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention under an explicit mask.

    Args:
        query: [heads, n, dim]; key, value: [kv_heads, length, dim].
        visible: bool that broadcasts to [kv_heads, n, length]; at least one entry of each row is true.

    Returns:
        [heads, n, dim], and the masked logits [kv_heads, group, n, length].
    """
    heads, n, _ = query.shape
    grouped = query.reshape(len(key), -1, *query.shape[1:])
    logits = grouped @ key.unsqueeze(1).transpose(-1, -2) * scale
    logits = logits.masked_fill(~visible.unsqueeze(-3), float("-inf"))
    return (logits.softmax(-1) @ value.unsqueeze(1)).reshape(heads, n, -1), logits


def causal(n: int) -> torch.Tensor:
    """[n, n] bool: each row sees itself and what came before."""
    return torch.ones(n, n, dtype=torch.bool).tril()


def windows(model) -> list[int | None]:
    """Of each layer how many tokens, itself the last, a token sees; None for all before it."""
    config = model.config
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    return [config.sliding_window if kind == "sliding_attention" else None for kind in kinds]


def near(rows: Sequence[int], columns: int, window: int | None) -> torch.Tensor:
    """[rows, columns] bool: whether the token at a position sees that far back."""
    position = torch.tensor([*rows]).unsqueeze(1)
    return torch.arange(columns) > position - (position.max() + 1 if window is None else window)


def only(exists, n: int) -> torch.Tensor:
    """[n, n] bool: rows see those before them that exist, and themselves.

    A position that does not exist is no key for any other: what is computed for it has no effect.
    """
    there = torch.zeros(n, dtype=torch.bool)
    there[sorted(exists)] = True
    return causal(n) & (there | torch.eye(n, dtype=torch.bool))
