"""SGLang's attention backend on the Triton kernels in ``kernels/``, for depth pages on a GPU.

Without a GPU it runs in Triton's interpreter, one program after the other: how it is tested.
"""

from typing import TYPE_CHECKING

import numpy as np
import torch
import triton

from fathom.kernels.paged_decode import paged_decode, pick_splits
from fathom.kernels.paged_extend import paged_extend
from fathom.runtime.kv.device_view import DeviceTables, DeviceView
from fathom.runtime.kv.mirror import PageMirror
from fathom.runtime.kv.view import SpanView, TableView
from fathom.runtime.sglang_host.span_attention import SpanAttentionBackend
from fathom.runtime.staging import send

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.model_runner import ModelRunner

TILE = 64
"""Rows (tokens times the query heads of a KV head) that a program of the extend kernel computes, roughly."""


class TritonAttentionBackend(SpanAttentionBackend):
    """Paged attention in Triton: float32, bfloat16 and float16, any group and head size, chunked prefill."""

    name = "Triton"
    mirror: PageMirror | None = None
    """Made at the first step that needs it: a draft's never do."""

    def __init__(self, model_runner: "ModelRunner") -> None:
        super().__init__(model_runner)
        if model_runner.sliding_window_size:
            raise NotImplementedError("the Triton attention backend has no sliding window")
        if model_runner.kv_cache_dtype not in (torch.float32, torch.float16, torch.bfloat16):
            raise NotImplementedError(
                f"the Triton attention backend has no {model_runner.kv_cache_dtype} KV; use --kv-cache-dtype auto"
            )
        rows, self.longest = self.req_to_token.shape
        device = self.req_to_token.device
        # Where prefixes are shared, the tables of a step may name more entries than there are slots.
        spans = getattr(self.kv_pool, "spans", 1)
        self.tables = DeviceTables(spans, rows, max(self.kv_pool.size, self.longest), rows, device)
        self.runner = model_runner
        self.processors = 1
        if device.type == "cuda":
            self.processors = torch.cuda.get_device_properties(device).multi_processor_count

    @property
    def looked_up_steps(self) -> int:
        """Steps whose page tables the device has written itself."""
        return self.tables.looked_up

    def device_view(self, layer_id: int, span_view: SpanView) -> DeviceView:
        """The view in the buffers of the layer's span."""
        span = self.span_of(layer_id)
        if isinstance(span_view, TableView) and not self.tables.holds(span, span_view):
            self._look_up()
        return self.tables.fill(span, span_view)

    def _look_up(self) -> None:
        """Have the device write what it can of this step's lists; nothing waits for it, nor it for the host.

        It is the step's only look at SGLang's request table and at the pages behind it: whoever composes the next
        batch may write there once that is over, which SGLang is told by an event.
        """
        views: list[TableView] = []
        while len(views) < self.tables.spans and isinstance(view := self.views[len(views)], TableView):
            views.append(view)
        if self.mirror is None:
            self.mirror = PageMirror(
                self.memory, len(self.req_to_token), self.longest, self.req_to_token.device
            )
        self.mirror.refresh(self.batch.rows.tolist())
        self.tables.look_up(views, self.mirror, self.req_to_token)
        done = torch.get_device_module(self.req_to_token.device).Event()
        done.record()
        self.runner.shared_read_done_event = done

    def slots_to_write(self, layer_id: int, span_view: SpanView) -> torch.Tensor:
        return self.device_view(layer_id, span_view).write

    def decode(self, query: torch.Tensor, layer: "RadixAttention", span_view: SpanView) -> torch.Tensor:
        there = self.device_view(layer.layer_id, span_view)
        output = query.new_empty(len(query), layer.tp_q_head_num, layer.v_head_dim)
        # From shapes alone: a captured launch serves any lengths.
        splits = pick_splits(len(query) * layer.tp_k_head_num, self.longest, self.processors)
        paged_decode(
            query,
            *self._pool(layer),
            there.table,
            there.begin,
            there.lengths,
            layer.scaling,
            splits,
            output,
        )
        return output

    def extend(
        self,
        query: torch.Tensor,
        new: tuple[torch.Tensor, torch.Tensor] | None,
        layer: "RadixAttention",
        span_view: SpanView,
        output: torch.Tensor,
        skipped: np.ndarray | None,
    ) -> None:
        there = self.device_view(layer.layer_id, span_view)
        pool = self._pool(layer)
        if new is None:
            new = pool[0][there.write], pool[1][there.write]
        prefixes = there.prefixes if skipped is None else self._prefixes(span_view, skipped)
        tiles = triton.cdiv(there.most_new * (layer.tp_q_head_num // layer.tp_k_head_num), TILE)
        programs = tiles * len(prefixes) * layer.tp_k_head_num
        paged_extend(
            query,
            *new,
            *pool,
            there.table,
            there.begin,
            prefixes,
            there.bounds,
            there.most_new,
            layer.scaling,
            pick_splits(programs, there.most_prefix, self.processors),
            output,
        )

    def _prefixes(self, span_view: SpanView, skipped: np.ndarray) -> torch.Tensor:
        """Entries before the rows, none for the segments whose rows are computed elsewhere."""
        if "prefixes" not in span_view.cache:
            counts = np.diff(span_view.entry) - np.diff(span_view.query)
            counts = np.where(skipped, 0, counts).astype(np.int32)
            span_view.cache["prefixes"] = send(counts, self.req_to_token.device)
        return span_view.cache["prefixes"]
