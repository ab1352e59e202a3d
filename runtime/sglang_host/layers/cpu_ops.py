"""SGLang's element-wise layers on the kernels in ``kernels/``, for machines without a GPU.

SGLang lets a platform register its own forward of a layer class; the lookup is by the exact class. Whatever a
kernel does not take (an option, a layout, a mixture of dtypes) goes to the layer's own ``forward_native``.
"""

from typing import TYPE_CHECKING, Any

import torch

from fathom.kernels import rms_norm, rotary, silu_and_mul
from fathom.kernels.numba_cpu import DTYPES
from fathom.runtime.sglang_host.seams.cpu_seams import ROTARY_CLASSES
from fathom.runtime.sglang_host.seams.seams import resolve

if TYPE_CHECKING:
    from sglang.srt.layers.activation import SiluAndMul
    from sglang.srt.layers.layernorm import RMSNorm
    from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding


def forward_rms_norm(
    self: "RMSNorm",
    x: torch.Tensor,
    residual: torch.Tensor | None = None,
    post_residual_addition: torch.Tensor | None = None,
    quant_linear: torch.nn.Module | None = None,
) -> Any:
    """RMSNorm.forward: the normed tensor, and with a residual also the new residual.

    ``quant_linear`` (the layer that reads the norm) only matters to kernels that also quantise, as in
    ``forward_native``.
    """
    plain = is_plain_norm(self) and post_residual_addition is None and x.shape[-1] == self.hidden_size
    done = rms_norm.rms_norm(x, self.weight, self.variance_epsilon, residual) if plain else None
    if done is None:
        return self.forward_native(x, residual, post_residual_addition, quant_linear)
    return done[0] if residual is None else done


def is_plain_norm(norm: "RMSNorm") -> bool:
    """Whether a norm's options are those of the kernel."""
    return (
        norm.variance_size_override is None
        and not norm.cast_x_before_out_mul
        and not norm.fp32_residual
        and norm.override_orig_dtype is None
    )


def forward_silu_and_mul(self: "SiluAndMul", x: torch.Tensor) -> torch.Tensor:
    """SiluAndMul.forward."""
    done = silu_and_mul.silu_and_mul(x)
    return self.forward_native(x) if done is None else done


def forward_rotary(
    self: "RotaryEmbedding",
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    offsets: torch.Tensor | None = None,
    fused_set_kv_buffer_arg: Any = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """RotaryEmbedding.forward."""
    plain = is_plain_rotary(self) and offsets is None and fused_set_kv_buffer_arg is None
    done = rotary.rotary(positions, query, key, self.cos_sin_cache, self.head_size) if plain else None
    if done is None:
        return self.forward_native(positions, query, key, offsets, fused_set_kv_buffer_arg)
    return done


def is_plain_rotary(rotary_emb: "RotaryEmbedding") -> bool:
    """Whether a rotary embedding's layout is that of the kernel."""
    return rotary_emb.is_neox_style and not hasattr(rotary_emb, "sin_cos_cache")


def register() -> None:
    """Register the forwards for the platform that is active in this process."""
    from sglang.kernels.fused_op import BaseFusedOp
    from sglang.srt.layers.activation import SiluAndMul
    from sglang.srt.layers.layernorm import RMSNorm
    from sglang.srt.platforms import current_platform

    key = current_platform.get_dispatch_key_name()
    BaseFusedOp.register_oot_forward(RMSNorm, forward_rms_norm, key)
    BaseFusedOp.register_oot_forward(SiluAndMul, forward_silu_and_mul, key)
    for place in ROTARY_CLASSES:
        BaseFusedOp.register_oot_forward(resolve(place), forward_rotary, key)


def warm_up(dtype: torch.dtype) -> None:
    """Compile the kernels for the model's dtype now, so that no request waits (a few seconds, cached on disk)."""
    if dtype in DTYPES:
        for kernel in (rms_norm, silu_and_mul, rotary):
            kernel.warm_up(dtype)
