"""SGLang's attention backend for machines without a GPU, on the kernels in ``kernels/``.

It is registered under SGLang's name ``torch_native``: SGLang takes any backend name it does not know for one that
launches Triton kernels, so this slot is the one that keeps every helper on its PyTorch path.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType

from fathom.kernels.decode_attention import decode_attention, plan_decode_packed, warm_up
from fathom.kernels.extend_attention import extend_attention
from fathom.runtime.decode import Step
from fathom.runtime.kv.view import Batch, SpanView, view
from fathom.runtime.sglang_host import cpu_linear, cpu_ops

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner

Tap = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor, float], None]
"""Sees a layer's prefill attention before it is computed: layer, rotated queries [rows, heads, head_dim], the
pool's keys and values [slots, kv_heads, head_dim] with the new tokens' in them, and the scale of the products."""


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


class CpuAttentionBackend(AttentionBackend):
    """Paged attention on the CPU: float32, bfloat16 and float16, GQA, sliding windows, chunked prefill."""

    batch: Batch
    alternating: Step | None = None
    """While a batch runs that has requests which decode slow and fast: what they read, and where no drafted tokens
    are verified, what every decoding request reads."""

    def __init__(self, model_runner: "ModelRunner") -> None:
        super().__init__()
        config = model_runner.model_config
        if model_runner.use_mla_backend or config.is_encoder_decoder:
            raise NotImplementedError(
                "the CPU attention backend serves decoder-only models with multi-head, grouped-query or "
                "multi-query attention; this model has "
                + ("an encoder" if config.is_encoder_decoder else "multi-head latent attention")
            )
        self.req_to_token = model_runner.req_to_token_pool.req_to_token
        self.kv_pool = model_runner.token_to_kv_pool
        self.memory = model_runner.token_to_kv_pool_allocator.memory
        self.views: dict[int, SpanView] = {}
        self.taps: dict[int, Tap] = {}
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

    def init_forward_metadata(self, forward_batch: "ForwardBatch") -> None:
        rows, lengths = forward_batch.req_pool_indices.numpy(), forward_batch.seq_lens.numpy()
        new = np.ones(len(rows), np.int64)
        if not forward_batch.forward_mode.is_decode_or_idle():
            new = np.array(forward_batch.extend_seq_lens_cpu, np.int64)
        table = self.req_to_token.numpy()
        virtual = [table[row, :length] for row, length in zip(rows.tolist(), lengths.tolist(), strict=True)]
        self.set_batch(Batch.plain(rows, lengths, np.concatenate(virtual or [table[0, :0]]), new))

    def set_batch(self, batch: Batch) -> None:
        """From here on the layers compute these rows."""
        self.batch = batch
        self.views = {}

    def view_of(self, layer_id: int) -> SpanView:
        """What a layer reads and writes in this step."""
        span = layer_id // self.kv_pool.span
        if span not in self.views:
            self.views[span] = view(self.memory, self.batch, span)
        return self.views[span]

    def forward_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: "RadixAttention",
        forward_batch: "ForwardBatch",
        save_kv_cache: bool = True,
        **_: Any,
    ) -> torch.Tensor:
        span_view = self._store(k, v, layer, save_kv_cache)
        if self.alternating is not None:
            query = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
            return self._alternate(self.alternating, query, layer, span_view).flatten(1).to(q.dtype)
        key = ("decode", layer.tp_k_head_num, layer.sliding_window_size)
        if key not in span_view.cache:
            span_view.cache[key] = (
                torch.from_numpy(span_view.slots).view(1, -1),
                plan_decode_packed(span_view.entry, layer.tp_k_head_num, layer.sliding_window_size),
            )
        slots, work = span_view.cache[key]
        output, _ = decode_attention(
            q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim),
            self.kv_pool.get_key_buffer(layer.layer_id),
            self.kv_pool.get_value_buffer(layer.layer_id),
            slots,
            work,
            layer.scaling,
        )
        return output.view(-1, layer.tp_q_head_num * layer.v_head_dim).to(q.dtype)

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: "RadixAttention",
        forward_batch: "ForwardBatch",
        save_kv_cache: bool = True,
        **_: Any,
    ) -> torch.Tensor:
        span_view = self._store(k, v, layer, save_kv_cache)
        query = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        output = query.new_empty(len(query), layer.tp_q_head_num, layer.v_head_dim)
        keys = self.kv_pool.get_key_buffer(layer.layer_id)
        values = self.kv_pool.get_value_buffer(layer.layer_id)
        if layer.layer_id in self.taps:
            self.taps[layer.layer_id](layer.layer_id, query, keys, values, layer.scaling)
        runs = _runs(span_view)
        if self.alternating is not None:
            if "others" not in span_view.cache:
                own = {segment + len(runs) for segment in self.alternating.segments.tolist()}
                span_view.cache["others"] = [run for i, run in enumerate(runs) if i not in own]
                span_view.cache["own"] = np.concatenate(
                    [np.r_[run[0]] for i, run in enumerate(runs) if i in own]
                )
            own, runs = span_view.cache["own"], span_view.cache["others"]
            output[own] = self._alternate(self.alternating, query[own], layer, span_view).to(output.dtype)
        for packed, slots in runs:
            output[packed] = extend_attention(
                query[packed],
                keys[slots].to(query.dtype),
                values[slots].to(query.dtype),
                layer.scaling,
                layer.sliding_window_size,
            )
        return output.view(len(query), -1)

    def _alternate(
        self, step: Step, query: torch.Tensor, layer: "RadixAttention", span_view: SpanView
    ) -> torch.Tensor:
        """[rows, heads, value_dim] float32 for the rows of the step."""
        pool = (
            self.kv_pool.get_key_buffer(layer.layer_id),
            self.kv_pool.get_value_buffer(layer.layer_id),
        )
        return step.attend(layer.layer_id, query, pool, span_view.slots, span_view.entry, layer.scaling)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    def support_triton(self) -> bool:
        return False

    def _store(
        self, k: torch.Tensor, v: torch.Tensor, layer: "RadixAttention", save_kv_cache: bool
    ) -> SpanView:
        if layer.logit_cap > 0 or layer.attn_type != AttentionType.DECODER or layer.is_cross_attention:
            raise NotImplementedError(
                "the CPU attention backend has no logit soft-capping, encoder or cross attention"
            )
        span_view = self.view_of(layer.layer_id)
        if save_kv_cache and k is not None:
            if "write" not in span_view.cache:
                span_view.cache["write"] = torch.from_numpy(span_view.write)
            self.kv_pool.set_kv_buffer(layer, span_view.cache["write"], k, v)
        return span_view
