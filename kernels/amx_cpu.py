"""Products of matrices of bfloat16 numbers in Numba kernels, by the tiles of processors that have AMX.

One instruction multiplies a tile of 16 rows of 32 numbers by one of 16 lines of 16 pairs and adds the products up
in float32, as 256 of AVX512-BF16's do (``bfloat16_cpu.py``), whose operands lie in memory alike. A row's result
does not depend on the rows beside it. Intel's Intrinsics Guide has the instructions under "AMX".
"""

import functools

import llvmlite.binding
import numba
import numpy as np
import torch
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np import arrayobj

from fathom.kernels.bfloat16_cpu import has_bfloat16_products, offset, pointer_to
from fathom.kernels.numba_cpu import LOOPS, call

ROWS, COLUMNS = 16, 32
"""The left side of a product has a multiple of so many rows, the right one of so many columns."""
_SUMS, _LEFT, _RIGHT = 0, 4, 6
"""Of the eight tiles, the first of each kind."""


@functools.cache
def has_amx() -> bool:
    """Whether kernels are compiled for this processor itself, it has AMX for bfloat16, and Linux lets us use it."""
    if not has_bfloat16_products() or numba.config.CPU_FEATURES is not None:
        return False
    features = llvmlite.binding.get_host_cpu_features()
    return features.get("amx-tile", False) and features.get("amx-bf16", False) and torch.cpu._init_amx()


def _configuration() -> np.ndarray:
    """[64] uint8: all eight tiles are 16 rows of 64 bytes (palette 1)."""
    found = np.zeros(64, np.uint8)
    found[0] = 1
    found[16:32].view(np.uint16)[:] = 64
    found[48:56] = ROWS
    return found


CONFIGURATION = _configuration()


@intrinsic
def load_tiles(typing_context, configuration):
    """Lay this thread's tiles out as [64] uint8 says; zeros give them up."""
    return types.void(configuration), functools.partial(_with_first, "llvm.x86.ldtilecfg")


@intrinsic
def store_tiles(typing_context, configuration):
    """How this thread's tiles are laid out, into [64] uint8: other libraries lay them out in their own way."""
    return types.void(configuration), functools.partial(_with_first, "llvm.x86.sttilecfg")


def _with_first(name, context, builder, signature, args):
    zero = (context.get_constant(types.intp, 0), types.intp)
    place = pointer_to(context, builder, args[0], signature.args[0], [zero], ir.IntType(8))
    call(builder, name, ir.VoidType(), place)
    return context.get_dummy_value()


@intrinsic(prefer_literal=True)
def _tile(typing_context, sums, row, column, left, left_row, right, rows, add):
    """``sums[row + r, column + c] = left[left_row + r] . right[:, column + c]`` for a tile of r and c; or ``+=``.

    Args:
        rows: constant, 1 or 2; the tile is ``16 * rows`` times 32.
        add: constant 1 to add to what is there.
    """

    def codegen(context, builder, signature, args):
        s, r0, c0, a, a0, b, height, accumulate = signature.args
        word, count = ir.IntType(64), height.literal_value
        column = (args[2], c0)
        arrays = [
            arrayobj.make_array(kind)(context, builder, args[i]) for i, kind in ((0, s), (3, a), (5, b))
        ]
        sums_stride, left_stride, right_stride = (builder.extract_value(array.strides, 0) for array in arrays)
        pairs = builder.extract_value(arrays[1].shape, 1)

        def number(n):
            return ir.Constant(ir.IntType(8), n)

        def tiles(name, *operands):
            call(builder, f"llvm.x86.{name}", ir.VoidType(), *operands)

        def place(array, kind, line, at, element):
            pointer = pointer_to(context, builder, array, kind, [(line, types.intp), at], element)
            return builder.bitcast(pointer, ir.PointerType(ir.IntType(8)))

        def lines(first, kind):
            first = context.cast(builder, first, kind, types.intp)
            return [builder.add(first, word(ROWS * i)) for i in range(count)]

        outputs = []
        for i, line in enumerate(lines(args[1], r0)):
            start = place(args[0], s, line, column, ir.FloatType())
            outputs += [(_SUMS + 2 * i + j, offset(builder, start, 64 * j)) for j in range(2)]
        for n, output in outputs:
            if accumulate.literal_value:
                tiles("tileloadd64", number(n), output, sums_stride)
            else:
                tiles("tilezero", number(n))
        with cgutils.for_range_slice(builder, word(0), pairs, word(ROWS), inc=True) as (k, _):
            for i, line in enumerate(lines(args[4], a0)):
                start = place(args[3], a, line, (k, types.intp), ir.IntType(32))
                tiles("tileloadd64", number(_LEFT + i), start, left_stride)
            right_start = place(args[5], b, k, column, ir.IntType(32))
            for j in range(2):
                tiles("tileloadd64", number(_RIGHT + j), offset(builder, right_start, 64 * j), right_stride)
                for i in range(count):
                    operands = (_SUMS + 2 * i + j, _LEFT + i, _RIGHT + j)
                    tiles("tdpbf16ps", *map(number, operands))
        for n, output in outputs:
            tiles("tilestored64", number(n), output, sums_stride)
        return context.get_dummy_value()

    if isinstance(rows, types.IntegerLiteral) and isinstance(add, types.IntegerLiteral):
        return types.void(sums, row, column, left, left_row, right, rows, add), codegen


@njit(**LOOPS)
def begin_products():
    """Lay this thread's tiles out for the products below; what :func:`end_products` is told.

    Other libraries lay them out in their own way, and take them for granted.
    """
    others = np.empty(64, np.uint8)
    store_tiles(others)
    load_tiles(CONFIGURATION)
    return others


@njit(**LOOPS)
def end_products(others):
    """Lay this thread's tiles out as they were."""
    load_tiles(others)


def _product(add: int):
    # As a call, or of slices, it would count who holds which array.
    @njit(**LOOPS, forceinline=True)
    def multiplied(sums, first, left, left_first, rows, right):
        for column in range(0, right.shape[1], COLUMNS):
            for r in range(0, rows - ROWS, 2 * ROWS):
                _tile(sums, first + r, column, left, left_first + r, right, 2, add)
            if rows % (2 * ROWS):
                last = rows - ROWS
                _tile(sums, first + last, column, left, left_first + last, right, 1, add)

    return multiplied


# ``sums[first:][:rows] = left[left_first:][:rows] @ right`` or ``+=``, between ``begin_products`` and
# ``end_products``: sums [.., columns] float32; left [.., pairs] and right [pairs, columns] int32, each a pair of
# bfloat16 numbers; rows and pairs in whole multiples of 16, columns of 32.
product, add_product = _product(0), _product(1)
