"""Decoder layers of a few rows in two calls instead of some ten operators, for machines without a GPU.

SGLang's models keep their loop over layers. Of a layer whose every part is known and plain, the object's forward
takes few rows through ``kernels/decoder_layer_cpu.py`` and leaves all others to the class. Attention stays SGLang's
call into our backend, except in decode steps in which nothing is done between the layers: the first of them
computes them all (``kernels/decoder_layers_cpu.py``), and the others pass on what it made.
"""

from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.activation import SiluAndMul
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.lora.backend.base_backend import BaseLoRABackend
from sglang.srt.lora.layers import BaseLayerWithLoRA
from sglang.srt.model_executor.forward_context import get_attn_backend

from fathom.kernels import decoder_layer_cpu, decoder_layers_cpu
from fathom.kernels.decoder_layer_cpu import AfterAttention, BeforeAttention
from fathom.kernels.decoder_layers_cpu import DecoderLayers
from fathom.kernels.few_rows_linear_cpu import FEW_ROWS, NOTHING
from fathom.kernels.numba_cpu import as_array
from fathom.runtime.sglang_host.layers.cpu_linear import FewRowsMethod
from fathom.runtime.sglang_host.layers.cpu_ops import is_plain_norm, is_plain_rotary
from fathom.runtime.sglang_host.seams.cpu_seams import LAYER_CLASSES, ROTARY_CLASSES
from fathom.runtime.sglang_host.seams.seams import resolve

if TYPE_CHECKING:
    from fathom.runtime.sglang_host.attention.cpu_attention import CpuAttentionBackend


class FewRows:
    """Takes the place of one layer's forward."""

    together: "Together | None" = None
    adapters: BaseLoRABackend | None = None
    """Where the layer holds LoRA adapters: whether a pass has rows of some."""

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
        adapted = self.adapters is not None and self.adapters.batch_info is not None
        if not few or adapted or any(value is not None for value in options.values()):
            stock = type(self.layer).forward
            return stock(self.layer, positions, hidden_states, forward_batch, residual, **options)
        if self.together is not None and forward_batch.forward_mode.is_decode():
            done = self.together(self, positions, hidden_states, residual)
            if done is not None:
                return done
        query, key, value, residual = self.before(positions, hidden_states, residual)
        return self.after(self.attention(query, key, value, forward_batch), residual)


class Together:
    """All layers of a model, computed when it is the first one's turn."""

    done: torch.Tensor | None = None
    """The hidden states that came of them, until the last layer has passed them on."""

    def __init__(self, layers: DecoderLayers, parts: list[FewRows], backend: "CpuAttentionBackend") -> None:
        self.layers, self.parts, self.backend = layers, parts, backend
        self.attentions = [part.attention for part in parts]

    def __call__(
        self, part: FewRows, positions: torch.Tensor, hidden: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """One layer's turn; None where it has to compute by itself."""
        if part is not self.parts[0]:
            if hidden is not self.done:
                return None
            if part is self.parts[-1]:
                self.done = None
            return hidden, residual
        self.done = None
        if residual is not None or get_attn_backend() is not self.backend:
            return None
        if (runs := self.backend.reads(self.attentions)) is None:
            return None
        found = self.layers(positions, hidden, runs)
        if found is not None:
            self.backend.joined_steps += 1
            self.done = found[0] if len(self.parts) > 1 else None
        return found


def join(model: torch.nn.Module, backend: "CpuAttentionBackend") -> int:
    """Give every layer that can have it the forward for few rows, once weights are packed; how many there are."""
    classes = {resolve(place) for place in LAYER_CLASSES}
    layers = [layer for layer in model.modules() if type(layer) in classes]
    parts = [FewRows(layer, *halves) for layer in layers if (halves := _halves(layer)) is not None]
    holders = (module for module in model.modules() if isinstance(module, BaseLayerWithLoRA))
    adapters = next((module.lora_backend for module in holders), None)
    for part in parts:
        part.layer.forward, part.adapters = part, adapters
    if parts:
        decoder_layer_cpu.warm_up(packed=parts[0].after.down.ndim == 2)
    if len(parts) == len(layers):
        _join_all(model, parts, backend)
    return len(parts)


def _join_all(model: torch.nn.Module, parts: list[FewRows], backend: "CpuAttentionBackend") -> None:
    """Let the layers be computed together, where they are alike."""
    captured = any(getattr(part, "layers_to_capture", None) for part in model.modules())
    attentions = [part.attention for part in parts]
    kinds = {
        (x.tp_q_head_num, x.tp_k_head_num, x.v_head_dim, x.scaling, x.logit_cap, x.sliding_window_size)
        for x in attentions
    }
    plain = all(x.attn_type == AttentionType.DECODER and not x.is_cross_attention for x in attentions)
    if captured or not plain or len(kinds) != 1 or not backend.bfloat16_keys:
        return
    heads, kv_heads, _, scale, logit_cap, _ = kinds.pop()
    if logit_cap > 0:
        return
    try:
        layers = DecoderLayers([(part.before, part.after) for part in parts], heads, kv_heads, scale)
    except ValueError:
        return
    decoder_layers_cpu.warm_up(layers)
    together = Together(layers, parts, backend)
    for part in parts:
        part.together = together


def _halves(layer: Any) -> tuple[BeforeAttention, AfterAttention] | None:
    """The layer's parts as the kernels take them; None where something is not plain."""
    attention, mlp = layer.self_attn, layer.mlp
    rotary, head_dim = attention.rotary_emb, attention.head_dim
    norms = [layer.input_layernorm, layer.post_attention_layernorm]
    head_norms = [attention.q_norm, attention.k_norm] if hasattr(attention, "q_norm") else []
    matrices = [
        matrix.base_layer if isinstance(matrix, BaseLayerWithLoRA) else matrix
        for matrix in (attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj)
    ]
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
    ):
        return None
    projection, output, gate_up, down = (matrix.quant_method.lines for matrix in matrices)
    if matrices[-1].input_size % gate_up.shape[1]:
        return None  # gates that share a block with what they multiply
    query_gain, key_gain = [as_array(norm.weight) for norm in head_norms] or [NOTHING, NOTHING]
    bias = matrices[0].bias
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
        isinstance(method, FewRowsMethod)
        and method.lines is not None
        and matrix.tp_size == 1
        and not matrix.skip_bias_add
    )


def _is_plain_norm(norm: Any) -> bool:
    return type(norm) is RMSNorm and is_plain_norm(norm) and _is_plain_array(norm.weight)


def _is_plain_array(tensor: torch.Tensor) -> bool:
    return tensor.dtype == torch.bfloat16 and tensor.is_contiguous()
