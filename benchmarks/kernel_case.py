"""One layer's decode attention to be timed: random KV of many requests, read whole or through two segments."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from fathom.kernels.two_segment_attention import plan_segments, two_segment_attention

RECENT = 256
"""Tokens that SFI reads in place (Slow-Fast Inference, section 5.1)."""


def call_seconds(call: Callable[[], Any], device: torch.device) -> float:
    """Time of one call; on a GPU between two events."""
    if device.type == "cuda":
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        call()
        last.record()
        torch.cuda.synchronize()
        return first.elapsed_time(last) / 1e3
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


@dataclass
class KernelCase:
    """Queries, a pool with each request's KV, and a compact buffer as large.

    Attributes:
        batch, length: requests, and KV entries of each.
        heads, kv_heads, head_dim: of the layer.
        dtype, device: of queries and KV.
        scattered: slots in random order, as in a pool long in use, instead of ascending.
    """

    batch: int
    length: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    scattered: bool = False

    def __post_init__(self) -> None:
        total, self.scale = self.batch * self.length, self.head_dim**-0.5
        source = torch.Generator(self.device).manual_seed(0)

        def draw(*size: int) -> torch.Tensor:
            return torch.randn(*size, generator=source, device=self.device).to(self.dtype)

        self.query = draw(self.batch, self.heads, self.head_dim)
        entries = (total, self.kv_heads, self.head_dim)
        self.pool = draw(*entries), draw(*entries)
        # A head's tokens lie together, as in a server's compact buffers.
        apart = self.kv_heads, total, self.head_dim
        self.compact = draw(*apart).transpose(0, 1), draw(*apart).transpose(0, 1)
        at = {"device": self.device}
        slots = torch.randperm(total, generator=source, **at) if self.scattered else torch.arange(total, **at)
        self.table = slots.to(torch.int32).view(self.batch, self.length).contiguous()

    def dense(self) -> Callable[[], torch.Tensor]:
        """The CPU kernel of dense decode steps; [batch, heads, head_dim]."""
        from fathom.kernels.paged_attention_cpu import paged_attention, plan_packed

        one_each = np.arange(self.batch + 1)
        tasks = plan_packed(one_each * self.length, one_each, self.kv_heads)
        slots = self.table.view(1, -1)
        return lambda: paged_attention(self.query, self.pool, slots, tasks, self.scale)[0]

    def two_segments(self, read: int) -> Callable[[], torch.Tensor]:
        """The kernel of fast steps, reading this many entries of each request; [batch, heads, head_dim].

        Up to `RECENT` of them, and half, are the last of its table; all of them where all entries are read.
        """
        recent = min(RECENT, read // 2) if read < self.length else self.length
        rows = torch.arange(self.batch, device=self.device)
        one = torch.ones_like(rows)
        begin, end, packed = one * (self.length - recent), one * self.length, one * (read - recent)
        plan = plan_segments(rows, begin, end, rows * self.length, packed, -one, self.kv_heads)
        query = self.query.contiguous()
        where = self.pool, self.compact, self.table
        return lambda: two_segment_attention(query, *where, plan, self.scale)[0]
