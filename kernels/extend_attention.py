"""Extend attention: the new tokens of a request attend to its cached prefix and causally to themselves.

``extend_attention`` computes the two parts apart and merges them by log-sum-exp, so that no row of the prefix is
ever computed again and no mask is ever built; ``extend_attention_reference`` is the plain reference.
"""

import numpy as np
import torch


def merge_segments(
    output_a: torch.Tensor, lse_a: torch.Tensor, output_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over the union of two disjoint key sets from attention over each.

    Args:
        output_a, output_b: [..., value_dim] float32; lse_a, lse_b: [...] float32 log-sum-exp of the scores.

    Returns:
        The merged output and log-sum-exp, shapes as given.
    """
    lse = torch.logaddexp(lse_a, lse_b)
    weight_a = torch.exp(lse_a - lse).unsqueeze(-1)
    weight_b = torch.exp(lse_b - lse).unsqueeze(-1)
    return output_a * weight_a + output_b * weight_b, lse


def extend_attention_reference(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    reach: torch.Tensor | np.ndarray | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Reference for :func:`extend_attention` with an explicit mask, in float32; keys and values of the prefix come
    before the new ones'. Besides the output the log-sum-exp of the scores, [new, heads].
    """
    new, total = query.shape[0], keys.shape[0]
    group = query.shape[1] // keys.shape[1]
    k = keys.float().repeat_interleave(group, 1)
    v = values.float().repeat_interleave(group, 1)
    position = torch.arange(total - new, total).unsqueeze(1)
    key_position = torch.arange(total)
    visible = key_position <= position
    if reach is not None:
        visible &= key_position >= position - torch.as_tensor(reach).unsqueeze(1)
    scores = torch.einsum("thd,nhd->htn", query.float(), k) * scale
    scores = scores.masked_fill(~visible, float("-inf"))
    return torch.einsum("htn,nhd->thd", scores.softmax(-1), v), scores.logsumexp(-1).T


def extend_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    reach: torch.Tensor | np.ndarray | None = None,
    prefix: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """Attention of the new tokens of one request over its prefix and causally over themselves, on the CPU.

    Args:
        query: [new, heads, head_dim]; keys: [new, kv_heads, head_dim]; values: [new, kv_heads, value_dim]; one
            floating dtype, last dimension contiguous.
        scale: factor on the dot products.
        reach: [new] int64, how many earlier tokens each query sees besides itself; None for all. A query's place
            less its reach never decreases.
        prefix: keys and values of the tokens before the new ones, as above; None where there are none.

    Returns:
        [new, heads, value_dim] in the query's dtype.
    """
    before = 0 if prefix is None else len(prefix[0])
    first = None if reach is None else _first_seen(before, len(keys), reach)
    if query.shape[-1] != values.shape[-1] or (first is not None and first.any()):
        if prefix is not None:
            keys, values = torch.cat((prefix[0], keys)), torch.cat((prefix[1], values))
        return _masked(query, keys, values, scale, first)
    new, heads, head_dim = query.shape
    kv_heads = keys.shape[1]
    group = heads // kv_heads
    q = query.view(new, kv_heads, group, head_dim).permute(1, 2, 0, 3)
    output, lse = _flash(q, keys, values, group, scale, causal=True)
    if prefix is not None and before:
        # No mask on the prefix: the query heads of a KV group are rows of one problem.
        rows = q.reshape(kv_heads, 1, group * new, head_dim)
        output_prefix, lse_prefix = _flash(rows, *prefix, 1, scale, causal=False)
        output, _ = merge_segments(
            output.float(),
            lse,
            output_prefix.reshape(kv_heads, group, new, head_dim).float(),
            lse_prefix.reshape(kv_heads, group, new),
        )
    return output.permute(2, 0, 1, 3).reshape(new, heads, head_dim).to(query.dtype)


def _flash(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, group: int, scale: float, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """PyTorch's CPU flash attention with log-sum-exp; the KV heads are the batch, so nothing is repeated."""
    k = keys.permute(1, 0, 2).unsqueeze(1).expand(-1, group, -1, -1)
    v = values.permute(1, 0, 2).unsqueeze(1).expand(-1, group, -1, -1)
    output, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, k, v, 0.0, causal, scale=scale
    )
    return output, lse


def _first_seen(before: int, new: int, reach: torch.Tensor | np.ndarray) -> torch.Tensor:
    """[new] int64: the first key that each query sees."""
    return (torch.arange(before, before + new) - torch.as_tensor(reach)).clamp(min=0)


def _masked(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    first_seen: torch.Tensor | None,
    rows: int = 512,
) -> torch.Tensor:
    """Attention to keys from ``first_seen`` [new] int64 on, None for all: ``rows`` queries at a time over just the
    keys they can see.
    """
    new, total = query.shape[0], keys.shape[0]
    if first_seen is None:
        first_seen = torch.zeros(new, dtype=torch.int64)
    outputs = []
    for begin in range(0, new, rows):
        end = min(begin + rows, new)
        position = torch.arange(total - new + begin, total - new + end).unsqueeze(1)
        first = int(first_seen[begin])
        key_position = torch.arange(first, int(position[-1]) + 1)
        mask = (key_position <= position) & (key_position >= first_seen[begin:end].unsqueeze(1))
        outputs.append(
            torch.nn.functional.scaled_dot_product_attention(
                query[begin:end].transpose(0, 1).unsqueeze(0),
                keys[first : first + len(key_position)].transpose(0, 1).unsqueeze(0),
                values[first : first + len(key_position)].transpose(0, 1).unsqueeze(0),
                attn_mask=mask,
                scale=scale,
                enable_gqa=True,
            )[0].transpose(0, 1)
        )
    return torch.cat(outputs)
