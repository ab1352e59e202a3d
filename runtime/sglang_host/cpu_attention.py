"""SGLang's attention backend for machines without a GPU, on the kernels in ``kernels/``.

It is registered under SGLang's name ``torch_native``: SGLang takes any backend name it does not know for one that
launches Triton kernels, so this slot is the one that keeps every helper on its PyTorch path.
"""

from typing import TYPE_CHECKING

import numpy as np
import torch

from fathom.kernels.decode_attention import decode_attention, plan_decode_packed, warm_up
from fathom.kernels.extend_attention import extend_attention
from fathom.runtime.kv.view import SpanView
from fathom.runtime.sglang_host import cpu_linear, cpu_ops
from fathom.runtime.sglang_host.span_attention import SpanAttentionBackend

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.model_runner import ModelRunner


def _runs(span_view: SpanView) -> list[tuple[slice, slice | torch.Tensor]]:
    """Per segment its rows of the packed query, and its KV slots: a slice of the pool where they are one ascending
    run, so that reading them copies nothing, else an index."""
    if "runs" not in span_view.cache:
        found = []
        for i in range(len(span_view.query) - 1):
            slots = span_view.slots[span_view.entry[i] : span_view.entry[i + 1]]
            first, count = int(slots[0]), len(slots)
            run = int(slots[-1]) - first == count - 1 and bool((np.diff(slots) == 1).all())
            keys = slice(first, first + count) if run else torch.from_numpy(slots.astype(np.int64))
            found.append((slice(int(span_view.query[i]), int(span_view.query[i + 1])), keys))
        span_view.cache["runs"] = found
    return span_view.cache["runs"]


class CpuAttentionBackend(SpanAttentionBackend):
    """Paged attention on the CPU: float32, bfloat16 and float16, GQA, sliding windows, chunked prefill."""

    name = "CPU"

    def __init__(self, model_runner: "ModelRunner") -> None:
        super().__init__(model_runner)
        config = model_runner.model_config
        warm_up(
            config.num_attention_heads // model_runner.ps.tp_size,
            config.get_num_kv_heads(model_runner.ps.tp_size),
            config.head_dim,
            config.v_head_dim,
            model_runner.kv_cache_dtype,
        )
        cpu_ops.warm_up(config.dtype)
        if not model_runner.server_args.enable_lora:
            cpu_linear.pack(model_runner.model)

    def decode(self, query: torch.Tensor, layer: "RadixAttention", span_view: SpanView) -> torch.Tensor:
        key = ("decode", layer.tp_k_head_num, layer.sliding_window_size)
        if key not in span_view.cache:
            span_view.cache[key] = (
                torch.from_numpy(span_view.slots).view(1, -1),
                plan_decode_packed(span_view.entry, layer.tp_k_head_num, layer.sliding_window_size),
            )
        slots, work = span_view.cache[key]
        return decode_attention(query, *self._pool(layer), slots, work, layer.scaling)[0]

    def extend(
        self,
        query: torch.Tensor,
        new: tuple[torch.Tensor, torch.Tensor] | None,
        layer: "RadixAttention",
        span_view: SpanView,
        output: torch.Tensor,
        skipped: np.ndarray | None,
    ) -> None:
        keys, values = self._pool(layer)
        for segment, (packed, slots) in enumerate(_runs(span_view)):
            if skipped is None or not skipped[segment]:
                output[packed] = extend_attention(
                    query[packed],
                    keys[slots].to(query.dtype),
                    values[slots].to(query.dtype),
                    layer.scaling,
                    layer.sliding_window_size,
                )

    def slots_to_write(self, layer_id: int, span_view: SpanView) -> torch.Tensor:
        if "write" not in span_view.cache:
            span_view.cache["write"] = torch.from_numpy(span_view.write)
        return span_view.cache["write"]

    def support_triton(self) -> bool:
        return False
