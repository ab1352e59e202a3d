"""Linear layers and output matrix with weights packed once for oneDNN, for machines without a GPU.

``torch.nn.functional.linear`` lays a bfloat16 weight out anew in every call. oneDNN's own layout, made once
after loading, spares that. It takes the place of the plain weight, so memory stays the same, and weights cannot be
updated or read back while the server runs. Few rows are multiplied by our own kernel, on the same memory.

On processors without bfloat16 products (without AVX512-BF16 or AVX-NE-CONVERT), oneDNN makes them up where there is
AVX512, and where there is none, PyTorch multiplies such matrices number by number; so it does with float16. There
weights stay as they are, few rows of bfloat16 are multiplied by our own kernel, and all others in float32, a piece
of the weight at a time.
"""

from abc import abstractmethod
from collections import Counter
from typing import Any

import numpy as np
import torch
from sglang.srt.layers.linear import LinearBase
from sglang.srt.layers.quantization.unquant import UnquantizedEmbeddingMethod, UnquantizedLinearMethod
from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from sglang.srt.lora.layers import BaseLayerWithLoRA

from fathom.kernels import few_rows_linear_cpu
from fathom.kernels.bfloat16_cpu import has_bfloat16_products
from fathom.kernels.few_rows_linear_cpu import FEW_ROWS, blocks_of, few_rows_linear, packed_rows
from fathom.kernels.plain_linear_cpu import plain_blocks

FEWEST_WIDE = 8
"""Rows from which on a piece of the weight is worth being made float32, where our kernel does not take them."""
WIDE_AT_ONCE = 1 << 20
"""Elements of such a piece: what stays in a core's cache."""

TYPICAL_ROWS = 1024  # the layout that oneDNN chooses for this many rows serves any number


class FewRowsMethod(UnquantizedLinearMethod):
    """``apply`` of one layer, of few rows by our kernel.

    Attributes:
        lines: the weight's memory as ``few_rows_linear_cpu.py`` has it; None where that cannot read it.
    """

    lines: np.ndarray | None
    outputs: int

    def apply(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """[..., in] to [..., out] in the dtype of the weight."""
        if self.lines is not None and x.dim() == 2 and 0 < len(x) <= FEW_ROWS and x.is_contiguous():
            return few_rows_linear(x, self.lines, self.outputs, bias)
        return self.many_rows(layer, x, bias)

    @abstractmethod
    def many_rows(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """The same for any rows."""


class PackedLinearMethod(FewRowsMethod):
    """On a weight that oneDNN has packed."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), TYPICAL_ROWS)
        self.lines, self.outputs = blocks_of(self.packed, weight), len(weight)

    def many_rows(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """By oneDNN."""
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, bias, "none", [], "")


class PackedTiedMethod(PackedLinearMethod):
    """The same for an output matrix that is also the embedding."""

    def embedding(self, layer: torch.nn.Module, input_: torch.Tensor) -> torch.Tensor:
        """[...] token ids to [..., width]."""
        assert self.lines is not None, "only what can be read row by row is packed for both"
        return packed_rows(input_, self.lines, self.outputs)


class WideLinearMethod(FewRowsMethod):
    """In float32, on a weight as it is."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.lines, self.outputs = plain_blocks(weight), len(weight)

    def many_rows(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Rounded once."""
        weight, rows = layer.weight, x.reshape(-1, x.shape[-1])
        if len(rows) < FEWEST_WIDE:
            return torch.nn.functional.linear(x, weight, bias)
        wide, result = rows.float(), x.new_empty(len(rows), len(weight))
        size = max(1, WIDE_AT_ONCE // weight.shape[1])
        for begin in range(0, len(weight), size):
            piece = slice(begin, begin + size)
            output = wide @ weight[piece].float().T
            result[:, piece] = output if bias is None else output + bias[piece]
        return result.view(*x.shape[:-1], len(weight))

    def embedding(self, layer: torch.nn.Module, input_: torch.Tensor) -> torch.Tensor:
        """[...] token ids to [..., width], where the output matrix is the embedding too."""
        return torch.nn.functional.embedding(input_, layer.weight)


def multiplies_bfloat16() -> bool:
    """Whether oneDNN has bfloat16 products for this processor that are worth having: with AVX512 but without
    AVX512-BF16 it makes up each of them of several instructions.
    """
    made_up = torch.cpu._is_avx512_supported() and not has_bfloat16_products()
    found = torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return found and not made_up


def widen(model: torch.nn.Module) -> int:
    """Let every unquantised linear layer of 16-bit numbers of a loaded model, and its output matrix unless that is
    wanted in float32, multiply in float32; the number of matrices.
    """
    found = [module for module, _ in _matrices(model, _modules(model), torch.bfloat16, torch.float16)]
    for module in found:
        module.quant_method = WideLinearMethod(module.weight)
    if any(module.quant_method.lines is not None for module in found):
        few_rows_linear_cpu.warm_up(packed=False)
    return len(found)


def pack(model: torch.nn.Module) -> int:
    """Pack every unquantised bfloat16 linear layer of a loaded model, and its output matrix unless that is wanted
    in float32; the number of matrices packed. One that is the embedding too serves both, packed.
    """
    modules = _modules(model)
    owners = Counter(id(p) for module in modules for p in module._parameters.values())
    packed = []
    for module, kind in _matrices(model, modules, torch.bfloat16):
        if owners[id(module.weight)] > 1:
            continue
        method = kind(module.weight)
        if kind is PackedTiedMethod and method.lines is None:
            continue  # nobody could read a single row
        module.quant_method = method
        module.weight.data = module.weight.data.new_empty(0)
        packed.append(method)
    if any(method.lines is not None for method in packed):
        few_rows_linear_cpu.warm_up(packed=True)
    return len(packed)


def _modules(model: torch.nn.Module) -> list[Any]:
    """All modules but SGLang's layers for LoRA adapters, and what these multiply by, or look up in, themselves: the
    embedding and the output matrix where there are adapters of them.
    """
    every: list[Any] = list(model.modules())
    holders = [module for module in every if isinstance(module, BaseLayerWithLoRA)]
    left = {id(holder) for holder in holders}
    left |= {id(x.base_layer) for x in holders if not isinstance(x.base_layer, LinearBase)}
    return [module for module in every if id(module) not in left]


def _matrices(
    model: Any, modules: list[Any], *dtypes: torch.dtype
) -> list[tuple[Any, type[PackedLinearMethod]]]:
    """Those of the modules to be multiplied by in a dtype of these, and what would do it on packed weights."""
    wide_head = any(getattr(module, "use_fp32_lm_head", False) for module in modules)
    head = getattr(model, "lm_head", None)
    kinds = ((module, _method_for(module, module is head)) for module in modules)
    return [
        (module, kind)
        for module, kind in kinds
        if kind is not None
        and module.weight.dtype in dtypes
        and (isinstance(module, LinearBase) or not wide_head)
    ]


def _method_for(module: Any, is_head: bool) -> type[PackedLinearMethod] | None:
    """What would multiply by the module's weight; None where it is quantised, or no matrix of a product."""
    method = type(getattr(module, "quant_method", None))
    if isinstance(module, LinearBase):
        return PackedLinearMethod if method is UnquantizedLinearMethod else None
    if method is not UnquantizedEmbeddingMethod:
        return None
    if isinstance(module, ParallelLMHead):
        return PackedLinearMethod
    tied = is_head and type(module) is VocabParallelEmbedding and module.tp_size == 1
    return PackedTiedMethod if tied else None
