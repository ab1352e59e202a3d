"""Decoder layers of a few rows in two calls instead of some ten operators, for machines without a GPU.

SGLang's models keep their loop over layers. Of a layer whose every part is known and plain, the object's forward
takes few rows through ``kernels/decoder_layer_cpu.py`` and leaves all others to the class. Attention stays SGLang's
call into our backend.
"""

from typing import Any

import torch
from sglang.srt.layers.activation import SiluAndMul
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.radix_attention import RadixAttention

from fathom.kernels import decoder_layer_cpu
from fathom.kernels.decoder_layer_cpu import AfterAttention, BeforeAttention
from fathom.kernels.numba_cpu import as_array
from fathom.kernels.packed_linear_cpu import BLOCK, FEW_ROWS, NOTHING
from fathom.runtime.sglang_host.cpu_linear import PackedLinearMethod
from fathom.runtime.sglang_host.cpu_ops import is_plain_norm, is_plain_rotary
from fathom.runtime.sglang_host.cpu_seams import LAYER_CLASSES, ROTARY_CLASSES
from fathom.runtime.sglang_host.seams import resolve


class FewRows:
    """Takes the place of one layer's forward."""

    def __init__(self, layer: Any, before: BeforeAttention, after: AfterAttention) -> None:
        self.layer, self.attention = layer, layer.self_attn.attn
        self.before, self.after = before, after

    def __call__(
        self,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        forward_batch: Any,
        residual: torch.Tensor | None,
        **options: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        few = 0 < len(hidden_states) <= FEW_ROWS and positions.dim() == 1
        if not few or any(value is not None for value in options.values()):
            stock = type(self.layer).forward
            return stock(self.layer, positions, hidden_states, forward_batch, residual, **options)
        query, key, value, residual = self.before(positions, hidden_states, residual)
        return self.after(self.attention(query, key, value, forward_batch), residual)


def join(model: torch.nn.Module) -> int:
    """Give every layer that can have it the forward for few rows, once weights are packed; how many there are."""
    joined = 0
    classes = {resolve(place) for place in LAYER_CLASSES}
    for layer in model.modules():
        if type(layer) in classes and (halves := _halves(layer)) is not None:
            layer.forward = FewRows(layer, *halves)
            joined += 1
    if joined:
        decoder_layer_cpu.warm_up()
    return joined


def _halves(layer: Any) -> tuple[BeforeAttention, AfterAttention] | None:
    """The layer's parts as the kernels take them; None where something is not plain."""
    attention, mlp = layer.self_attn, layer.mlp
    rotary, head_dim = attention.rotary_emb, attention.head_dim
    norms = [layer.input_layernorm, layer.post_attention_layernorm]
    head_norms = [attention.q_norm, attention.k_norm] if hasattr(attention, "q_norm") else []
    matrices = [attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj]
    hooks = any(part._forward_hooks or part._forward_pre_hooks for part in layer.modules())
    if (
        hooks
        or type(attention.attn) is not RadixAttention
        or type(mlp.act_fn) is not SiluAndMul
        or not all(_is_plain_matrix(matrix) for matrix in matrices)
        or any(matrix.bias is not None for matrix in matrices[1:])
        or not all(_is_plain_norm(norm) for norm in (*norms, *head_norms))
        or not any(type(rotary) is resolve(place) for place in ROTARY_CLASSES)
        or not is_plain_rotary(rotary)
        or not _is_plain_array(rotary.cos_sin_cache)
        or rotary.head_size != head_dim
        or mlp.down_proj.input_size % BLOCK
    ):
        return None
    projection, output, gate_up, down = (matrix.quant_method.lines for matrix in matrices)
    query_gain, key_gain = [as_array(norm.weight) for norm in head_norms] or [NOTHING, NOTHING]
    bias = attention.qkv_proj.bias
    before = BeforeAttention(
        as_array(norms[0].weight),
        norms[0].variance_epsilon,
        projection,
        NOTHING if bias is None else as_array(bias),
        query_gain,
        key_gain,
        as_array(rotary.cos_sin_cache),
        head_dim,
        attention.q_size,
        attention.kv_size,
        attention.kv_size,
    )
    after = AfterAttention(output, as_array(norms[1].weight), norms[1].variance_epsilon, gate_up, down)
    return before, after


def _is_plain_matrix(matrix: Any) -> bool:
    method = matrix.quant_method
    return (
        isinstance(method, PackedLinearMethod)
        and method.lines is not None
        and matrix.tp_size == 1
        and not matrix.skip_bias_add
    )


def _is_plain_norm(norm: Any) -> bool:
    return type(norm) is RMSNorm and is_plain_norm(norm) and _is_plain_array(norm.weight)


def _is_plain_array(tensor: torch.Tensor) -> bool:
    return tensor.dtype == torch.bfloat16 and tensor.is_contiguous()
