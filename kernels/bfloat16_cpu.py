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


def folded(builder, x, combine):
    """One number from a vector's, always combined in the same order."""
    while x.type.count > 1:
        count = x.type.count
        lower, upper = range(count // 2), range(count // 2, count)
        x = combine(builder, shuffle(builder, x, x, lower), shuffle(builder, x, x, upper))
    return builder.extract_element(x, ir.Constant(ir.IntType(32), 0))


def multiply_add(builder, sums, a, b):
    """``sums[i] + a[2 i] * b[2 i] + a[2 i + 1] * b[2 i + 1]`` of bfloat16 numbers."""
    a, b = builder.bitcast(a, _BFLOATS), builder.bitcast(b, _BFLOATS)
    return call(builder, "llvm.x86.avx512bf16.dpbf16ps.512", FLOATS, sums, a, b)


def round_sixteen(builder, x):
    """Sixteen float32 numbers as bfloat16, rounded to nearest, ties to even."""
    rounded = call(builder, "llvm.x86.avx512bf16.cvtneps2bf16.512", ir.VectorType(_BFloat(), 16), x)
    return builder.bitcast(rounded, ir.VectorType(ir.IntType(16), 16))


_FIRST_HALVES, _LAST_HALVES = ([n + i for i in range(8) for n in (first, first + 16)] for first in (0, 8))


@intrinsic
def turn_sixteen(typing_context, array, lines, at, column, turned):
    """``turned[column + c, at + t] = array[lines[at + t], column + c]`` for c and t below 16.

    Args:
        array, turned: [.., ..] int32.
        lines: [..] int64.
    """

    def codegen(context, builder, signature, args):
        a, of_lines, t, c, b = signature.args
        word = ir.IntType(64)
        first = pointer_to(context, builder, args[1], of_lines, [(args[2], t)], word)
        rows = []
        for i in range(16):
            place = [(builder.load(builder.gep(first, [word(i)])), types.intp), (args[3], c)]
            rows.append(builder.load(pointer_to(context, builder, args[0], a, place, PAIRS), align=4))
        # A round gives a column's highest bit to the row, as its lowest, and the row's highest to the column.
        for _ in range(4):
            rows = [
                shuffle(builder, rows[i], rows[i + 8], lanes)
                for i in range(8)
                for lanes in (_FIRST_HALVES, _LAST_HALVES)
            ]
        column = context.cast(builder, args[3], c, types.intp)
        for i, row in enumerate(rows):
            place = [(builder.add(column, word(i)), types.intp), (args[2], t)]
            builder.store(row, pointer_to(context, builder, args[4], b, place, PAIRS), align=4)
        return context.get_dummy_value()

    if (array.dtype, lines.dtype, turned.dtype) == (types.int32, types.int64, types.int32):
        return types.void(array, lines, at, column, turned), codegen


@intrinsic(prefer_literal=True)
def tile_products(typing_context, sums, row, column, left, left_row, right, pairs, rows, vectors, add, ahead):
    """``sums[row + r, column + c] = left[left_row + r] . right[:, column + c]`` for a tile of r and c; or ``+=``.

    Args:
        sums: [.., ..] float32.
        left: [.., pairs] int32, each a pair of bfloat16 numbers; right: [pairs, ..] int32.
        rows, vectors: constants of the kernel; the tile is ``rows`` times ``16 * vectors``.
        add: constant 1 to add to what is there.
        ahead: constant; of a ``right`` that is as wide as the tile, the cache lines so many pairs ahead are asked
            for on the way. 0 for none.
    """

    def codegen(context, builder, signature, args):
        s, r0, c0, a, a0, b, p, r, v, accumulate, later = signature.args
        word = ir.IntType(64)
        zero = (context.get_constant(types.intp, 0), types.intp)
        column, height, width = (args[2], c0), r.literal_value, v.literal_value
        length = context.cast(builder, args[6], p, types.intp)

        def lines(array, kind, first, first_kind, column, element):
            first = context.cast(builder, first, first_kind, types.intp)
            for i in range(height):
                line = (builder.add(first, word(i)), types.intp)
                yield pointer_to(context, builder, array, kind, [line, column], element)

        outputs = list(lines(args[0], s, args[1], r0, column, FLOATS))
        lefts = list(lines(args[3], a, args[4], a0, zero, ir.IntType(32)))
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
            place = pointer_to(context, builder, args[5], b, [(loop.index, types.intp), column], PAIRS)
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
        return types.void(sums, row, column, left, left_row, right, pairs, *constants), codegen


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
    # As a call, or of slices, it would count who holds which array.
    @njit(**LOOPS, forceinline=True)
    def multiplied(sums, first, left, left_first, rows, right):
        pairs, columns = right.shape
        whole = columns // COLUMNS * COLUMNS
        for column in range(0, whole, COLUMNS):
            for r in range(0, rows, ROWS):
                tile_products(sums, first + r, column, left, left_first + r, right, pairs, ROWS, 4, add, 0)
        if columns > whole:
            for r in range(0, rows, ROWS):
                tile_products(sums, first + r, whole, left, left_first + r, right, pairs, ROWS, 2, add, 0)

    return multiplied


# ``sums[first:][:rows] = left[left_first:][:rows] @ right`` or ``+=``: sums [.., columns] float32; left [.., pairs]
# and right [pairs, columns] int32, each a pair of bfloat16 numbers; rows in whole multiples of 4, columns of 32.
product, add_product = _product(0), _product(1)
