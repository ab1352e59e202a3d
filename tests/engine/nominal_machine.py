"""A machine with an H100, as PyTorch and SGLang's compiled packages would show it: in name only.

:func:`install` comes before the first import of SGLang, which then takes its branches for CUDA. Streams and events
do nothing, since work is done when it is called. The kernels that SGLang has compiled, ``sgl_kernel``'s and those
that it builds with nvcc at the first step, are PyTorch here; SGLang's Python around them is its own.
"""

import ctypes
import importlib.machinery
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType, SimpleNamespace

import torch
import tvm_ffi  # noqa: F401  it asks whether there is a `cuda`: before there is one in name
from torch import library

NAME = "NVIDIA H100 80GB HBM3"
PROCESSORS = 2
"""Fewer than it has: the interpreter runs one program after the other, and splits follow from it."""


class Stream:
    """A stream, or an event: work is done when it is called."""

    def __init__(self, *_, **__):
        self.device, self.device_index = torch.device("cuda", 0), 0
        self.cuda_stream = self.stream_id = 0

    def wait_stream(self, *_, **__):
        pass

    wait_event = record_event = record = synchronize = wait = wait_stream

    def query(self):
        return True

    def elapsed_time(self, _):
        return 0.0


class Within:
    """``torch.cuda.stream`` and ``torch.cuda.device``: any stream and device is as good."""

    def __init__(self, *_, **__):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return False


def constant(value):
    return lambda *_, **__: value


PROPERTIES = SimpleNamespace(
    major=9,
    minor=0,
    name=NAME,
    multi_processor_count=PROCESSORS,
    total_memory=80 << 30,
    warp_size=32,
    max_threads_per_multi_processor=2048,
    shared_memory_per_block_optin=232448,
    shared_memory_per_multiprocessor=233472,
    regs_per_multiprocessor=65536,
    L2_cache_size=50 << 20,
    is_integrated=False,
    uuid="0",
)
SAYS = {
    "is_available": True,
    "is_initialized": True,
    "is_bf16_supported": True,
    "device_count": 2,
    "current_device": 0,
    "get_device_capability": (9, 0),
    "get_device_name": NAME,
    "get_device_properties": PROPERTIES,
    "mem_get_info": (4 << 30, 8 << 30),
    "memory_allocated": 0,
    "memory_reserved": 0,
    "max_memory_allocated": 0,
    "graph_pool_handle": (0, 0),
}
NOTHING = (
    "_lazy_init",
    "synchronize",
    "empty_cache",
    "set_device",
    "set_stream",
    "reset_peak_memory_stats",
    "ipc_collect",
    "manual_seed",
    "manual_seed_all",
)


GUARD = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
namespace c10::impl { C10_REGISTER_GUARD_IMPL(CUDA, NoOpDeviceGuardImpl<DeviceType::CUDA>) }
"""


def guard():
    """What PyTorch holds on to while it works on a device of this type; a build for CPUs has none for CUDA."""
    if torch.version.cuda is not None:
        return torch._C._ensureCUDADeviceGuardSet()
    compiled = Path(tempfile.gettempdir()) / f"nominal-guard-{torch.__version__}.so"
    if not compiled.exists():
        with tempfile.TemporaryDirectory(dir=compiled.parent) as folder:
            (source := Path(folder) / "guard.cpp").write_text(GUARD)
            made, torch_files = Path(folder) / "guard.so", Path(torch.__file__).parent
            where = f"-I{torch_files / 'include'}", f"-L{torch_files / 'lib'}", "-lc10"
            subprocess.run(["c++", "-shared", "-fPIC", "-std=c++20", source, "-o", made, *where], check=True)
            made.replace(compiled)
    ctypes.CDLL(str(compiled))


def install():
    """Everything but tensors and graphs, which are ``nominal_gpu.py``'s."""
    guard()
    torch.version.cuda = "13.0"
    for name, value in SAYS.items():
        setattr(torch.cuda, name, constant(value))
    for name in NOTHING:
        setattr(torch.cuda, name, constant(None))
    torch.cuda.Stream = torch.cuda.Event = torch.Stream = torch.Event = Stream
    torch.cuda.current_stream = torch.cuda.default_stream = lambda *_: Stream()
    torch.cuda.stream = torch.cuda.StreamContext = torch.cuda.device = Within
    torch.accelerator.is_available = constant(True)
    library.Library.impl = register_for_both
    torch.Tensor.pin_memory = lambda self, *_: self
    torch.Tensor.is_pinned = constant(True)
    torch.Tensor.record_stream = constant(None)
    os.environ |= {
        "FATHOM_GPU_DEPTH_PAGES": "1",
        "SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK": "1",
        "SGLANG_ENABLE_JIT_DEEPGEMM": "0",
    }
    sys.meta_path.append(Finder())
    sys.path.append(str(Path(sys.prefix) / "flashinfer"))


# --- compiled kernels ---

register = library.Library.impl


def register_for_both(self, name, function, dispatch_key="", **kwargs):
    """``Library.impl``: what SGLang registers for CUDA is called with the values, which are the host's."""
    register(self, name, function, dispatch_key, **kwargs)
    if self.ns == "sglang" and dispatch_key == "CUDA":
        register(self, name, function, "CPU", **kwargs)


def rmsnorm(x, weight, eps=1e-6, out=None, enable_pdl=None):
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * weight.float()
    return wide.to(x.dtype) if out is None else out.copy_(wide)


def fused_add_rmsnorm(x, residual, weight, eps=1e-6, enable_pdl=None):
    residual.copy_(x.float() + residual.float())
    x.copy_(rmsnorm(residual, weight, eps))


def run_activation(x, out, name):
    assert name == "silu"
    gate, up = x.float().chunk(2, -1)
    out.copy_(torch.nn.functional.silu(gate) * up)


def run_rope(query, key, cos_sin, positions):
    assert cos_sin.dtype == torch.float32
    cos, sin = cos_sin[positions.long()].unsqueeze(1).chunk(2, -1)
    for x in (query, key):
        first, second = x.float().chunk(2, -1)
        x.copy_(torch.cat([first * cos - second * sin, second * cos + first * sin], -1))


def store_cache(keys, values, key_cache, value_cache, slots, _, limit, skipped):
    assert slots.min() >= 0 and slots.max() < limit
    kept = slots != skipped
    key_cache[slots[kept]], value_cache[slots[kept]] = keys[kept], values[kept]


def built():
    """In place of what SGLang builds with nvcc."""
    from sglang.kernels.ops.activation import activation
    from sglang.kernels.ops.attention import rope
    from sglang.kernels.ops.kvcache import kvcache

    activation.activation_module = constant(SimpleNamespace(run_activation=run_activation))
    rope._jit_fused_rope_module = constant(SimpleNamespace(run_rope=run_rope))
    kvcache._jit_kvcache_module = constant(SimpleNamespace(store_cache=store_cache))


class Finder:
    """``sgl_kernel`` and NVIDIA's ``cuda``: with what is above, and whatever else is asked of them by name."""

    def find_spec(self, name, *_):
        if name.partition(".")[0] in ("sgl_kernel", "cuda"):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return Kernels(spec.name)

    def exec_module(self, module):
        module.__path__ = []
        module.rmsnorm, module.fused_add_rmsnorm = rmsnorm, fused_add_rmsnorm


class Kernels(ModuleType):
    def __getattr__(self, name):
        return Missing(self.__name__).__getattr__(name)


class Missing:
    """What has no stand-in: it may be imported and named, not called."""

    def __init__(self, name):
        self.name = name

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Missing(f"{self.name}.{name}")

    def __call__(self, *_, **__):
        raise NotImplementedError(f"{self.name} has no stand-in")
