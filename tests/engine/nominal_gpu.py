"""``fathom`` on a GPU in name only: a device whose tensors lie in the host's memory but do not mix with its own.

Run with TRITON_INTERPRET=1 and the arguments of ``fathom``. Tensors of the device ``hostgpu`` are wrappers: their
operations run on the CPU, but as on a GPU an operation that takes tensors of both devices raises, and a tensor has
to be copied before NumPy may see it. Whatever would run on streams runs in order. A graph is the list of operations
and launches that were captured, done again on the same memory. Engine processes begin with this file.
"""

import contextlib
import sys
from itertools import chain, repeat

from fathom.runtime.sglang_host import torchvision_ops

torchvision_ops.declare()

import psutil  # noqa: E402
import torch  # noqa: E402
from torch import library  # noqa: E402

# A wrapper that is made in inference mode takes no view of what was made outside it.
torch.inference_mode = lambda mode=True: torch.no_grad()

from sglang.srt import platforms  # noqa: E402
from sglang.srt.model_executor.runner_backend.full_cuda_graph_backend import (  # noqa: E402
    FullCudaGraphBackend,
)
from torch.utils import backend_registration  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves, tree_map  # noqa: E402
from triton.runtime import interpreter  # noqa: E402

from fathom.kernels import selector_scores  # noqa: E402
from fathom.runtime.sglang_host import decode_graphs, engine_args, platform  # noqa: E402
from fathom.server.cli import main  # noqa: E402

NAME = "hostgpu"
aten = torch.ops.aten
TAKE_BOTH = {
    aten.copy_.default,
    aten._to_copy.default,
    # An index may lie in the host's memory.
    aten.index.Tensor,
    aten.index_put.default,
    aten.index_put_.default,
    aten._index_put_impl_.default,
}


class GpuTensor(torch.Tensor):
    """A tensor of the device; ``raw`` holds its values."""

    @staticmethod
    def __new__(cls, raw):
        return torch.Tensor._make_wrapper_subclass(
            cls,
            raw.size(),
            strides=raw.stride(),
            storage_offset=raw.storage_offset(),
            dtype=raw.dtype,
            device=f"{NAME}:0",
        )

    def __init__(self, raw):
        self.raw = raw

    def __repr__(self):
        return f"GpuTensor({self.raw!r})"

    def tolist(self):
        assert Graph.capturing is None, "a captured step would wait for the device"
        return self.raw.tolist()

    def data_ptr(self):
        return self.raw.data_ptr()

    def numpy(self, *_, **__):
        raise TypeError(f"can't convert {NAME}:0 device type tensor to numpy")

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return run(func, args, kwargs or {})


class Nominal(TorchDispatchMode):
    """While it is on, tensors are made on the device where that is asked for."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return run(func, args, kwargs or {})


def run(func, args, kwargs):
    """One operation, on the values; its results are of the device that its arguments are of, or that it names."""
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    there = any(isinstance(x, GpuTensor) for x in tensors)
    others = [x for x in tensors if not isinstance(x, GpuTensor) and x.dim()]
    if there and others and func not in TAKE_BOTH:
        raise RuntimeError(f"{func}: expected all tensors on one device, found {[x.device for x in tensors]}")
    device = kwargs.get("device")
    given = there
    if device is not None:
        there = torch.device(device).type == NAME
        kwargs = kwargs | {"device": torch.device("cpu") if there else device}
    kwargs = {name: value for name, value in kwargs.items() if name != "pin_memory"}
    args, kwargs = tree_map(values, (args, kwargs))
    result = func(*args, **kwargs)
    if graph := Graph.capturing:
        crosses = (given and not there) or (there and others)
        if crosses or (given and not any(map(is_tensor, tree_leaves(result)))):
            raise RuntimeError(
                f"{func}: a captured step would wait for the device, or read the host's memory"
            )
        if there:
            graph.add(func, args, kwargs, result)
    if not there:
        return result
    own = {id(x.raw): x for x in tensors if isinstance(x, GpuTensor)}

    def as_tensor(x):
        if not isinstance(x, torch.Tensor) or isinstance(x, GpuTensor):
            return x
        return own[id(x)] if id(x) in own else GpuTensor(x)

    return tree_map(as_tensor, result)


def values(x):
    return x.raw if isinstance(x, GpuTensor) else x


class Graph:
    """A captured step: its operations and launches, done again by :meth:`replay` on the memory they were given."""

    capturing = None

    def __init__(self, *_, **__):
        self.work, self.made = [], []

    def add(self, func, args, kwargs, result):
        """An operation; what it made is written to the same place when it is done again."""
        given = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if is_tensor(x)}
        made = [
            x for x in tree_leaves(result) if is_tensor(x) and x.untyped_storage().data_ptr() not in given
        ]
        self.made += made

        def again():
            new = (
                [x for x in tree_leaves(func(*args, **kwargs)) if is_tensor(x)]
                if made
                else func(*args, **kwargs)
            )
            for old, value in zip(made, new if made else (), strict=True):
                old.copy_(value)

        self.work.append(again)

    def replay(self):
        for again in self.work:
            again()


def is_tensor(x):
    return isinstance(x, torch.Tensor)


@contextlib.contextmanager
def capture(cuda_graph, **_):
    """As ``torch.cuda.graph``; what was computed meanwhile cannot be read, as nothing was."""
    Graph.capturing = cuda_graph
    try:
        yield
    finally:
        Graph.capturing = None
    for tensor in cuda_graph.made:
        tensor.fill_(
            float("nan") if tensor.is_floating_point() else True if tensor.dtype == torch.bool else 113
        )


def launch(self, *args, **kwargs):
    """A Triton kernel in the interpreter; while a graph is captured, a part of it instead."""
    if Graph.capturing:
        Graph.capturing.work.append(lambda: grid_launch(self, *args, **kwargs))
    else:
        grid_launch(self, *args, **kwargs)


def capture_one(self, shape_key, forward_fn, *args, **kwargs):
    """Where nothing is compiled, one warm-up is as good as two."""
    ways = chain([lambda: None], repeat(forward_fn))
    return captures_one(self, shape_key, lambda: next(ways)(), *args, **kwargs)


captures_one = FullCudaGraphBackend.capture_one


grid_launch = interpreter.GridExecutor.__call__


class Stream:
    """Work is done when it is called."""

    def __init__(self, *_, **__):
        self.device, self.cuda_stream = torch.device(NAME, 0), 0

    def wait_stream(self, *_):
        pass

    wait_event = record_event = record = synchronize = wait_stream


class Module(backend_registration._DummyBackendModule):
    """``torch.hostgpu``."""

    Stream = Event = Stream

    def __getattr__(self, name):
        return lambda *_, **__: None

    def current_stream(self, *_):
        return Stream()

    def stream(self, _):
        return contextlib.nullcontext()

    StreamContext = stream
    graph = staticmethod(capture)

    def is_current_stream_capturing(self):
        return Graph.capturing is not None

    def mem_get_info(self, *_):
        return 4 << 30, 8 << 30


class NominalPlatform(platform.FathomCudaPlatform):
    """Fathom's platform for GPUs, on this device."""

    device_name = device_type = NAME

    def get_device_total_memory(self, device_id=0):
        return psutil.virtual_memory().total

    def get_current_memory_usage(self, device=None):
        return psutil.virtual_memory().used

    def get_device(self, device_id=0):
        return NAME

    def get_dispatch_key_name(self):
        return "native"

    def is_pin_memory_available(self, device=None):
        return False

    def set_device(self, device):
        pass

    empty_cache = synchronize = lambda self: None

    def get_torch_distributed_backend_str(self):
        return "gloo"

    @classmethod
    def seed_everything(cls, seed=None):
        torch.manual_seed(seed or 0)


def copy_from(source, target, non_blocking=False):
    values(target).copy_(values(source))
    return target


def install():
    backend_registration._setup_privateuseone_for_python_backend(NAME, Module())
    # What PyTorch makes of data, past any mode.
    for made in (aten.empty_strided.default, aten.empty.memory_format):
        library.impl(made.name(), NAME, lambda *args, made=made, **kwargs: run(made, args, kwargs))
    library.impl(aten._copy_from.default.name(), NAME, copy_from)
    platforms._current_platform = NominalPlatform()
    engine_args.GPU_RULES = engine_args.GPU_RULES[1:]  # all but the device's name
    unwrap = interpreter._unwrap_tensor
    interpreter._unwrap_tensor = lambda x: values(unwrap(x))
    interpreter.GridExecutor.__call__ = launch
    torch.cuda.CUDAGraph = Graph
    FullCudaGraphBackend.capture_one = capture_one
    # The interpreter runs one program after the other.
    decode_graphs.MOST_ROWS, selector_scores.PARTS, selector_scores.REFINERS = 8, 2, 2
    Nominal().__enter__()


install()

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
