"""SGLang's KV pool with depth pages: the layers of all spans live in the buffers of one span."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

from fathom.runtime.plan import choose_span


@dataclass
class Layout:
    """How the layers of the served model are cut into spans; set once per process, before the pool is made.

    Attributes:
        span: layers per span, or None for the default of the model.
        tsp_layer: layers below FastKV's selection, or None where there is no boundary between spans.
        propagation_buffer: longest prompt, in tokens, whose hidden states can wait for the selection.
        shallow_factor: tokens that may be held for each one that fits at all depths, or None for the default.
        used: whether this process keeps KV in depth pages; stock SGLang, started for comparison, does not.
    """

    span: int | None = None
    tsp_layer: int | None = None
    propagation_buffer: int = 0
    shallow_factor: int | None = None
    used: bool = False

    def virtual_slots(self, spans: int, drafts_on_a_gpu: bool) -> int:
        """Virtual slots for each token that fits at all depths.

        There is no use for more than one per span. A draft has KV for each of them: on a CPU beside the pool,
        on a GPU it is taken from the pool.
        """
        default = DRAFTED_ON_A_GPU if drafts_on_a_gpu else spans
        return min(self.shallow_factor or default, spans)


DRAFTED_ON_A_GPU = 2
LAYOUT = Layout()


class DepthKvPool(MHATokenToKVPool):
    """Keys and values of G layers, shared by the L / G spans of the model.

    Layer l reads and writes ``k_buffer[l]``, which is the buffer of layer l mod G, at the *physical* slots of span
    l // G. Each buffer is [slots, kv_heads, head_dim] and contiguous, so that a kernel that takes slots needs
    nothing but the slots of the layer's span.

    Attributes:
        size: physical slots; a token that is kept at all depths takes one per span.
        tokens: tokens that fit when all are kept at all depths.
        span: layers G of a span; spans: their number.
    """

    def __init__(self, size: int, *args: Any, layer_num: int, **kwargs: Any) -> None:
        self.tokens = size
        self.span = choose_span(layer_num, LAYOUT.span)
        self.spans = layer_num // self.span
        super().__init__(size * self.spans, *args, layer_num=self.span, **kwargs)
        self.k_buffer: list[torch.Tensor] = list(self.k_buffer) * self.spans
        self.v_buffer: list[torch.Tensor] = list(self.v_buffer) * self.spans
        self.layer_num = layer_num
        self._typed: dict[tuple[str, int], tuple[torch.Tensor, torch.Tensor]] = {}

    def _get_key_buffer(self, layer_id: int) -> torch.Tensor:
        return self._as_typed("keys", layer_id, self.k_buffer)

    def _get_value_buffer(self, layer_id: int) -> torch.Tensor:
        return self._as_typed("values", layer_id, self.v_buffer)

    def _as_typed(self, kind: str, layer_id: int, buffers: list[torch.Tensor]) -> torch.Tensor:
        """A layer's buffer; of 8 bits, which SGLang keeps as bytes, the same view of it in each call."""
        buffer = buffers[layer_id - self.start_layer]
        if self.store_dtype == self.dtype:
            return buffer
        known = self._typed.get((kind, layer_id))
        if known is None or known[0] is not buffer:
            known = self._typed[kind, layer_id] = (buffer, buffer.view(self.dtype))
        return known[1]

    def get_kv_size_bytes(self) -> tuple[int, int]:
        """Bytes of the keys and of the values."""
        span = self.span
        return sum(k.nbytes for k in self.k_buffer[:span]), sum(v.nbytes for v in self.v_buffer[:span])

    @cached_property
    def bytes_per_page(self) -> int:
        """Bytes of one depth page: page_size tokens x one span, keys and values."""
        return sum(self.get_kv_size_bytes()) // (self.size + self.page_size) * self.page_size

    def move_kv_cache(self, tgt_loc: torch.Tensor, src_loc: torch.Tensor) -> None:
        raise NotImplementedError("depth pages are moved per span, through the tables")
