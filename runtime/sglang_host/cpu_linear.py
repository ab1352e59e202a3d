"""Linear layers and output matrix with weights packed once for oneDNN, for machines without a GPU.

``torch.nn.functional.linear`` lays a bfloat16 weight out anew in every call. oneDNN's own layout, made once
after loading, spares that. It takes the place of the plain weight, so memory stays the same, and weights cannot be
updated or read back while the server runs. Few rows are multiplied by our own kernel, on the same memory.
"""

from collections import Counter
from typing import Any

import numpy as np
import torch
from sglang.srt.layers.linear import LinearBase
from sglang.srt.layers.quantization.unquant import UnquantizedEmbeddingMethod, UnquantizedLinearMethod
from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead

from fathom.kernels import packed_linear_cpu
from fathom.kernels.packed_linear_cpu import FEW_ROWS, blocks_of, packed_linear

TYPICAL_ROWS = 1024  # the layout that oneDNN chooses for this many rows serves any number


class PackedLinearMethod(UnquantizedLinearMethod):
    """``apply`` of one layer on its packed weight.

    Attributes:
        lines: its memory for products of few rows, as ``packed_linear_cpu.blocks_of`` has it.
    """

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), TYPICAL_ROWS)
        self.lines: np.ndarray | None = blocks_of(self.packed, weight)
        self.outputs = len(weight)

    def apply(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """[..., in] to [..., out] in the dtype of the weight."""
        if self.lines is not None and x.dim() == 2 and 0 < len(x) <= FEW_ROWS and x.is_contiguous():
            return packed_linear(x, self.lines, self.outputs, bias)
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, bias, "none", [], "")


def pack(model: torch.nn.Module) -> int:
    """Pack every unquantised bfloat16 linear layer of a loaded model, and its output matrix if that is not also the
    embedding and not asked for in float32; the number of matrices packed.
    """
    if not torch.backends.mkldnn.is_available() or not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return 0
    modules = list(model.modules())
    owners = Counter(id(p) for module in modules for p in module._parameters.values())
    wide_head = any(getattr(module, "use_fp32_lm_head", False) for module in modules)
    layers: list[Any] = [
        module
        for module in modules
        if _plain(module)
        and module.weight.dtype == torch.bfloat16
        and owners[id(module.weight)] == 1
        and not (wide_head and isinstance(module, ParallelLMHead))
    ]
    for layer in layers:
        layer.quant_method = PackedLinearMethod(layer.weight)
        layer.weight.data = layer.weight.data.new_empty(0)
    if any(layer.quant_method.lines is not None for layer in layers):
        packed_linear_cpu.warm_up()
    return len(layers)


def _plain(module: torch.nn.Module) -> bool:
    method = type(getattr(module, "quant_method", None))
    if isinstance(module, ParallelLMHead):
        return method is UnquantizedEmbeddingMethod
    return isinstance(module, LinearBase) and method is UnquantizedLinearMethod
