"""Lets SGLang's engine run on Fathom's memory and attention: without a GPU, and for ``fathom serve`` with one.

Registered under the entry point group ``sglang.srt.platforms``; SGLang calls :func:`activate` in every process.
SGLang's own CPU engine (``SGLANG_USE_CPU_ENGINE=1``) needs an AMX build of ``sgl_kernel`` that no package index
has. An out-of-tree platform with native (plain PyTorch) dispatch needs nothing but PyTorch. On a GPU layers are
SGLang's own CUDA kernels, which it imports wherever it sees one; attention is Fathom's, in Triton.
"""

import os

from fathom.runtime.sglang_host.engine_args import (
    GPU_DEPTH_PAGES,
    OLDEST_GPU,
    TRITON_BACKEND,
    WHERE_POSSIBLE,
)
from fathom.runtime.sglang_host.machine import torchvision_ops

torchvision_ops.declare()

import torch  # noqa: E402
from sglang.srt.platforms.cpu import CpuDeviceMixin  # noqa: E402
from sglang.srt.platforms.cuda import CudaDeviceMixin  # noqa: E402
from sglang.srt.platforms.device_mixin import PlatformEnum  # noqa: E402
from sglang.srt.platforms.interface import SRTPlatform  # noqa: E402


class DepthPagePlatform(SRTPlatform):
    """A platform whose KV is in depth pages."""

    _enum = PlatformEnum.OOT

    def get_mha_kv_pool_cls(self) -> type:
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

        from fathom.runtime.sglang_host.memory.kv_pool import LAYOUT, DepthKvPool

        return DepthKvPool if LAYOUT.used else MHATokenToKVPool

    def get_paged_allocator_cls(self) -> type:
        from fathom.runtime.sglang_host.memory.kv_allocator import DepthAllocator
        from fathom.runtime.sglang_host.memory.kv_pool import LAYOUT
        from fathom.runtime.sglang_host.memory.torch_allocator import TorchPagedAllocator

        return DepthAllocator if LAYOUT.used else TorchPagedAllocator


class FathomCpuPlatform(CpuDeviceMixin, DepthPagePlatform):
    """A CPU, whose operators are PyTorch's own: SGLang calls each layer's ``forward_native``."""

    _enum = PlatformEnum.OOT

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    def get_torch_profiler_activity_str(self) -> str:
        return "CPU"

    def get_torch_profiler_activity(self) -> "torch.profiler.ProfilerActivity":
        return torch.profiler.ProfilerActivity.CPU


class FathomCudaPlatform(CudaDeviceMixin, DepthPagePlatform):
    """An NVIDIA GPU."""

    _enum = PlatformEnum.OOT

    def get_default_attention_backend(self) -> str:
        return TRITON_BACKEND

    def get_dispatch_key_name(self) -> str:
        return "cuda"

    def support_cuda_graph(self) -> bool:
        return True

    def get_graph_runner_cls(self) -> type:
        from fathom.runtime.sglang_host.step.decode_graphs import DecodeGraphRunner

        return DecodeGraphRunner

    def get_torch_profiler_activity_str(self) -> str:
        return "CUDA"

    def get_torch_profiler_activity(self) -> "torch.profiler.ProfilerActivity":
        return torch.profiler.ProfilerActivity.CUDA


def activate() -> str | None:
    """Name of the platform class, or None where SGLang should choose by itself.

    Stays out of the way when SGLang's own CPU engine was asked for, and when any accelerator is present, unless
    ``fathom serve`` wants depth pages on it and it is an NVIDIA GPU.
    """
    if os.getenv("SGLANG_USE_CPU_ENGINE", "0") == "1":
        return None
    if not torch.accelerator.is_available():
        return f"{__name__}:{FathomCpuPlatform.__name__}"
    wanted = os.getenv(GPU_DEPTH_PAGES, "0")
    if wanted == "0" or not (torch.version.cuda and torch.cuda.is_available()):
        return None
    if wanted == WHERE_POSSIBLE and torch.cuda.get_device_capability() < OLDEST_GPU:
        return None
    return f"{__name__}:{FathomCudaPlatform.__name__}"
