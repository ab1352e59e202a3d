"""A running softmax on the CPU, one block of scores after the other: what attention's kernels share.

It has two forms, chosen by the number format of the weights when a kernel is compiled: loops that LLVM vectorises,
for float32, and AVX-512's own instructions for weights that are rounded to bfloat16, on processors that have them
(``bfloat16_cpu.py``).
"""

import math

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic, overload
from numba.np import arrayobj

from fathom.kernels.bfloat16_cpu import FLOATS, ZEROS, pointer_to, round_sixteen, shuffle, spread
from fathom.kernels.numba_cpu import APPROXIMATE, INNER, call, exp_float32


@njit(**APPROXIMATE, forceinline=True)
def fold_block(score, scale, weight, sums, top, total, x):
    """One block of scores into row x's running softmax: ``top[x]``, ``total[x]`` and what ``sums`` holds so far.

    Args:
        score: [block] float32, -inf where the row sees nothing; scale: positive, of the scores.
        weight: [block] float32, or uint16 for bfloat16; of that, block is a multiple of 16.
        sums: [width] float32, scaled to the new top.
    """
    new_top = max(_largest(score, weight) * scale, top[x])
    if new_top == -np.inf:
        weight[:] = 0
        return
    if new_top > top[x]:
        rescale = exp_float32(top[x] - new_top)
        top[x] = new_top
        total[x] *= rescale
        for d in range(len(sums)):
            sums[d] *= rescale
    total[x] += _exponentials(score, scale, new_top, weight)


def _largest(score, weight):
    """The largest of a block's scores; ``weight`` says in which form."""


def _exponentials(score, scale, top, weight):
    """``weight[t] = exp(scale * score[t] - top)``, and what they add up to before they are rounded."""


@overload(_largest, jit_options=INNER)
def _largest_of(score, weight):
    if weight.dtype == types.uint16:
        return lambda score, weight: _largest_avx512(score)

    def loop(score, weight):
        largest = np.float32(-np.inf)
        for t in range(len(score)):
            largest = max(largest, score[t])
        return largest

    return loop


@overload(_exponentials, jit_options=INNER)
def _exponentials_of(score, scale, top, weight):
    if weight.dtype == types.uint16:
        return lambda score, scale, top, weight: _exponentials_avx512(score, scale, top, weight)

    def loop(score, scale, top, weight):
        total = np.float32(0)
        for t in range(len(score)):
            weight[t] = exp_float32(score[t] * scale - top)
            total += weight[t]
        return total

    return loop


_LOG2_E = 1.44269504088896341
_HALVES = ir.VectorType(ir.IntType(16), 16)
_LEAST = -160.0
"""Two to this power is nothing in float32."""

# 2**r for |r| <= 1/2, from the highest power on; the largest relative error is 2.3e-7.
_POWER_OF_TWO = (
    0.001327647129073739,
    0.009675540961325169,
    0.05550713092088699,
    0.24022120237350464,
    0.6931469440460205,
    1.0000001192092896,
)


@intrinsic
def _largest_avx512(typing_context, score):
    """The largest of [n] float32, n a multiple of 16."""

    def codegen(context, builder, signature, args):
        count, first = _vectors(context, builder, args[0], signature.args[0], FLOATS)
        largest = cgutils.alloca_once_value(builder, _constants(-math.inf))
        with cgutils.for_range(builder, count) as loop:
            x = builder.load(builder.gep(first, [loop.index]), align=4)
            builder.store(_larger(builder, builder.load(largest), x), largest)
        return _folded(builder, builder.load(largest), _larger)

    if score.dtype == types.float32:
        return types.float32(score), codegen


@intrinsic
def _exponentials_avx512(typing_context, score, scale, top, weight):
    """:func:`_exponentials` of [n] float32 into [n] uint16, n a multiple of 16."""

    def codegen(context, builder, signature, args):
        count, first = _vectors(context, builder, args[0], signature.args[0], FLOATS)
        _, written = _vectors(context, builder, args[3], signature.args[3], _HALVES)
        factor, less = spread(builder, args[1], 16), spread(builder, builder.fneg(args[2]), 16)
        total = cgutils.alloca_once_value(builder, ZEROS)
        with cgutils.for_range(builder, count) as loop:
            x = builder.load(builder.gep(first, [loop.index]), align=4)
            # The power of e, then of two: what is near the top, and weighs most, loses nothing.
            x = builder.fmul(call(builder, "llvm.fma.v16f32", FLOATS, x, factor, less), _constants(_LOG2_E))
            x = builder.select(builder.fcmp_ordered("<", x, _constants(_LEAST)), _constants(_LEAST), x)
            whole = call(builder, "llvm.nearbyint.v16f32", FLOATS, x)
            rest, power = builder.fsub(x, whole), _constants(_POWER_OF_TWO[0])
            for coefficient in _POWER_OF_TWO[1:]:
                power = call(builder, "llvm.fma.v16f32", FLOATS, power, rest, _constants(coefficient))
            # power * 2**whole, rounded as always.
            every, usual = ir.Constant(ir.IntType(16), -1), ir.Constant(ir.IntType(32), 4)
            w = call(builder, "llvm.x86.avx512.mask.scalef.ps.512", FLOATS, power, whole, power, every, usual)
            builder.store(builder.fadd(builder.load(total), w), total)
            builder.store(round_sixteen(builder, w), builder.gep(written, [loop.index]), align=2)
        return _folded(builder, builder.load(total), lambda builder, a, b: builder.fadd(a, b))

    if (score.dtype, weight.dtype) == (types.float32, types.uint16):
        return types.float32(score, types.float32, types.float32, weight), codegen


def _vectors(context, builder, array, kind, vector):
    """How many vectors of 16 elements an array [n] holds, and a pointer to the first."""
    zero = (context.get_constant(types.intp, 0), types.intp)
    first = pointer_to(context, builder, array, kind, [zero], vector)
    length = builder.extract_value(arrayobj.make_array(kind)(context, builder, array).shape, 0)
    return builder.lshr(length, ir.Constant(length.type, 4)), first


def _constants(value):
    return ir.Constant(FLOATS, [value] * 16)


def _larger(builder, a, b):
    return builder.select(builder.fcmp_ordered("<", a, b), b, a)


def _folded(builder, x, combine):
    """One number from a vector's sixteen, always combined in the same order."""
    for width in (16, 8, 4, 2):
        lower, upper = range(width // 2), range(width // 2, width)
        x = combine(builder, shuffle(builder, x, x, lower), shuffle(builder, x, x, upper))
    return builder.extract_element(x, ir.Constant(ir.IntType(32), 0))
