"""Dense decode attention that also yields its logits and key norms, in one pass over the keys.

This is two-segment attention with an empty segment 1. A window of more than one query serves the end of a prompt:
its last queries are asked again, over the keys that prefill has stored.
"""

import torch

from fathom.kernels.two_segment_attention import (
    Evidence,
    SegmentPlan,
    plan_segments,
    two_segment_attention,
    two_segment_attention_reference,
)


def plan_dense(rows: torch.Tensor, lengths: torch.Tensor, kv_heads: int) -> SegmentPlan:
    """Plan a pass in which request i reads its whole table and keeps row i of the evidence.

    Args:
        rows: [batch] row of each request in the page table; lengths: [batch] entries it holds, the queries' own
            included.
    """
    nothing = torch.zeros_like(rows)
    kept = torch.arange(len(rows), device=rows.device)
    return plan_segments(rows, nothing, lengths, nothing, nothing, kept, kv_heads)


def new_evidence(
    capacity: int, heads: int, kv_heads: int, window: int, width: int, device: torch.device | str = "cpu"
) -> Evidence:
    """Uninitialised evidence; ``width`` is the largest number of table entries."""
    logits = torch.empty(capacity, heads, window, width, dtype=torch.float32, device=device)
    return Evidence(logits, torch.empty(capacity, kv_heads, width, dtype=torch.float32, device=device))


def decode_logits(
    query: torch.Tensor,
    pool: tuple[torch.Tensor, torch.Tensor],
    page_table: torch.Tensor,
    plan: SegmentPlan,
    scale: float,
    evidence: Evidence,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of the last ``window`` tokens of each request; logits and key norms go to ``evidence``.

    Args:
        query: [batch, window, heads, head_dim]. The rest as in :func:`two_segment_attention`.

    Returns:
        output [batch, window, heads, value_dim] float32 and log-sum-exp [batch, window, heads] float32.
    """
    return two_segment_attention(query, pool, pool, page_table, plan, scale, evidence)


def decode_logits_reference(
    query: torch.Tensor,
    pool: tuple[torch.Tensor, torch.Tensor],
    page_table: torch.Tensor,
    plan: SegmentPlan,
    scale: float,
    evidence: Evidence,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Reference for :func:`decode_logits`; same shapes."""
    return two_segment_attention_reference(query, pool, pool, page_table, plan, scale, evidence)
