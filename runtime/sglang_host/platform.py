"""Lets SGLang's engine run on a machine without a GPU.

Registered under the entry point group ``sglang.srt.platforms``; SGLang calls :func:`activate` in every process.
SGLang's own CPU engine (``SGLANG_USE_CPU_ENGINE=1``) needs an AMX build of ``sgl_kernel`` that no package index
has. An out-of-tree platform with native (plain PyTorch) dispatch needs nothing but PyTorch.
"""

import os

from fathom.runtime.sglang_host import torchvision_ops

torchvision_ops.declare()

import torch  # noqa: E402
from sglang.srt.platforms.cpu import CpuDeviceMixin  # noqa: E402
from sglang.srt.platforms.device_mixin import PlatformEnum  # noqa: E402
from sglang.srt.platforms.interface import SRTPlatform  # noqa: E402


class FathomCpuPlatform(CpuDeviceMixin, SRTPlatform):
    """A CPU whose operators are PyTorch's own: SGLang calls each layer's ``forward_native``."""

    _enum = PlatformEnum.OOT

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    def get_mha_kv_pool_cls(self) -> type:
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

        from fathom.runtime.sglang_host.kv_pool import LAYOUT, DepthKvPool

        return DepthKvPool if LAYOUT.used else MHATokenToKVPool

    def get_paged_allocator_cls(self) -> type:
        from fathom.runtime.sglang_host.cpu_allocator import CpuPagedAllocator
        from fathom.runtime.sglang_host.kv_allocator import DepthAllocator
        from fathom.runtime.sglang_host.kv_pool import LAYOUT

        return DepthAllocator if LAYOUT.used else CpuPagedAllocator

    def get_torch_profiler_activity_str(self) -> str:
        return "CPU"

    def get_torch_profiler_activity(self) -> "torch.profiler.ProfilerActivity":
        return torch.profiler.ProfilerActivity.CPU


def activate() -> str | None:
    """Name of the platform class, or None where SGLang should choose by itself.

    Stays out of the way when any accelerator is present or SGLang's own CPU engine was asked for.
    """
    accelerator = torch.accelerator.is_available()
    if accelerator or os.getenv("SGLANG_USE_CPU_ENGINE", "0") == "1":
        return None
    return f"{__name__}:FathomCpuPlatform"
