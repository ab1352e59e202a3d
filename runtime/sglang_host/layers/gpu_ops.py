"""SGLang's layers on a GPU over depth pages: its own CUDA kernels where they take a layer, PyTorch where not."""

import sys
from typing import TYPE_CHECKING, Any

import torch

from fathom.runtime.sglang_host.seams.cpu_seams import ROTARY_CLASSES
from fathom.runtime.sglang_host.seams.seams import resolve

if TYPE_CHECKING:
    from sglang.srt.layers.activation import SiluAndMul
    from sglang.srt.layers.layernorm import RMSNorm
    from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding

ROTARY_HEAD_SIZES = (64, 128, 256, 512)
"""What SGLang's CUDA kernel takes. It picks another one itself, but not on a platform that is not its own."""

FUSED_WRITES = "enable_fused_set_kv_buffer"


def forward_rotary(
    self: "RotaryEmbedding", positions: torch.Tensor, query: torch.Tensor, *args: Any, **kwargs: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """RotaryEmbedding.forward."""
    cuda = self.head_size in ROTARY_HEAD_SIZES and query.dtype != torch.float32
    return (self.forward_cuda if cuda else self.forward_native)(positions, query, *args, **kwargs)


def forward_by_dtype(self: "RMSNorm | SiluAndMul", x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Forward of a layer whose CUDA kernels SGLang declares for 16-bit types alone."""
    return (self.forward_native if x.dtype == torch.float32 else self.forward_cuda)(x, *args, **kwargs)


def no_fused_writes(forward_batch: Any) -> bool:
    """Whether a model may write keys itself while it rotates them: never, its slots are virtual."""
    return False


def register() -> None:
    """Put the functions in SGLang's places, for the platform that is active in this process."""
    from sglang.kernels.fused_op import BaseFusedOp
    from sglang.srt.layers.activation import SiluAndMul
    from sglang.srt.layers.layernorm import RMSNorm
    from sglang.srt.models import utils
    from sglang.srt.platforms import current_platform

    key = current_platform.get_dispatch_key_name()
    for layer in (RMSNorm, SiluAndMul):
        BaseFusedOp.register_oot_forward(layer, forward_by_dtype, key)
    for place in ROTARY_CLASSES:
        BaseFusedOp.register_oot_forward(resolve(place), forward_rotary, key)
    stock = getattr(utils, FUSED_WRITES)
    for name, module in list(sys.modules.items()):  # models take the function by its name
        if name.startswith("sglang.srt.models") and getattr(module, FUSED_WRITES, None) is stock:
            setattr(module, FUSED_WRITES, no_fused_writes)
