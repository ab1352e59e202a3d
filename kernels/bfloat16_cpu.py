"""Products of bfloat16 numbers in Numba kernels, for processors that have AVX512-BF16.

One instruction multiplies 32 pairs and adds them up in float32, two to a sum. NumPy and Numba know nothing of it,
so what uses it is written as LLVM's instructions (intrinsics), here and in ``four_lines_cpu.py``.
"""

import functools

import llvmlite.binding
import numba
import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np import arrayobj

from fathom.kernels.numba_cpu import LOOPS, ask_for, call

LANES = 32
"""Lines of bfloat16 products are whole multiples of so many elements."""


@functools.cache
def has_bfloat16_products() -> bool:
    """Whether kernels are compiled for this processor itself, and it has AVX512-BF16."""
    if numba.config.CPU_NAME or not numba.config.ENABLE_AVX:
        return False
    try:
        return llvmlite.binding.get_host_cpu_features().get("avx512bf16", False)
    except RuntimeError:  # LLVM cannot tell
        return False


class _BFloat(ir.Type):
    """LLVM's bfloat, which llvmlite has no name for."""

    def __str__(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


FLOATS = ir.VectorType(ir.FloatType(), 16)
PAIRS = ir.VectorType(ir.IntType(32), 16)
HALVES = ir.VectorType(ir.IntType(16), LANES)
_BFLOATS = ir.VectorType(_BFloat(), LANES)
ZEROS = ir.Constant(FLOATS, [0.0] * 16)


def pointer_to(context, builder, array, kind, index, element):
    """Pointer to ``array[index]`` as one to ``element``; ``index`` holds LLVM values and their Numba types."""
    view = arrayobj.make_array(kind)(context, builder, array)
    places = [context.cast(builder, value, given, types.intp) for value, given in index]
    place = cgutils.get_item_pointer(context, builder, kind, view, places, wraparound=False)
    return builder.bitcast(place, ir.PointerType(element))


def offset(builder, pointer, n):
    return builder.gep(pointer, [ir.Constant(ir.IntType(32), n)])


def shuffle(builder, a, b, lanes):
    mask = ir.Constant(ir.VectorType(ir.IntType(32), len(lanes)), list(lanes))
    return builder.shuffle_vector(a, b, mask)


def spread(builder, value, lanes):
    """A vector of ``lanes`` times the same value."""
    one = ir.Constant(ir.VectorType(value.type, lanes), ir.Undefined)
    one = builder.insert_element(one, value, ir.Constant(ir.IntType(32), 0))
    return shuffle(builder, one, one, [0] * lanes)


def multiply_add(builder, sums, a, b):
    """``sums[i] + a[2 i] * b[2 i] + a[2 i + 1] * b[2 i + 1]`` of bfloat16 numbers."""
    a, b = builder.bitcast(a, _BFLOATS), builder.bitcast(b, _BFLOATS)
    return call(builder, "llvm.x86.avx512bf16.dpbf16ps.512", FLOATS, sums, a, b)


def round_sixteen(builder, x):
    """Sixteen float32 numbers as bfloat16, rounded to nearest, ties to even."""
    rounded = call(builder, "llvm.x86.avx512bf16.cvtneps2bf16.512", ir.VectorType(_BFloat(), 16), x)
    return builder.bitcast(rounded, ir.VectorType(ir.IntType(16), 16))


@intrinsic(prefer_literal=True)
def tile_products(typing_context, sums, row, column, left, right, pairs, rows, vectors, add, ahead):
    """``sums[row + r, column + c] = left[row + r] . right[:, column + c]`` for a tile of r and c; or ``+=``.

    Args:
        sums: [.., ..] float32.
        left: [.., pairs] int32, each a pair of bfloat16 numbers; right: [pairs, ..] int32.
        rows, vectors: constants of the kernel; the tile is ``rows`` times ``16 * vectors``.
        add: constant 1 to add to what is there.
        ahead: constant; of a ``right`` that is as wide as the tile, the cache lines so many pairs ahead are asked
            for on the way. 0 for none.
    """

    def codegen(context, builder, signature, args):
        s, r0, c0, a, b, p, r, v, accumulate, later = signature.args
        word = ir.IntType(64)
        zero = (context.get_constant(types.intp, 0), types.intp)
        first, column = context.cast(builder, args[1], r0, types.intp), (args[2], c0)
        height, width = r.literal_value, v.literal_value
        length = context.cast(builder, args[5], p, types.intp)
        lines = [(builder.add(first, word(i)), types.intp) for i in range(height)]
        outputs = [pointer_to(context, builder, args[0], s, [line, column], FLOATS) for line in lines]
        lefts = [pointer_to(context, builder, args[3], a, [line, zero], ir.IntType(32)) for line in lines]
        # LLVM keeps these in registers for the length of the loop.
        tile = [
            cgutils.alloca_once_value(
                builder,
                builder.load(offset(builder, output, j), align=4) if accumulate.literal_value else ZEROS,
            )
            for output in outputs
            for j in range(width)
        ]
        with cgutils.for_range(builder, length) as loop:
            place = pointer_to(context, builder, args[4], b, [(loop.index, types.intp), column], PAIRS)
            if later.literal_value:
                far = builder.gep(place, [word(later.literal_value * width)])
                for j in range(width):
                    ask_for(builder, offset(builder, far, j))
            others = [builder.load(offset(builder, place, j), align=4) for j in range(width)]
            for i, line in enumerate(lefts):
                x = spread(builder, builder.load(builder.gep(line, [loop.index]), align=4), 16)
                for own, other in zip(tile[i * width : (i + 1) * width], others, strict=True):
                    builder.store(multiply_add(builder, builder.load(own), x, other), own)
        for i, output in enumerate(outputs):
            for j in range(width):
                builder.store(builder.load(tile[i * width + j]), offset(builder, output, j), align=4)
        return context.get_dummy_value()

    constants = rows, vectors, add, ahead
    if all(isinstance(constant, types.IntegerLiteral) for constant in constants):
        return types.void(sums, row, column, left, right, pairs, *constants), codegen


ROWS, COLUMNS = 4, 64
"""What a tile of a product has: four rows of four vectors each are the sums that registers hold."""


@njit(**LOOPS)
def begin_products():
    """Before the products below: nothing."""
    return np.empty(0, np.uint8)


@njit(**LOOPS)
def end_products(others):
    """After them: nothing."""


def _product(add: int):
    @njit(**LOOPS)
    def multiplied(sums, left, right):
        pairs, columns = right.shape
        whole = columns // COLUMNS * COLUMNS
        for column in range(0, whole, COLUMNS):
            for row in range(0, len(sums), ROWS):
                tile_products(sums, row, column, left, right, pairs, ROWS, 4, add, 0)
        if columns > whole:
            for row in range(0, len(sums), ROWS):
                tile_products(sums, row, whole, left, right, pairs, ROWS, 2, add, 0)

    return multiplied


# ``sums = left @ right`` or ``+=``: sums [rows, columns] float32; left [rows, pairs] and right [pairs, columns]
# int32, each a pair of bfloat16 numbers; rows in whole multiples of 4, columns of 32.
product, add_product = _product(0), _product(1)
