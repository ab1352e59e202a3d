"""Top-K of many rows, each with its own budget and candidates; ties to the lower index, no wait for a GPU."""

from typing import Any

import torch
import triton
import triton.language as tl

from fathom.kernels.dispatch import runs_triton
from fathom.kernels.triton_aot import signature

BLOCK = 2048
BITS = 8
"""Of a score's 32, looked at in one pass."""


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
    indices = torch.empty(*lead, width, dtype=torch.int32, device=scores.device)
    counts = torch.empty(lead, dtype=torch.int32, device=scores.device)
    if rows:
        inner = lead[-1] if lead else 1
        numbers = [each.reshape(-1, inner) for each in (begin, end, budget)]
        strides = [stride for each in numbers for stride in each.stride()]
        _top_k_kernel[(rows,)](
            scores, *numbers, scores.shape[-1] if pitch is None else pitch, indices, counts, width, inner, *strides,
            THERE=pitch is not None, BITS=BITS, BLOCK=BLOCK, num_warps=8,
        )  # fmt: skip
    return indices, counts


@triton.jit
def _ordered(x):
    """Unsigned integers in the order of float32 numbers, -0.0 as +0.0."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) | -0x80000000)).to(tl.uint32, bitcast=True)


# All but the tensors that lie where they were allocated: the rest follows from requests, or from who asks.
_NUMBERS = ["begin", "end", "budget", "pitch", "width", "inner"]
_STRIDES = [f"{name}_{place}" for name in _NUMBERS[:3] for place in ("outer", "inner")]


@triton.jit(do_not_specialize=_NUMBERS + _STRIDES)
def _top_k_kernel(
    scores, begin, end, budget, pitch, indices, counts, width, inner,
    begin_outer, begin_inner, end_outer, end_inner, budget_outer, budget_inner,
    THERE: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row: first the last score that is taken, some bits at a time; then the indices of all, in order."""
    row = tl.program_id(0)
    i, k = row // inner, row % inner
    low = tl.load(begin + i * begin_outer + k * begin_inner).to(tl.int32)
    high = tl.load(end + i * end_outer + k * end_inner).to(tl.int32)
    count = tl.load(budget + i * budget_outer + k * budget_inner).to(tl.int32)
    count = tl.minimum(tl.minimum(count, high - low), width)
    count = tl.maximum(count, 0)
    tl.store(counts + row, count)
    own = scores + row.to(tl.int64) * (tl.load(pitch) if THERE else pitch)
    BINS: tl.constexpr = 1 << BITS
    digits = tl.arange(0, BINS)
    threshold, room = tl.full((), 0, tl.uint32), count
    if count > 0:
        for shift in tl.static_range(32 - BITS, -1, -BITS):
            bins = tl.zeros((BINS,), tl.int32)
            for start in range(low, high, BLOCK):
                j = start + tl.arange(0, BLOCK)
                order = _ordered(tl.load(own + j, mask=j < high, other=0.0))
                among = j < high
                if shift + BITS < 32:
                    among = among & ((order >> (shift + BITS)) == threshold)
                digit = ((order >> shift) & (BINS - 1)).to(tl.int32)
                bins += tl.histogram(digit, BINS, mask=among)
            from_here = tl.cumsum(bins, 0, reverse=True)
            last = tl.sum((from_here >= room).to(tl.int32), 0) - 1
            room -= tl.sum(tl.where(digits > last, bins, 0), 0)
            threshold = (threshold << BITS) | last.to(tl.uint32)
    target = indices + row.to(tl.int64) * width
    taken = 0
    if count > 0:
        for start in range(low, high, BLOCK):
            j = start + tl.arange(0, BLOCK)
            order = _ordered(tl.load(own + j, mask=j < high, other=0.0))
            level = (order == threshold) & (j < high)
            first = level & (tl.cumsum(level.to(tl.int32), 0) <= room)
            room -= tl.sum(first.to(tl.int32), 0)
            here = first | ((order > threshold) & (j < high))
            place = taken + tl.cumsum(here.to(tl.int32), 0) - 1
            tl.store(target + place, j, mask=here)
            taken += tl.sum(here.to(tl.int32), 0)
    for start in range(count, width, BLOCK):
        place = start + tl.arange(0, BLOCK)
        tl.store(target + place, tl.full((BLOCK,), -1, tl.int32), mask=place < width)


def specializations() -> list[tuple[str, Any, dict[str, str], dict[str, Any], dict[str, int]]]:
    """Label, kernel, signature, constants and options of a launch, for compilation without a device."""
    types = {"scores": "*fp32", "indices": "*i32", "counts": "*i32"}
    types |= dict.fromkeys(("begin", "end", "budget"), "*i64")
    found = []
    for label, pitch in (("", "i32"), (" captured", "*i32")):
        constants = {"THERE": pitch == "*i32", "BITS": BITS, "BLOCK": BLOCK}
        told = signature(_top_k_kernel, types | {"pitch": pitch}, constants)
        found.append((f"top_k_kernel{label}", _top_k_kernel, told, constants, {"num_warps": 8}))
    return found
