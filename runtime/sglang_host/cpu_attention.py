"""SGLang's attention backend for machines without a GPU, on the kernels in ``kernels/``.

It is registered under SGLang's name ``torch_native``: SGLang takes any backend name it does not know for one that
launches Triton kernels, so this slot is the one that keeps every helper on its PyTorch path.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType

from fathom.kernels.decode_attention import DecodePlan, decode_attention, plan_decode, warm_up
from fathom.kernels.extend_attention import extend_attention
from fathom.runtime.sglang_host import cpu_linear, cpu_ops

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner


@dataclass
class StepPlan:
    """What every layer of one step reads: built once per step.

    decode: rows and lengths of the page table and, per window size, the decode work list.
    extend: per request the rows of the packed query, and its KV slots as a slice of the pool (one contiguous run)
        or as an index tensor.
    """

    rows: torch.Tensor
    lengths: torch.Tensor
    decode: dict[int, DecodePlan] = field(default_factory=dict)
    extend: list[tuple[slice, slice | torch.Tensor]] = field(default_factory=list)


def slots_of(page_table_row: torch.Tensor) -> slice | torch.Tensor:
    """The slots as a slice when they are one ascending run, so that reading them copies nothing."""
    first, count = int(page_table_row[0]), len(page_table_row)
    if int(page_table_row[-1]) - first == count - 1 and bool((page_table_row.diff() == 1).all()):
        return slice(first, first + count)
    return page_table_row.long()


class CpuAttentionBackend(AttentionBackend):
    """Paged attention on the CPU: float32, bfloat16 and float16, GQA, sliding windows, chunked prefill."""

    plan: StepPlan

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
        rows, lengths = forward_batch.req_pool_indices, forward_batch.seq_lens
        self.plan = StepPlan(rows, lengths)
        if forward_batch.forward_mode.is_decode_or_idle():
            return
        begin = 0
        new_tokens = forward_batch.extend_seq_lens_cpu
        for row, length, new in zip(rows.tolist(), lengths.tolist(), new_tokens, strict=True):
            packed = slice(begin, begin + int(new))
            self.plan.extend.append((packed, slots_of(self.req_to_token[row, :length])))
            begin = packed.stop

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
        self._store(k, v, layer, forward_batch, save_kv_cache)
        window = layer.sliding_window_size
        work = self.plan.decode.get(window)
        if work is None:
            work = plan_decode(self.plan.rows, self.plan.lengths, layer.tp_k_head_num, window)
            self.plan.decode[window] = work
        output, _ = decode_attention(
            q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim),
            self.kv_pool.get_key_buffer(layer.layer_id),
            self.kv_pool.get_value_buffer(layer.layer_id),
            self.req_to_token,
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
        self._store(k, v, layer, forward_batch, save_kv_cache)
        query = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        output = query.new_empty(len(query), layer.tp_q_head_num, layer.v_head_dim)
        keys = self.kv_pool.get_key_buffer(layer.layer_id)
        values = self.kv_pool.get_value_buffer(layer.layer_id)
        for packed, slots in self.plan.extend:
            output[packed] = extend_attention(
                query[packed],
                keys[slots].to(query.dtype),
                values[slots].to(query.dtype),
                layer.scaling,
                layer.sliding_window_size,
            )
        return output.view(len(query), -1)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    def support_triton(self) -> bool:
        return False

    def _store(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: "RadixAttention",
        forward_batch: "ForwardBatch",
        save_kv_cache: bool,
    ) -> None:
        if layer.logit_cap > 0 or layer.attn_type != AttentionType.DECODER or layer.is_cross_attention:
            raise NotImplementedError(
                "the CPU attention backend has no logit soft-capping, encoder or cross attention"
            )
        if save_kv_cache and k is not None:
            self.kv_pool.set_kv_buffer(layer, forward_batch.out_cache_loc, k, v)
