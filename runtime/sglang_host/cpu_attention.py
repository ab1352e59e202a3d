"""SGLang's attention backend for machines without a GPU, on the kernels in ``kernels/``.

It is registered under SGLang's name ``torch_native``: SGLang takes any backend name it does not know for one that
launches Triton kernels, so this slot is the one that keeps every helper on its PyTorch path.
"""

from typing import TYPE_CHECKING, TypeAlias

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


Place: TypeAlias = slice | torch.Tensor
"""Where KV lies in a layer's pool: an ascending run of slots, read in place, or an index, by which it is copied."""


def _place(slots: np.ndarray) -> Place:
    if len(slots) == 0:
        return slice(0, 0)
    first, count = int(slots[0]), len(slots)
    if int(slots[-1]) - first == count - 1 and bool((np.diff(slots) == 1).all()):
        return slice(first, first + count)
    return torch.from_numpy(slots.astype(np.int64))


def _places(span_view: SpanView) -> list[tuple[slice, Place, Place]]:
    """Per segment its rows of the packed query, and where the KV before them and their own lies."""
    if "places" not in span_view.cache:
        found = []
        bounds = zip(
            span_view.query.tolist(), span_view.query[1:].tolist(), span_view.entry[1:].tolist(), strict=False
        )
        for i, (begin, stop, end) in enumerate(bounds):
            middle = end - (stop - begin)
            before, own = span_view.slots[int(span_view.entry[i]) : middle], span_view.slots[middle:end]
            found.append((slice(begin, stop), _place(before), _place(own)))
        span_view.cache["places"] = found
    return span_view.cache["places"]


def _read(pool: torch.Tensor, place: Place, dtype: torch.dtype) -> torch.Tensor:
    part = pool[place] if isinstance(place, slice) else pool.index_select(0, place)
    return part.to(dtype)


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
        (keys, values), dtype = self._pool(layer), query.dtype
        for segment, (packed, before, own) in enumerate(_places(span_view)):
            if skipped is None or not skipped[segment]:
                output[packed] = extend_attention(
                    query[packed],
                    _read(keys, own, dtype),
                    _read(values, own, dtype),
                    layer.scaling,
                    layer.sliding_window_size,
                    (_read(keys, before, dtype), _read(values, before, dtype)),
                )

    def slots_to_write(self, layer_id: int, span_view: SpanView) -> torch.Tensor:
        if "write" not in span_view.cache:
            span_view.cache["write"] = torch.from_numpy(span_view.write)
        return span_view.cache["write"]

    def support_triton(self) -> bool:
        return False
