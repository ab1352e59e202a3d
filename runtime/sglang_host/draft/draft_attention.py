"""The draft's attention, over virtual slots, and what it keeps of queries for those who ask."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fathom.runtime.kv.device_view import DeviceView
from fathom.runtime.kv.lists import ListView, SlotLists
from fathom.runtime.kv.view import SpanView
from fathom.runtime.sglang_host.attention import attention_layers
from fathom.runtime.sglang_host.attention.attention_layers import is_windowed
from fathom.runtime.sglang_host.attention.cpu_attention import CpuAttentionBackend
from fathom.runtime.sglang_host.attention.span_attention import SpanAttentionBackend
from fathom.runtime.sglang_host.attention.triton_attention import MOST_NEW, TritonAttentionBackend
from fathom.runtime.sglang_host.machine import devices

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch


PLAIN, LOOKING = "plain", "looking"
"""Captured steps of one token per request: plain ones, and such as keep the queries of all layers."""


@dataclass
class Captured:
    """Queries after rotary embedding of chosen rows, layer by layer.

    Attributes:
        rows: [chosen] rows of the pass that is running.
        queries: per layer, one tensor [chosen, heads, head_dim] for each pass.
        scale: factor on the dot products.
    """

    rows: torch.Tensor
    queries: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    scale: float = 1.0


class DraftReads(SpanAttentionBackend):
    """Attention over virtual slots: one view for all layers, set before each pass."""

    view: ListView
    captured: Captured | None = None

    @property
    def watched(self) -> bool:  # type: ignore[override]
        return self.captured is not None

    def span_of(self, layer_id: int) -> int:
        return 0

    def view_of(self, layer_id: int) -> ListView:
        return self.view

    def read(self, view: ListView, captured: Captured | None) -> None:
        """From here on the layers compute these rows, and keep the queries of some."""
        self.view, self.captured = view, captured

    def forward_decode(
        self, q: torch.Tensor, k: Any, v: Any, layer: "RadixAttention", *args: Any, **kw: Any
    ) -> Any:
        self._capture(q, layer)
        return super().forward_decode(q, k, v, layer, *args, **kw)

    def forward_extend(
        self, q: torch.Tensor, k: Any, v: Any, layer: "RadixAttention", *args: Any, **kw: Any
    ) -> Any:
        if not self.storing:
            self._capture(q, layer)
        return super().forward_extend(q, k, v, layer, *args, **kw)

    def _capture(self, q: torch.Tensor, layer: "RadixAttention") -> None:
        # A layer with a window does not look at all of a prompt: it cannot say what is worth keeping.
        if self.captured is not None and not is_windowed(layer):
            rows = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)[self.captured.rows]
            self.captured.queries.setdefault(layer.layer_id, []).append(rows.clone())
            self.captured.scale = layer.scaling


class DraftAttentionBackend(DraftReads, CpuAttentionBackend):
    """The draft's attention on a CPU."""


class TritonDraftBackend(DraftReads, TritonAttentionBackend):
    """The draft's attention in Triton.

    Attributes:
        queries: [layers, rows, heads, head_dim], of the rows of a captured step that keeps them.
        windowed: layers that keep none.
    """

    queries: torch.Tensor
    windowed: frozenset[int] = frozenset()
    several = True
    scale = 1.0
    read_done: Any = None
    """Event behind the last pass's only look at SGLang's request table: that its lists were placed."""

    def read(self, view: ListView, captured: Captured | None) -> None:
        super().read(view, captured)
        self.padded_to = 0

    def device_view(self, layer_id: int, span_view: SpanView) -> DeviceView:
        before = self.tables.placed
        there = super().device_view(layer_id, span_view)
        if self.tables.placed > before:
            self.read_done = torch.get_device_module(self.req_to_token.device).Event()
            self.read_done.record()
        return there

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        super().init_cuda_graph_state(max_bs, max_num_tokens)
        self.windowed = attention_layers.windowed(self.runner.model)
        config = self.runner.model_config
        heads, _ = devices.heads_of(config, self.runner.ps.tp_size)
        shape = self.token_to_kv_pool.layer_num, max_bs, heads, config.head_dim
        self.queries = torch.empty(shape, dtype=config.dtype, device=self.req_to_token.device)

    def replays(self, requests: int, entries: int) -> bool:
        new = np.diff(self.view.query)
        if int(new.max()) > (MOST_NEW if self.captured is None else 1):
            return False
        return self.tables.first.hold(requests, entries, int(new.sum()))

    def init_forward_metadata_out_graph(
        self, forward_batch: "ForwardBatch", in_capture: bool = False
    ) -> None:
        if in_capture:
            self.read(ListView(SlotLists([]), [], [], []), None)
        self.padded_to = forward_batch.batch_size
        self.device_view(0, self.view)
        self._fill_near([self.view])

    def _capture(self, q: torch.Tensor, layer: "RadixAttention") -> None:
        if self.captures == LOOKING and not is_windowed(layer):
            kept = self.queries[layer.layer_id, : len(q)]
            kept.copy_(q.reshape(kept.shape))
            self.scale = layer.scaling
        super()._capture(q, layer)

    def hand_over(self, rows: int) -> None:
        """Copy the queries of the rows that a replayed step was for to where they were asked for."""
        if self.captured is not None:
            for layer, own in enumerate(self.queries[:, :rows].clone()):
                if layer in self.windowed:
                    continue
                self.captured.queries.setdefault(layer, []).append(own)
            self.captured.scale = self.scale
