"""Top-K of many rows, each with its own budget and candidates; ties to the lower index, no wait for a GPU."""

from typing import Any

import torch
import triton
import triton.language as tl

from fathom.kernels.dispatch import runs_triton
from fathom.kernels.triton_aot import signature

BLOCK = 2048
BITS = 8
"""Of a digit: a pass over the scores looks at one."""
DIGITS = 32 // BITS
PARTS = 16
"""Programs that share a row; each pass is a launch, after which all of them know what all have counted."""


def stable_top_k_reference(
    scores: torch.Tensor, begin: torch.Tensor, end: torch.Tensor, budget: torch.Tensor
) -> list[list[int]]:
    """Reference for :func:`stable_top_k`: one ascending list per row of the flattened leading dimensions."""
    numbers = (each.expand(scores.shape[:-1]).flatten().tolist() for each in (begin, end, budget))
    rows = zip(scores.flatten(0, -2).tolist(), *numbers, strict=True)
    return [
        sorted(sorted(range(low, high), key=lambda i, row=row: (-row[i], i))[:k])  # type: ignore[misc]
        for row, low, high, k in rows
    ]


def stable_top_k(
    scores: torch.Tensor,
    begin: torch.Tensor,
    end: torch.Tensor,
    budget: torch.Tensor,
    width: int,
    pitch: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices of each row's highest scores among its candidates.

    Args:
        scores: [..., n] float32, no candidate's NaN.
        begin, end: int64, broadcastable to [...]; the candidates of a row are ``begin .. end - 1``.
        budget: int64, broadcastable to [...]; a row gives at most this many, and all candidates if it has fewer.
        width: largest budget, known to the host.
        pitch: [1] int32, on a GPU: entries from the start of one row to that of the next, where ``n`` is not their
            number but that of what the scores' memory is divided into.

    Returns:
        indices [..., width] int32, ascending, padded with -1, and counts [...] int32.
    """
    lead = scores.shape[:-1]
    begin, end, budget = (each.expand(lead) for each in (begin, end, budget))
    if not runs_triton(scores):
        from fathom.kernels.refresh_cpu import stable_top_k_cpu

        counts = torch.minimum(end - begin, budget).clamp(min=0, max=width)
        return stable_top_k_cpu(scores, begin, end, counts, width), counts.int()
    scores, rows = scores.contiguous(), lead.numel()
    there = {"dtype": torch.int32, "device": scores.device}
    indices, counts = torch.empty(*lead, width, **there), torch.empty(lead, **there)
    if rows:
        inner = lead[-1] if lead else 1
        numbers = [each.reshape(-1, inner) for each in (begin, end, budget)]
        strides = [stride for each in numbers for stride in each.stride()]
        found = (
            torch.empty(DIGITS, rows, 2, **there),
            torch.empty(2, rows, PARTS, 1 << BITS, **there),
            torch.empty(rows, PARTS, **there),
        )
        given = scores, *numbers, scores.shape[-1] if pitch is None else pitch, *found
        constants = {"THERE": pitch is not None, "PARTS": PARTS, "BITS": BITS, "BLOCK": BLOCK, "num_warps": 8}
        for digit in range(DIGITS):
            _count_kernel[(rows, PARTS)](*given, width, inner, *strides, rows, digit, **constants)
        _take_kernel[(rows, PARTS)](*given, indices, counts, width, inner, *strides, rows, **constants)
    return indices, counts


@triton.jit
def _ordered(x):
    """Unsigned integers in the order of float32 numbers, -0.0 as +0.0."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) | -0x80000000)).to(tl.uint32, bitcast=True)


@triton.jit
def _limits(
    begin, end, budget, row, width, inner,
    begin_outer, begin_inner, end_outer, end_inner, budget_outer, budget_inner,
):  # fmt: skip
    """A row's candidates [low, high), and how many of them are taken."""
    i, k = row // inner, row % inner
    low = tl.load(begin + i * begin_outer + k * begin_inner).to(tl.int32)
    high = tl.load(end + i * end_outer + k * end_inner).to(tl.int32)
    count = tl.load(budget + i * budget_outer + k * budget_inner).to(tl.int32)
    count = tl.minimum(tl.minimum(count, high - low), width)
    return low, high, tl.maximum(count, 0)


@triton.jit
def _share(low, high, part, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """The candidates that one of PARTS programs looks at."""
    size = tl.cdiv(tl.cdiv(high - low, PARTS), BLOCK) * BLOCK
    first = low + part * size
    return first, tl.minimum(first + size, high)


@triton.jit
def _narrowed(state, bins, row, rows, digit, PARTS: tl.constexpr, BITS: tl.constexpr):
    """What is known when a digit has been counted.

    Returns:
        the leading digits of the last score that is taken; how many of the scores with these are taken; this digit;
        the counts of it [PARTS, bins].
    """
    BINS: tl.constexpr = 1 << BITS
    before = state + (digit * rows + row) * 2
    threshold, room = tl.load(before).to(tl.uint32, bitcast=True), tl.load(before + 1)
    value, part = tl.arange(0, BINS), tl.arange(0, PARTS)
    own = bins + ((digit % 2) * rows + row).to(tl.int64) * PARTS * BINS
    each = tl.load(own + part[:, None] * BINS + value[None, :])
    counted = tl.sum(each, 0)
    last = tl.sum((tl.cumsum(counted, 0, reverse=True) >= room).to(tl.int32), 0) - 1
    room -= tl.sum(tl.where(value > last, counted, 0), 0)
    return (threshold << BITS) | last.to(tl.uint32), room, last, each


# All but the tensors that lie where they were allocated: the rest follows from requests, or from who asks.
_NUMBERS = ["begin", "end", "budget", "pitch", "width", "inner", "rows", "digit"]
_STRIDES = [f"{name}_{place}" for name in _NUMBERS[:3] for place in ("outer", "inner")]


@triton.jit(do_not_specialize=_NUMBERS + _STRIDES)
def _count_kernel(
    scores, begin, end, budget, pitch, state, bins, above, width, inner,
    begin_outer, begin_inner, end_outer, end_inner, budget_outer, budget_inner, rows, digit,
    THERE: tl.constexpr, PARTS: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One part of one row: among the scores that may still be the last one taken, how often each value of a digit.

    The row's threshold so far goes to ``state`` [digits, rows, 2], the counts to ``bins`` [2, rows, PARTS, bins],
    and how many of the part's scores lie above it to ``above`` [rows, PARTS].
    """
    row, part = tl.program_id(0), tl.program_id(1)
    low, high, count = _limits(
        *(begin, end, budget, row, width, inner),
        *(begin_outer, begin_inner, end_outer, end_inner, budget_outer, budget_inner),
    )
    if count > 0:
        BINS: tl.constexpr = 1 << BITS
        value = tl.arange(0, BINS)
        own_bins = bins + ((digit % 2) * rows + row).to(tl.int64) * PARTS * BINS + part * BINS
        threshold, room, higher = tl.full((), 0, tl.uint32), count, 0
        if digit > 0:
            threshold, room, last, each = _narrowed(state, bins, row, rows, digit - 1, PARTS, BITS)
            mine = (tl.arange(0, PARTS) == part)[:, None] & (value > last)[None, :]
            higher = tl.sum(tl.sum(tl.where(mine, each, 0), 1), 0)
            if digit > 1:
                higher += tl.load(above + row * PARTS + part)
        tl.store(above + row * PARTS + part, higher)
        if part == 0:
            after = state + (digit * rows + row) * 2
            tl.store(after, threshold.to(tl.int32, bitcast=True))
            tl.store(after + 1, room)
        own = scores + row.to(tl.int64) * (tl.load(pitch) if THERE else pitch)
        shift = 32 - BITS - digit * BITS
        first, stop = _share(low, high, part, PARTS, BLOCK)
        counts = tl.zeros((BINS,), tl.int32)
        for start in range(first, stop, BLOCK):
            j = start + tl.arange(0, BLOCK)
            order = _ordered(tl.load(own + j, mask=j < stop, other=0.0))
            leading = tl.where(digit == 0, 0, order >> tl.minimum(shift + BITS, 31)).to(tl.uint32)
            among = (j < stop) & (leading == threshold)
            counts += tl.histogram(((order >> shift) & (BINS - 1)).to(tl.int32), BINS, mask=among)
        tl.store(own_bins + value, counts)


@triton.jit(do_not_specialize=_NUMBERS[:-1] + _STRIDES)
def _take_kernel(
    scores, begin, end, budget, pitch, state, bins, above, indices, counts, width, inner,
    begin_outer, begin_inner, end_outer, end_inner, budget_outer, budget_inner, rows,
    THERE: tl.constexpr, PARTS: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The indices that one part of one row contributes, in order, behind those of the parts before it."""
    row, part = tl.program_id(0), tl.program_id(1)
    low, high, count = _limits(
        *(begin, end, budget, row, width, inner),
        *(begin_outer, begin_inner, end_outer, end_inner, budget_outer, budget_inner),
    )
    if part == 0:
        tl.store(counts + row, count)
    target = indices + row.to(tl.int64) * width
    if count > 0:
        DIGITS: tl.constexpr = 32 // BITS
        value, other = tl.arange(0, 1 << BITS)[None, :], tl.arange(0, PARTS)
        threshold, room, last, each = _narrowed(state, bins, row, rows, DIGITS - 1, PARTS, BITS)
        higher = tl.load(above + row * PARTS + other) + tl.sum(tl.where(value > last, each, 0), 1)
        level = tl.sum(tl.where(value == last, each, 0), 1)
        earlier = tl.sum(tl.where(other < part, level, 0), 0)
        taken = tl.sum(tl.where(other < part, higher, 0), 0) + tl.minimum(earlier, room)
        room = tl.maximum(room - earlier, 0)
        own = scores + row.to(tl.int64) * (tl.load(pitch) if THERE else pitch)
        first, stop = _share(low, high, part, PARTS, BLOCK)
        for start in range(first, stop, BLOCK):
            j = start + tl.arange(0, BLOCK)
            order = _ordered(tl.load(own + j, mask=j < stop, other=0.0))
            same = (order == threshold) & (j < stop)
            ties = same & (tl.cumsum(same.to(tl.int32), 0) <= room)
            room -= tl.sum(ties.to(tl.int32), 0)
            here = ties | ((order > threshold) & (j < stop))
            place = taken + tl.cumsum(here.to(tl.int32), 0) - 1
            tl.store(target + place, j, mask=here)
            taken += tl.sum(here.to(tl.int32), 0)
    for start in range(count + part * BLOCK, width, PARTS * BLOCK):
        place = start + tl.arange(0, BLOCK)
        tl.store(target + place, tl.full((BLOCK,), -1, tl.int32), mask=place < width)


def specializations() -> list[tuple[str, Any, dict[str, str], dict[str, Any], dict[str, int]]]:
    """Label, kernel, signature, constants and options of a launch, for compilation without a device."""
    types = {"scores": "*fp32"} | dict.fromkeys(("state", "bins", "above", "indices", "counts"), "*i32")
    types |= dict.fromkeys(("begin", "end", "budget"), "*i64")
    found = []
    for label, pitch in (("", "i32"), (" captured", "*i32")):
        constants = {"THERE": pitch == "*i32", "PARTS": PARTS, "BITS": BITS, "BLOCK": BLOCK}
        for name, kernel in (("count", _count_kernel), ("take", _take_kernel)):
            told = signature(kernel, types | {"pitch": pitch}, constants)
            found.append((f"top_k {name}{label}", kernel, told, constants, {"num_warps": 8}))
    return found
