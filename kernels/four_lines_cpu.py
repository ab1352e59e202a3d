"""The inner loops of attention on the CPU: four keys or four values of one head against its query rows.

A line is the head's part of a token, as :func:`fathom.kernels.numba_cpu.as_lines` has it. Each function has two
forms, chosen by the types of its arrays when a kernel is compiled:

- *float32 arithmetic*, for queries in float32: loops that LLVM vectorises, elements widened as they are read;
- *bfloat16 products*, for queries in bfloat16 over keys in bfloat16, where the processor has them
  (``bfloat16_cpu.py``). The products of keys are exact; the weights of values are rounded to bfloat16, as they are
  in flash attention on GPUs.
"""

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic, overload

from fathom.kernels.bfloat16_cpu import (
    FLOATS,
    HALVES,
    LANES,
    PAIRS,
    ZEROS,
    multiply_add,
    offset,
    pointer_to,
    shuffle,
    spread,
)
from fathom.kernels.numba_cpu import INNER, prefetch, to_float32


def places_of_sums(width: int, bfloat16: bool) -> np.ndarray:
    """[width] int64: where :func:`add_four` keeps the sum of each element of a line.

    With bfloat16 products, pairs of values are interleaved within groups of eight elements, and the sums stay so.
    """
    d = np.arange(width)
    return d // 32 * 32 + d % 8 // 4 * 16 + d % 32 // 8 * 4 + d % 4 if bfloat16 else d


def dot_four(query, first, rows, keys, lines, scores, t, scale, width):
    """``scores[r, t + j] = scale * query[r] . keys[lines[j]]`` for ``rows`` rows r from ``first`` on and j < 4.

    Args:
        query: [rows, width] float32, or uint16 for bfloat16 products; keys: [lines, width] of ``as_lines``.
        lines: four int64; scores: [rows, keys] float32; t: multiple of four.
        width: a constant of the kernel.
    """


def square_four(query, keys, lines, squares, h, t, width):
    """``squares[h, t + j] = keys[lines[j]] . keys[lines[j]]`` for j < 4; in the form that ``query`` asks for."""


def add_four(sums, first, rows, weights, t, values, lines, width):
    """``sums[r] += weights[r, t + j] * values[lines[j]]``, summed over j < 4, for rows r as in :func:`dot_four`.

    Args:
        sums: [rows, width] float32, in the order of :func:`places_of_sums`.
        weights: [rows, keys] float32, or uint16 for bfloat16 products; the rest as in :func:`dot_four`.
    """


@overload(dot_four, jit_options=INNER, prefer_literal=True)
def _dot_four(query, first, rows, keys, lines, scores, t, scale, width):
    if query.dtype == types.uint16:

        def products(query, first, rows, keys, lines, scores, t, scale, width):
            for r in range(first, first + rows):
                _dot_four_bfloat16(query, r, keys, lines, scores, t, scale, width)

        return products

    size = width.literal_value

    def loops(query, first, rows, keys, lines, scores, t, scale, width):
        k0, k1, k2, k3 = keys[lines[0]], keys[lines[1]], keys[lines[2]], keys[lines[3]]
        for r in range(first, first + rows):
            own, score = query[r], scores[r]
            dot0 = dot1 = dot2 = dot3 = np.float32(0)
            for d in range(size):
                x = own[d]
                dot0 += x * to_float32(k0[d])
                dot1 += x * to_float32(k1[d])
                dot2 += x * to_float32(k2[d])
                dot3 += x * to_float32(k3[d])
            score[t] = dot0 * scale
            score[t + 1] = dot1 * scale
            score[t + 2] = dot2 * scale
            score[t + 3] = dot3 * scale

    return loops


@overload(square_four, jit_options=INNER, prefer_literal=True)
def _square_four(query, keys, lines, squares, h, t, width):
    if query.dtype == types.uint16:

        def products(query, keys, lines, squares, h, t, width):
            _square_four_bfloat16(keys, lines, squares, h, t, width)

        return products

    size = width.literal_value

    def loops(query, keys, lines, squares, h, t, width):
        for j in range(4):
            key, square = keys[lines[j]], np.float32(0)
            for d in range(size):
                x = to_float32(key[d])
                square += x * x
            squares[h, t + j] = square

    return loops


@overload(add_four, jit_options=INNER, prefer_literal=True)
def _add_four(sums, first, rows, weights, t, values, lines, width):
    if weights.dtype == types.uint16:

        def products(sums, first, rows, weights, t, values, lines, width):
            _add_four_bfloat16(sums, first, rows, weights, t, values, lines, width)

        return products

    size = width.literal_value

    def loops(sums, first, rows, weights, t, values, lines, width):
        v0, v1, v2, v3 = values[lines[0]], values[lines[1]], values[lines[2]], values[lines[3]]
        for r in range(first, first + rows):
            own, weight = sums[r], weights[r]
            w0, w1, w2, w3 = weight[t], weight[t + 1], weight[t + 2], weight[t + 3]
            for d in range(size):
                own[d] += (
                    w0 * to_float32(v0[d])
                    + w1 * to_float32(v1[d])
                    + w2 * to_float32(v2[d])
                    + w3 * to_float32(v3[d])
                )

    return loops


@njit(error_model="numpy", cache=True)
def four_lines(slots, paged, entry, last, slot, line):
    """Lines of four entries in a row, the last one's for those behind it.

    Args:
        slots: where entries are looked up if they are ``paged``.
        entry: the first one; last: nothing is read behind it.
        slot: lines between two slots; line: of the head within a slot.
    """
    e0, e1, e2, e3 = min(entry, last), min(entry + 1, last), min(entry + 2, last), min(entry + 3, last)
    if paged:
        e0, e1, e2, e3 = slots[e0], slots[e1], slots[e2], slots[e3]
    return e0 * slot + line, e1 * slot + line, e2 * slot + line, e3 * slot + line


@njit(error_model="numpy", cache=True)
def ask_for_four(array, lines, step, width, cache_line):
    """Ask for four lines of ``width`` elements, ``cache_line`` of them in a line of the processor's caches.

    Returns:
        Where the next head's lines begin.
    """
    for line in lines:
        for d in range(0, width, cache_line):
            prefetch(array, line, d)
    return next_head(lines, step)


@njit(error_model="numpy", cache=True)
def next_head(lines, step):
    """The same four entries of the next head, ``step`` lines on."""
    return lines[0] + step, lines[1] + step, lines[2] + step, lines[3] + step


# Of two lines, the lower or the upper four elements of each group of eight, in pairs: one instruction each.
_LOWER, _UPPER = (
    [side + 8 * group + half + i for group in range(4) for i in range(4) for side in (0, LANES)]
    for half in (0, 4)
)


def _lines(context, builder, array, kind, lines, count, element):
    """Pointers to the beginnings of four lines."""
    zero = (context.get_constant(types.intp, 0), types.intp)
    for j in range(4):
        line = (builder.extract_value(lines, j), count.dtype)
        yield pointer_to(context, builder, array, kind, [line, zero], element)


def _load(builder, pointer, n):
    return builder.load(offset(builder, pointer, n), align=2)


def _totals(builder, four):
    """The totals of four vectors as one vector; always added in the same order."""

    def folded(x, width):
        lower, upper = range(width // 2), range(width // 2, width)
        return builder.fadd(shuffle(builder, x, x, lower), shuffle(builder, x, x, upper))

    def paired(a, b):
        return builder.fadd(shuffle(builder, a, b, (0, 4, 1, 5)), shuffle(builder, a, b, (2, 6, 3, 7)))

    parts = [folded(folded(x, 16), 8) for x in four]
    a, b = paired(*parts[:2]), paired(*parts[2:])
    return builder.fadd(shuffle(builder, a, b, (0, 1, 4, 5)), shuffle(builder, a, b, (2, 3, 6, 7)))


@intrinsic(prefer_literal=True)
def _dot_four_bfloat16(typing_context, query, row, keys, lines, scores, t, scale, width):
    def codegen(context, builder, signature, args):
        q, r, k, four, s, at, _, _ = signature.args
        zero = (context.get_constant(types.intp, 0), types.intp)
        own = pointer_to(context, builder, args[0], q, [(args[1], r), zero], PAIRS)
        others = list(_lines(context, builder, args[2], k, args[3], four, PAIRS))
        sums = [ZEROS] * 4
        for part in range(signature.args[7].literal_value // LANES):
            x = _load(builder, own, part)
            sums = [
                multiply_add(builder, sum_, x, _load(builder, other, part))
                for sum_, other in zip(sums, others, strict=True)
            ]
        found = builder.fmul(_totals(builder, sums), spread(builder, args[6], 4))
        place = pointer_to(context, builder, args[4], s, [(args[1], r), (args[5], at)], found.type)
        builder.store(found, place, align=4)
        return context.get_dummy_value()

    if isinstance(width, types.IntegerLiteral):
        return types.void(query, row, keys, lines, scores, t, types.float32, width), codegen


@intrinsic(prefer_literal=True)
def _square_four_bfloat16(typing_context, keys, lines, squares, h, t, width):
    def codegen(context, builder, signature, args):
        k, four, s, head, at, _ = signature.args
        sums = [ZEROS] * 4
        pointers = list(_lines(context, builder, args[0], k, args[1], four, PAIRS))
        for part in range(signature.args[5].literal_value // LANES):
            for j, pointer in enumerate(pointers):
                x = _load(builder, pointer, part)
                sums[j] = multiply_add(builder, sums[j], x, x)
        found = _totals(builder, sums)
        place = pointer_to(context, builder, args[2], s, [(args[3], head), (args[4], at)], found.type)
        builder.store(found, place, align=4)
        return context.get_dummy_value()

    if isinstance(width, types.IntegerLiteral):
        return types.void(keys, lines, squares, h, t, width), codegen


@intrinsic(prefer_literal=True)
def _add_four_bfloat16(typing_context, sums, first, rows, weights, t, values, lines, width):
    def codegen(context, builder, signature, args):
        s, begin, count, w, at, v, four, _ = signature.args
        zero = (context.get_constant(types.intp, 0), types.intp)
        pointers = list(_lines(context, builder, args[5], v, args[6], four, HALVES))
        begin = context.cast(builder, args[1], begin, types.intp)
        for part in range(signature.args[7].literal_value // LANES):
            a, b, c, d = (_load(builder, pointer, part) for pointer in pointers)
            pairs = [
                [shuffle(builder, *two, lanes) for lanes in (_LOWER, _UPPER)] for two in ((a, b), (c, d))
            ]
            with cgutils.for_range(builder, context.cast(builder, args[2], count, types.intp)) as loop:
                row = (builder.add(begin, loop.index), types.intp)
                two = pointer_to(context, builder, args[3], w, [row, (args[4], at)], ir.IntType(32))
                factors = [spread(builder, _load(builder, two, i), 16) for i in range(2)]
                own = pointer_to(context, builder, args[0], s, [row, zero], FLOATS)
                for half in range(2):
                    place = offset(builder, own, 2 * part + half)
                    sum_ = builder.load(place, align=4)
                    for factor, pair in zip(factors, pairs, strict=True):
                        sum_ = multiply_add(builder, sum_, factor, pair[half])
                    builder.store(sum_, place, align=4)
        return context.get_dummy_value()

    if isinstance(width, types.IntegerLiteral):
        return types.void(sums, first, rows, weights, t, values, lines, width), codegen
