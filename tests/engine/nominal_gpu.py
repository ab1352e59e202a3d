"""``fathom`` on a GPU in name only: tensors of the device ``cuda`` that lie in the host's memory.

Run with TRITON_INTERPRET=1 and the arguments of ``fathom``. Tensors of the device are wrappers: their operations
run on the CPU, but as on a GPU an operation that takes tensors of both devices raises, and a tensor has to be
copied before NumPy may see it. So does what PyTorch would send past its operations, and wait for: a list that
indexes a tensor, ``new_tensor``. Whatever else waits for the device is counted, and raises while a graph is
captured. SGLang takes its branches for CUDA (``nominal_machine.py``). A graph is the list of operations and
launches that were captured, done again on the same memory. Engine processes are forks.
"""

import contextlib
import sys
from itertools import chain, repeat
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parents[1]))

import nominal_machine
import torch
from torch import library

nominal_machine.install()

from fathom.runtime.sglang_host.machine import torchvision_ops  # noqa: E402

torchvision_ops.declare()

# A wrapper that is made in inference mode takes no view of what was made outside it.
torch.inference_mode = lambda mode=True: torch.no_grad()

import interpreter_pace  # noqa: E402
import interpreter_scans  # noqa: E402
from sglang.srt.distributed.device_communicators.pynccl import PyNcclCommunicator  # noqa: E402
from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding  # noqa: E402
from sglang.srt.model_executor.runner_backend.full_cuda_graph_backend import (  # noqa: E402
    FullCudaGraphBackend,
)
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes  # noqa: E402
from torch.utils._pytree import tree_leaves, tree_map  # noqa: E402
from triton.runtime import interpreter  # noqa: E402

from fathom.kernels import key_shares, selector_scores, stable_top_k  # noqa: E402
from fathom.runtime.sglang_host import forking, platform  # noqa: E402
from fathom.runtime.sglang_host.draft import draft_side, speculation  # noqa: E402
from fathom.runtime.sglang_host.machine import gloo  # noqa: E402
from fathom.runtime.sglang_host.memory import tails  # noqa: E402
from fathom.runtime.sglang_host.step import bursts, compression, decode_graphs  # noqa: E402
from fathom.server.cli import main  # noqa: E402

NAME = "cuda"
BEAMS = "sglang.srt.beam_search"
"""Its modules index tensors of the device by lists, which are sent and waited for: SGLang's own, once a step."""
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
COUNTS_FIRST = {
    aten.nonzero.default,
    aten.masked_select.default,
    aten._unique2.default,
    aten.unique_dim.default,
    aten.unique_consecutive.default,
    aten.bincount.default,
}
"""What makes as many results as the values say, for which PyTorch asks the device."""
UNWRITTEN = {
    aten.empty.memory_format,
    aten.empty_strided.default,
    aten.empty_like.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
}
"""What makes memory and writes nothing there: in a graph, nothing."""


def asks(func, args, kwargs):
    """Whether the host waits for the device though no tensor leaves it."""
    if func in (aten._to_copy.default, aten.copy_.default):
        return sends(func, args, kwargs) and not any([*args[2:], kwargs.get("non_blocking")])
    if func in COUNTS_FIRST:
        return isinstance(args[0], GpuTensor)
    if func is aten.repeat_interleave.Tensor:
        return isinstance(args[0], GpuTensor) and kwargs.get("output_size") is None
    if func not in TAKE_BOTH or not isinstance(args[0], GpuTensor):
        return False
    masks = [x.dtype in (torch.bool, torch.uint8) for x in args[1] if x is not None]
    number = len(args) > 2 and args[2].dim() == 0 and not isinstance(args[2], GpuTensor)
    # A number is filled in where all indices are masks; otherwise it is sent, and waited for.
    return not all(masks) if number else any(masks)


def sends(func, args, kwargs):
    """Whether a copy is one from the host to the device."""
    if func is aten.copy_.default:
        return isinstance(args[0], GpuTensor) and not isinstance(args[1], GpuTensor)
    device = kwargs.get("device")
    to = device is not None and torch.device(device).type == NAME
    return to and not isinstance(args[0], GpuTensor)


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
        Waits.count += 1
        return self.raw.tolist()

    def __getitem__(self, index):
        if isinstance(index, list) and sys._getframe(1).f_globals["__name__"].startswith(BEAMS):
            Waits.count += 1
            index = GpuTensor(torch.tensor(index))
        return super().__getitem__(index)

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
    device, asked = kwargs.get("device"), asks(func, args, kwargs)
    given = there
    if device is not None:
        there = torch.device(device).type == NAME
        kwargs = kwargs | {"device": torch.device("cpu") if there else device}
    kwargs = {name: value for name, value in kwargs.items() if name != "pin_memory"}
    args, kwargs = tree_map(values, (args, kwargs))
    result = func(*args, **kwargs)
    answers = func._schema.returns and not any(map(is_tensor, tree_leaves(result)))
    Waits.count += bool(asked or (given and (answers or not there)))
    if graph := Graph.capturing:
        crosses = (given and not there) or (there and others)
        if crosses or asked or (given and answers):
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


class Waits:
    """How often the host asked for what the device has; the most in one call of a function, by its requests."""

    count, most = 0, {}

    @classmethod
    def of(cls, place, name):
        stock, most = getattr(place, name), cls.most.setdefault(name, {})

        def counted(*args):
            before, requests = cls.count, next((len(x) for x in args if isinstance(x, list)), 1)
            result = stock(*args)
            most[requests] = max(most.get(requests, 0), cls.count - before)
            return result

        setattr(place, name, counted)


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
        if func in UNWRITTEN:
            return

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
        with _disable_current_modes():
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
        with _disable_current_modes():
            grid_launch(self, *args, **kwargs)


def capture_one(self, shape_key, forward_fn, *args, **kwargs):
    """Where nothing is compiled, one warm-up is as good as two."""
    ways = chain([lambda: None], repeat(forward_fn))
    return captures_one(self, shape_key, lambda: next(ways)(), *args, **kwargs)


captures_one = FullCudaGraphBackend.capture_one


grid_launch = interpreter.GridExecutor.__call__


def as_made(make):
    """A function of PyTorch's that sends what it makes of data past any mode."""

    def made(data, *args, device=None, pin_memory=False, **kwargs):
        result = make(data, *args, **kwargs)
        return result if device is None else result.to(device)

    return made


def install():
    # What PyTorch makes of data, past any mode.
    torch.tensor, torch.as_tensor = as_made(torch.tensor), as_made(torch.as_tensor)
    for made in (aten.empty_strided.default, aten.empty.memory_format):
        library.impl(made.name(), "CUDA", lambda *args, made=made, **kwargs: run(made, args, kwargs))
    platform.FathomCudaPlatform.get_torch_distributed_backend_str = lambda self: "gloo"
    gloo.without_nccl()
    nominal_machine.built()
    unwrap = interpreter._unwrap_tensor
    interpreter._unwrap_tensor = lambda x: values(unwrap(x))
    interpreter.GridExecutor.__call__ = launch
    torch.cuda.CUDAGraph, torch.cuda.graph = Graph, capture
    torch.cuda.is_current_stream_capturing = lambda: Graph.capturing is not None
    FullCudaGraphBackend.capture_one = capture_one
    # There is no driver that would not survive a fork.
    forking.FathomCpuPlatform = platform.FathomCudaPlatform
    # There is no NCCL to change to while a graph is captured.
    PyNcclCommunicator.change_state = lambda *_, **__: contextlib.nullcontext()
    # A kernel whose mask the interpreter does not take.
    VocabParallelEmbedding._use_triton_embedding = lambda *_: False
    # The interpreter runs one program after the other.
    decode_graphs.MOST_ROWS, selector_scores.PARTS, selector_scores.REFINERS = 8, 2, 2
    stable_top_k.PARTS = 2
    interpreter_pace.install()
    interpreter_scans.install()
    key_shares.PIECES_PER_PROCESSOR = 1 / 16
    for place, names in (
        (tails.Tails, ("take", "shrink")),
        (speculation, ("_choose", "_judged", "settle")),
        (compression.CompressionStep, ("_select",)),
        (bursts, ("with_runs",)),
    ):
        for name in names:
            Waits.of(place, name)
    report = draft_side.DraftSide.report
    draft_side.DraftSide.report = lambda self: report(self) | {"waits": Waits.most}
    Nominal().__enter__()


install()

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
