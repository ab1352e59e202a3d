"""A running softmax on the CPU, one block of scores after the other: what attention's kernels share.

It has two forms, chosen by the number format of the weights when a kernel is compiled:

- *float32*: powers of e in loops that LLVM vectorises;
- *bfloat16*: powers of two by AVX-512's own instructions, on processors that have them (``bfloat16_cpu.py``),
  relative to a whole power of two. To scale by one changes no digit, so a weight is rounded alike whatever its row
  has seen before.
"""

import math

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic, overload

from fathom.kernels.bfloat16_cpu import (
    FLOATS,
    ZEROS,
    folded,
    offset,
    pointer_to,
    round_sixteen,
    spread,
)
from fathom.kernels.numba_cpu import APPROXIMATE, INNER, call, exp_float32

KEYS_PER_BLOCK = 64
"""Scores of a row that are taken at a time."""
_LANES = 16
"""Numbers of float32 in a vector."""
PARTS = _LANES
"""A row's total is kept in so many parts, which are added up at the end."""


@njit(**APPROXIMATE, forceinline=True)
def raise_top(scores, i, scale, weights, sums, top, totals, x):
    """A block of scores' part in row x's top, and what ``sums[x]`` and ``totals[x]`` hold so far relative to it.

    Rows' tops are raised first, and then weights taken: one after the other they would wait for each other.

    Args:
        scores: [.., KEYS_PER_BLOCK] float32, row i of which is taken, -inf where it sees nothing.
        scale: positive, of the scores.
        weights: as in :func:`weigh`; its type says in which form.
        sums: [.., width] float32.
        top: [..] float32, -inf at first; in units of :func:`unit_of_top`.
        totals: [.., PARTS] float32, zeros at first; the sum of the row's weights before they are rounded.
    """
    new_top = _top(scores, i, scale, weights)
    # Not a number is raised to, and stays.
    if not new_top <= top[x]:
        rescale = _relative(top[x], new_top, weights)
        top[x] = new_top
        for t in range(PARTS):
            totals[x, t] *= rescale
        for d in range(sums.shape[1]):
            sums[x, d] *= rescale


@njit(**APPROXIMATE, forceinline=True)
def weigh(scores, i, scale, weights, j, top, totals, x):
    """The weights of a block of scores relative to row x's top, added to ``totals[x]``.

    Args:
        weights: [.., KEYS_PER_BLOCK] float32, or uint16 for bfloat16; row j is written.
        scores, i, scale, top, totals: as in :func:`raise_top`.
    """
    if top[x] == -np.inf:
        for t in range(KEYS_PER_BLOCK):
            weights[j, t] = 0
    else:
        _weigh(scores, i, scale, top[x], weights, j, totals, x)


def unit_of_top(bfloat16: bool) -> float:
    """What a row's top is counted in: powers of e or, with bfloat16 weights, of two."""
    return math.log(2) if bfloat16 else 1.0


def _top(scores, i, scale, weights):
    """The largest of row i's scores, as a top; ``weights`` say in which form."""


def _relative(top, new_top, weights):
    """What is relative to ``top``, which may be -inf, times this is relative to ``new_top``."""


def _weigh(scores, i, scale, top, weights, j, totals, x):
    """The weights of row i's scores, and what they add up to before they are rounded."""


@overload(_top, jit_options=INNER)
def _top_of(scores, i, scale, weights):
    if weights.dtype == types.uint16:
        return lambda scores, i, scale, weights: _whole_power(scores, i, _factors(scale)[0])

    def loop(scores, i, scale, weights):
        largest = np.float32(-np.inf)
        for t in range(KEYS_PER_BLOCK):
            largest = max(largest, scores[i, t])
        return largest * scale

    return loop


@overload(_relative, jit_options=INNER)
def _relative_of(top, new_top, weights):
    if weights.dtype == types.uint16:
        return lambda top, new_top, weights: _power_of_two(top - new_top)
    return lambda top, new_top, weights: exp_float32(top - new_top)


@overload(_weigh, jit_options=INNER)
def _weigh_all(scores, i, scale, top, weights, j, totals, x):
    if weights.dtype == types.uint16:

        def powers_of_two(scores, i, scale, top, weights, j, totals, x):
            _powers_of_two(scores, i, _factors(scale), top, weights, j, totals, x)

        return powers_of_two

    def loop(scores, i, scale, top, weights, j, totals, x):
        total = np.float32(0)
        for t in range(KEYS_PER_BLOCK):
            weights[j, t] = exp_float32(scores[i, t] * scale - top)
            total += weights[j, t]
        totals[x, 0] += total

    return loop


_LOG2_E = math.log2(math.e)


@njit(**APPROXIMATE, forceinline=True)
def _factors(scale):
    """Two float32 that together are the factor from scores to powers of two: a large score loses nothing by it."""
    factor = np.float64(scale) * _LOG2_E
    rough = np.float32(factor)
    return rough, np.float32(factor - np.float64(rough))


_HALVES = ir.VectorType(ir.IntType(16), _LANES)
_LEAST = -126.0
"""Two to less than this power is none of float32's normal numbers, and would take a processor long."""

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
def _power_of_two(typing_context, power):
    """Two to a whole power that is not positive; nothing where that is less than _LEAST."""

    def codegen(context, builder, signature, args):
        whole = builder.fptosi(args[0], ir.IntType(32))
        bits = builder.shl(
            builder.add(whole, ir.Constant(ir.IntType(32), 127)), ir.Constant(ir.IntType(32), 23)
        )
        some = builder.fcmp_ordered(">=", args[0], ir.Constant(ir.FloatType(), _LEAST))
        return builder.select(some, builder.bitcast(bits, ir.FloatType()), ir.Constant(ir.FloatType(), 0.0))

    return types.float32(types.float32), codegen


@intrinsic
def _whole_power(typing_context, scores, i, factor):
    """The largest of row i's scores times the factor, rounded up."""

    def codegen(context, builder, signature, args):
        a, b, c, d = _row(context, builder, signature, args, 0, FLOATS)
        largest = folded(builder, _larger(builder, _larger(builder, a, b), _larger(builder, c, d)), _larger)
        return call(builder, "llvm.ceil.f32", ir.FloatType(), builder.fmul(largest, args[2]))

    if scores.dtype == types.float32:
        return types.float32(scores, i, types.float32), codegen


@intrinsic
def _powers_of_two(typing_context, scores, i, factors, top, weights, j, totals, x):
    """:func:`_weigh` with bfloat16 weights."""

    def codegen(context, builder, signature, args):
        rough, fine = (spread(builder, builder.extract_value(args[2], n), _LANES) for n in range(2))
        less, usual = spread(builder, builder.fneg(args[3]), _LANES), ir.Constant(ir.IntType(32), 4)
        line = _line(context, builder, signature, args, 4, 5, _HALVES)
        powers = []
        for n, score in enumerate(_row(context, builder, signature, args, 0, FLOATS)):
            y = call(builder, "llvm.fma.v16f32", FLOATS, score, rough, less)
            # What is too small weighs nothing, but what is not a number stays.
            some = builder.bitcast(builder.fcmp_unordered(">=", y, _constants(_LEAST)), ir.IntType(16))
            y = call(builder, "llvm.fma.v16f32", FLOATS, score, fine, y)
            whole = call(builder, "llvm.nearbyint.v16f32", FLOATS, y)
            rest, power = builder.fsub(y, whole), _constants(_POWER_OF_TWO[0])
            for coefficient in _POWER_OF_TWO[1:]:
                power = call(builder, "llvm.fma.v16f32", FLOATS, power, rest, _constants(coefficient))
            # power * 2**whole, rounded as always.
            scaled = "llvm.x86.avx512.mask.scalef.ps.512"
            powers.append(call(builder, scaled, FLOATS, power, whole, ZEROS, some, usual))
            builder.store(round_sixteen(builder, powers[-1]), offset(builder, line, n), align=2)
        a, b, c, d = powers
        total = _line(context, builder, signature, args, 6, 7, FLOATS)
        sum_ = builder.fadd(builder.fadd(a, b), builder.fadd(c, d))
        builder.store(builder.fadd(builder.load(total, align=4), sum_), total, align=4)
        return context.get_dummy_value()

    if (scores.dtype, weights.dtype) == (types.float32, types.uint16):
        return types.void(scores, i, factors, types.float32, weights, j, totals, x), codegen


def _line(context, builder, signature, args, array, row, vector):
    """A pointer to the first vector of a row of an array; both are numbers of arguments."""
    zero = (context.get_constant(types.intp, 0), types.intp)
    place = [(args[row], signature.args[row]), zero]
    return pointer_to(context, builder, args[array], signature.args[array], place, vector)


def _row(context, builder, signature, args, array, vector):
    """The vectors of the row of an array that the argument behind it tells."""
    first = _line(context, builder, signature, args, array, array + 1, vector)
    return [builder.load(offset(builder, first, n), align=4) for n in range(KEYS_PER_BLOCK // _LANES)]


def _constants(value):
    return ir.Constant(FLOATS, [value] * _LANES)


def _larger(builder, a, b):
    return builder.select(builder.fcmp_ordered("<", a, b), b, a)
