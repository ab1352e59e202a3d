"""Products of few rows with bfloat16 weights as they are, in float32, for processors without bfloat16 products.

A word of a weight's row holds two inputs' numbers, and a bfloat16 number is the upper half of a float32: a shift
and a mask make two vectors of numbers of each vector of words. Rows of inputs are taken apart in the same way
beforehand. Weights stay where they are, and can be changed.
"""

from itertools import product

import numpy as np
import torch
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from fathom.kernels.bfloat16_cpu import folded, pointer_to
from fathom.kernels.numba_cpu import LINE_BYTES, LOOPS, as_array, ask_for, call, to_float32

WIDTHS = 64, 32
"""Outputs that are computed together, a *block*, where whole blocks fill each half of a weight."""

_LANES, _LINE = 16 if torch.cpu._is_avx512_supported() else 8, LINE_BYTES // 4
_FLOATS, _WORDS = (ir.VectorType(kind, _LANES) for kind in (ir.FloatType(), ir.IntType(32)))

_RUN = 2048
"""Pairs of inputs whose sums stay in registers."""

# Rows and outputs of a tile: what registers hold (of AVX512 there are twice as many); and what keeps memory busy
# where there are few rows.
_ROWS, _OUTPUTS, _MORE_OUTPUTS = 4, _LANES // 4, 4


def plain_blocks(weight: torch.Tensor) -> np.ndarray | None:
    """A weight's memory as blocks of outputs, which lives as long as the weight.

    Args:
        weight: [outputs, inputs].

    Returns:
        [blocks, width, inputs / 2] int32, pairs of inputs, of a width of ``WIDTHS``; None where the weight is not
        of bfloat16 or not contiguous, outputs fill no whole blocks, or inputs no whole lines of the caches.
    """
    outputs, inputs = weight.shape
    if weight.dtype != torch.bfloat16 or inputs % (2 * _LINE) or not weight.is_contiguous():
        return None
    width = next((width for width in WIDTHS if outputs % (2 * width) == 0), WIDTHS[-1])
    if outputs % width:
        return None
    return as_array(weight).view(np.int32).reshape(-1, width, inputs // 2)


@intrinsic(prefer_literal=True)
def _add_tile(typing_context, sums, row, column, evens, odds, lines, block, first, pairs, rows, outputs):
    """``sums[row + r, column + o] += evens[row + r] . low[o] + odds[row + r] . high[o]`` for a tile of r and o.

    Low and high are the halves of ``lines[block, column + o, first : first + pairs]``. What the next tile reads is
    asked for on the way: a row is too short for the processor's prefetchers.

    Args:
        sums: [.., ..] float32; evens, odds: [.., at least pairs] float32.
        lines: [.., .., ..] int32, each a pair of bfloat16 numbers; pairs: in whole lines.
        rows, outputs: constants of the kernel, of the tile.
    """

    def codegen(context, builder, signature, args):
        word, float_ = ir.IntType(64), ir.FloatType()

        def number(i):
            return context.cast(builder, args[i], signature.args[i], types.intp)

        def pointer(array, element, *index):
            places = [(x, types.intp) for x in index]
            return pointer_to(context, builder, args[array], signature.args[array], places, element)

        height, width = (signature.args[i].literal_value for i in (9, 10))
        lines_of_rows = [builder.add(number(1), word(i)) for i in range(height)]
        columns, next_columns = (
            [builder.add(number(2), word(first + j)) for j in range(width)] for first in (0, width)
        )
        lefts = [[pointer(side, float_, line, word(0)) for side in (3, 4)] for line in lines_of_rows]
        rights, next_rights = (
            [pointer(5, ir.IntType(32), number(6), column, number(7)) for column in some]
            for some in (columns, next_columns)
        )
        nothing = ir.Constant(_FLOATS, [0.0] * _LANES)
        tile = [[cgutils.alloca_once_value(builder, nothing) for _ in columns] for _ in lines_of_rows]
        sixteen, upper = (ir.Constant(_WORDS, [value] * _LANES) for value in (16, -(1 << 16)))
        with cgutils.for_range(builder, builder.udiv(number(8), word(_LINE))) as loop:
            begin = builder.mul(loop.index, word(_LINE))
            for right in next_rights:
                ask_for(builder, builder.gep(right, [begin]))
            for j, step in product(range(width), range(0, _LINE, _LANES)):
                at = builder.add(begin, word(step))
                both = _vector(builder, rights[j], at, _WORDS)
                halves = builder.shl(both, sixteen), builder.and_(both, upper)
                for i, left in enumerate(lefts):
                    own = builder.load(tile[i][j])
                    for half, side in zip(halves, left, strict=True):
                        inputs, weights = _vector(builder, side, at, _FLOATS), builder.bitcast(half, _FLOATS)
                        own = call(builder, f"llvm.fma.v{_LANES}f32", _FLOATS, inputs, weights, own)
                    builder.store(own, tile[i][j])
        for i, line in enumerate(lines_of_rows):
            for j, column in enumerate(columns):
                total = pointer(0, float_, line, column)
                sum_ = folded(builder, builder.load(tile[i][j]), type(builder).fadd)
                builder.store(builder.fadd(builder.load(total), sum_), total)
        return context.get_dummy_value()

    if all(isinstance(constant, types.IntegerLiteral) for constant in (rows, outputs)):
        given = sums, row, column, evens, odds, lines, block, first, pairs, rows, outputs
        return types.void(*given), codegen


def _vector(builder, begin, at, kind):
    """The vector that begins so many elements behind a pointer."""
    return builder.load(builder.bitcast(builder.gep(begin, [at]), ir.PointerType(kind)), align=4)


@njit(**LOOPS)
def plain_products(x, lines, block):
    """[rows, width] float32, the rows' products with one block of outputs.

    A row's are the same to the bit whatever rows are beside it.

    Args:
        x: [rows, inputs / 2] int32, pairs of bfloat16 numbers.
        lines: of :func:`plain_blocks`.
    """
    rows, pairs = x.shape
    width = lines.shape[1]
    sums = np.zeros((rows, width), np.float32)
    numbers = x.view(np.uint16)
    length = min(_RUN, pairs)
    evens, odds = np.empty((rows, length), np.float32), np.empty((rows, length), np.float32)
    for first in range(0, pairs, _RUN):
        n = min(_RUN, pairs - first)
        for r in range(rows):
            for k in range(n):
                evens[r, k] = to_float32(numbers[r, 2 * (first + k)])
                odds[r, k] = to_float32(numbers[r, 2 * (first + k) + 1])
        whole = rows // _ROWS * _ROWS
        for j in range(0, width, _MORE_OUTPUTS):
            for r in range(0, whole, _ROWS):
                for o in range(j, j + _MORE_OUTPUTS, _OUTPUTS):
                    _add_tile(sums, r, o, evens, odds, lines, block, first, n, _ROWS, _OUTPUTS)
            r = whole
            if rows - r >= 2:
                _add_tile(sums, r, j, evens, odds, lines, block, first, n, 2, _MORE_OUTPUTS)
                r += 2
            if r < rows:
                _add_tile(sums, r, j, evens, odds, lines, block, first, n, 1, _MORE_OUTPUTS)
    return sums
