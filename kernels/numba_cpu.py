"""What the Numba CPU kernels share: conversions of 16-bit floats, exponential and logarithm, the number of threads.

NumPy and Numba have no bfloat16, and Numba no arithmetic on float16. A kernel therefore sees a bfloat16 tensor as
an array of uint16 and a float16 tensor as an array of int16 (:func:`as_array`); the element type selects the
conversion at compile time, so one kernel source serves the three dtypes.
"""

import ctypes
import logging
import os
from importlib import import_module
from typing import Any

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np import arrayobj

from fathom.kernels import numba_cache_cpu

logger = logging.getLogger(__name__)

numba_cache_cpu.install()

# One pool of threads for PyTorch's operators and Numba's kernels: PyTorch's OpenMP library is in the global scope,
# where Numba's OpenMP layer looks first. With a pool each, the threads of one wait actively while the other's
# compute. Without that, threads of the workqueue layer at least sleep while they wait; that layer takes one caller
# at a time, which holds because a kernel keeps the GIL.
_OPENMP = ctypes.CDLL(None)


def threading_layer() -> str:
    """Numba's layer of threads for this machine: ``omp``, or ``workqueue`` where it cannot be, with a warning."""
    if not hasattr(_OPENMP, "GOMP_parallel"):
        return "workqueue"
    try:
        import_module("numba.np.ufunc.omppool")
    except ImportError as error:
        # It is linked with the system's library by a file name that PyTorch's copy of it has not.
        logger.warning(
            "Numba and PyTorch will not share their threads, which makes steps slower; install libgomp (Debian: "
            "libgomp1): %s",
            error,
        )
        return "workqueue"
    return "omp"


if "NUMBA_THREADING_LAYER" not in os.environ:
    numba.config.THREADING_LAYER = threading_layer()

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# Below this many elements a kernel stays on the calling thread: starting a parallel region would cost more.
SERIAL_ELEMENTS = 32768

# How the loops are compiled. The order of additions is free (SIMD), but NaN and infinities mean what they mean; a
# division by zero gives infinity instead of an exception, whose check would keep the loop scalar.
LOOPS: dict[str, Any] = {
    "fastmath": {"reassoc", "contract", "nsz", "arcp"},
    "error_model": "numpy",
    "cache": True,
}

# The same for attention, whose exponentials may be approximate.
APPROXIMATE = LOOPS | {"fastmath": LOOPS["fastmath"] | {"afn"}}

# The same for overloads: as calls, all fields of their arrays would go through memory. Nobody else calls them, so a
# form for callers in C is not compiled.
INNER: dict[str, Any] = {
    "fastmath": APPROXIMATE["fastmath"],
    "error_model": "numpy",
    "forceinline": True,
    "no_cfunc_wrapper": True,
}

_BITS = {torch.bfloat16: torch.uint16, torch.float16: torch.int16}


def as_array(tensor: torch.Tensor) -> np.ndarray:
    """NumPy view of a float32, bfloat16 or float16 tensor on the CPU, 16-bit floats as their bits."""
    if tensor.requires_grad:
        tensor = tensor.detach()
    bits = _BITS.get(tensor.dtype)
    return tensor.numpy() if bits is None else tensor.view(bits).numpy()


def as_rows(tensor: torch.Tensor) -> tuple[np.ndarray, int, int] | None:
    """A tensor as rows of its last dimension, without a copy.

    Returns:
        The memory from the first to the last element as a flat array, the distance between rows and their number;
        None for an empty tensor and for one whose rows are not evenly spaced or not contiguous.
    """
    if tensor.numel() == 0 or tensor.stride(-1) != 1:
        return None
    width = tensor.shape[-1]
    if tensor.is_contiguous():
        return as_array(tensor).reshape(-1), width, tensor.numel() // width
    if tensor.dim() != 2:
        return None
    rows, stride = tensor.shape[0], tensor.stride(0)
    return as_array(tensor.as_strided(((rows - 1) * stride + width,), (1,))), stride, rows


def as_lines(tensor: torch.Tensor) -> tuple[np.ndarray, int, int]:
    """A [slots, heads, dim] tensor as one contiguous array of lines [lines, dim], of which it may be a part.

    Whatever order slots and heads have in memory, and a layer's view of a pool that holds several layers too, it is
    the one type of array for which a kernel is compiled.

    Returns:
        The array, and how many lines apart two slots and two heads are.

    Raises:
        ValueError: when slots or heads are not a whole number of lines apart.
    """
    slots, heads, dim = tensor.shape
    if tensor.is_contiguous():
        return as_array(tensor).reshape(-1, dim), heads, 1
    (slot, slot_rest), (head, head_rest) = (divmod(stride, dim) for stride in tensor.stride()[:2])
    if slot_rest or head_rest or tensor.stride(2) != 1:
        raise ValueError(
            f"keys and values must be [slots, heads, dim] in whole lines, got strides {tensor.stride()}"
        )
    lines = (slots - 1) * slot + (heads - 1) * head + 1
    return as_array(tensor.as_strided((lines, dim), (dim, 1))), slot, head


def literal_values(sizes: types.BaseTuple) -> list[int]:
    """The numbers of a tuple of constants, of whose type an overload is told."""
    return [size.literal_value for size in sizes.types]


def match_torch_threads() -> None:
    """Let Numba's parallel loops of this thread use as many threads as PyTorch's."""
    threads = torch.get_num_threads()
    numba.set_num_threads(min(threads, numba.config.NUMBA_NUM_THREADS))
    if numba.threading_layer() == "omp":
        # As it starts, Numba's layer sets the number of threads for PyTorch too, and allows regions within regions,
        # which makes PyTorch's flash attention two to five times slower.
        _OPENMP.omp_set_max_active_levels(1)
        torch.set_num_threads(threads)


LINE_BYTES = 64


@intrinsic
def prefetch(typing_context, array, line, element):
    """Ask for the cache line of ``array[line, element]``, in range or not: nothing waits, nothing is read.

    It comes into the second level of caches; into the first, fewer seem to be on their way at a time.
    """

    def codegen(context, builder, signature, args):
        kind, numbers = signature.args[0], zip(signature.args[1:], args[1:], strict=True)
        view = arrayobj.make_array(kind)(context, builder, args[0])
        index = [context.cast(builder, value, given, types.intp) for given, value in numbers]
        place = cgutils.get_item_pointer(context, builder, kind, view, index, wraparound=False)
        ask_for(builder, place)
        return context.get_dummy_value()

    return types.void(array, line, element), codegen


def ask_for(builder, place):
    """What :func:`prefetch` does, for other intrinsics: the cache line at a pointer."""
    place = builder.bitcast(place, ir.PointerType(ir.IntType(8)))
    read, keep, data = _constant(0), _constant(2), _constant(1)
    call(builder, "llvm.prefetch.p0i8", ir.VoidType(), place, read, keep, data)


def call(builder, name, result, *args):
    """Call one of LLVM's intrinsics; ``result`` is its type."""
    kind = ir.FunctionType(result, [x.type for x in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), args)


def _constant(value: int) -> ir.Constant:
    return ir.Constant(ir.IntType(32), value)


@intrinsic
def to_float32(typing_context, value):
    """The float32 value of an element of :func:`as_array`."""

    def codegen(context, builder, signature, args):
        if signature.args[0] == types.float32:
            return args[0]
        if signature.args[0] == types.int16:
            return builder.fpext(builder.bitcast(args[0], ir.HalfType()), ir.FloatType())
        wide = builder.shl(builder.zext(args[0], ir.IntType(32)), _constant(16))
        return builder.bitcast(wide, ir.FloatType())

    if value in (types.float32, types.uint16, types.int16):
        return types.float32(value), codegen


@intrinsic
def from_float32(typing_context, value, array):
    """``value`` (float32) as an element of ``array``, rounded to nearest, ties to even."""

    def codegen(context, builder, signature, args):
        x = args[0]
        if signature.return_type == types.float32:
            return x
        if signature.return_type == types.int16:
            return builder.bitcast(builder.fptrunc(x, ir.HalfType()), ir.IntType(16))
        bits = builder.bitcast(x, ir.IntType(32))
        last = builder.and_(builder.lshr(bits, _constant(16)), _constant(1))
        rounded = builder.lshr(builder.add(bits, builder.add(last, _constant(0x7FFF))), _constant(16))
        # Rounding the bits of a NaN could carry into an infinity.
        chosen = builder.select(builder.fcmp_unordered("uno", x, x), _constant(0x7FC0), rounded)
        return builder.trunc(chosen, ir.IntType(16))

    if value == types.float32 and array.dtype in (types.float32, types.uint16, types.int16):
        return array.dtype(value, array), codegen


# Adding 1.5 * 2**23 to a float32 of modest size rounds it to an integer, which then sits in the lowest bits.
_SHIFT = np.float32(12582912.0)
_SHIFT_BITS = 0x4B400000


@intrinsic
def _times_power_of_two(typing_context, value, shifted):
    """``value * 2**n``, where ``shifted`` is n + _SHIFT; in two factors, so that no power overflows by itself."""

    def codegen(context, builder, signature, args):
        n = builder.sub(builder.bitcast(args[1], ir.IntType(32)), _constant(_SHIFT_BITS))
        half = builder.ashr(n, _constant(1))
        result = args[0]
        for exponent in (half, builder.sub(n, half)):
            power = builder.shl(builder.add(exponent, _constant(127)), _constant(23))
            result = builder.fmul(result, builder.bitcast(power, ir.FloatType()))
        return result

    return types.float32(types.float32, types.float32), codegen


_LOG2_E = np.float32(1.44269504088896341)
_LN2_HIGH = np.float32(0.693359375)
_LN2_LOW = np.float32(-2.12194440e-4)
_LOWEST = np.float32(-105.0)
_HIGHEST = np.float32(89.0)
_P0 = np.float32(1.9875691500e-4)
_P1 = np.float32(1.3981999507e-3)
_P2 = np.float32(8.3334519073e-3)
_P3 = np.float32(4.1665795894e-2)
_P4 = np.float32(1.6666665459e-1)
_P5 = np.float32(5.0000001201e-1)
_ONE = np.float32(1.0)


@njit(fastmath={"contract"}, cache=True)
def _exp_parts(x):
    """(value, shifted) of e**x = value * 2**n, where ``shifted`` is n + _SHIFT; value is in about [0.7, 1.42].

    Range reduction to |r| <= ln(2)/2 and Cephes' polynomial. It is compiled without ``reassoc``: reordering would
    undo the rounding of ``shifted`` and the split of ln(2).
    """
    shifted = x * _LOG2_E + _SHIFT
    n = shifted - _SHIFT
    r = x - n * _LN2_HIGH
    r = r - n * _LN2_LOW
    p = ((((_P0 * r + _P1) * r + _P2) * r + _P3) * r + _P4) * r + _P5
    return p * r * r + r + _ONE, shifted


@njit(fastmath={"contract"}, cache=True)
def exp_float32(x):
    """e**x in float32, relative error below 1e-6; unlike ``math.exp`` it is no call, so loops over it vectorise.

    Overflow gives inf, underflow 0, NaN stays NaN.
    """
    x = _HIGHEST if x > _HIGHEST else x
    x = _LOWEST if x < _LOWEST else x
    value, shifted = _exp_parts(x)
    return _times_power_of_two(value, shifted)


_LEAST = np.float32(-86.0)


@intrinsic
def _scaled(typing_context, value, shifted):
    """``value * 2**n``, where ``shifted`` is n + _SHIFT, and value and result are normal numbers."""

    def codegen(context, builder, signature, args):
        value, n = (builder.bitcast(x, ir.IntType(32)) for x in args)
        return builder.bitcast(builder.add(value, builder.shl(n, _constant(23))), ir.FloatType())

    return types.float32(types.float32, types.float32), codegen


@njit(fastmath={"contract"}, cache=True)
def exp_of_negative(x):
    """:func:`exp_float32` of a number that is neither positive nor NaN, in fewer instructions; at least 4e-38."""
    x = _LEAST if x < _LEAST else x
    value, shifted = _exp_parts(x)
    return _scaled(value, shifted)


_ROOT_HALF_BITS = 0x3F3504F3


@intrinsic
def _exponent(typing_context, value):
    """The whole number n, as float32, for which ``value / 2**n`` is in [sqrt(1/2), sqrt(2))."""

    def codegen(context, builder, signature, args):
        above = builder.sub(builder.bitcast(args[0], ir.IntType(32)), _constant(_ROOT_HALF_BITS))
        return builder.sitofp(builder.ashr(above, _constant(23)), ir.FloatType())

    return types.float32(types.float32), codegen


@intrinsic
def _mantissa(typing_context, value):
    """``value / 2**n`` for the n of :func:`_exponent`."""

    def codegen(context, builder, signature, args):
        bits = builder.bitcast(args[0], ir.IntType(32))
        n = builder.ashr(builder.sub(bits, _constant(_ROOT_HALF_BITS)), _constant(23))
        return builder.bitcast(builder.sub(bits, builder.shl(n, _constant(23))), ir.FloatType())

    return types.float32(types.float32), codegen


_SMALLEST = np.float32(np.finfo(np.float32).tiny)
_HALF = np.float32(0.5)
_L0 = np.float32(7.0376836292e-2)
_L1 = np.float32(-1.1514610310e-1)
_L2 = np.float32(1.1676998740e-1)
_L3 = np.float32(-1.2420140846e-1)
_L4 = np.float32(1.4249322787e-1)
_L5 = np.float32(-1.6668057665e-1)
_L6 = np.float32(2.0000714765e-1)
_L7 = np.float32(-2.4999993993e-1)
_L8 = np.float32(3.3333331174e-1)


@njit(fastmath={"contract"}, cache=True)
def log_float32(x):
    """Natural logarithm of a finite float32, error below 2e-7, absolute or relative; no call, as exp_float32.

    What is below the smallest normal number (1.2e-38), zero and negative numbers too, counts as that number.
    """
    x = x if x > _SMALLEST else _SMALLEST
    n = _exponent(x)
    r = _mantissa(x) - _ONE
    square = r * r
    p = (((((((_L0 * r + _L1) * r + _L2) * r + _L3) * r + _L4) * r + _L5) * r + _L6) * r + _L7) * r + _L8
    y = r * square * p + n * _LN2_LOW - _HALF * square
    return r + y + n * _LN2_HIGH
