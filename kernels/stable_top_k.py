"""Top-K of many rows, each with its own budget and candidates; ties to the lower index, no wait for a GPU.

A long row's scores are read once: samples of them say what more of them reach than are taken, but not many more.
These survivors are collected, and the last one that is taken is found among them. Where the samples were wrong, or
the row is short, it is found among all.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from fathom.kernels.dispatch import runs_triton
from fathom.kernels.triton_aot import signature

SAMPLES = 4096
"""Of a row. For 2,000 of 131,072 the survivors are 3,500 to 4,000, give or take 340 (one standard deviation)."""
TILE = 4096
PARTS = 32
"""Programs that share a row's tiles."""
GROUP = 32
"""Tiles whose survivors are put in order together; a power of two."""
HELD, BLOCK = 4096, 1024
"""So many together stay in registers while the last one that is taken is looked for."""


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
    if scores.data_ptr() % 16:  # they are read 16 bytes at a time, to the end of the last 16
        scores = scores.clone()
    there = {"dtype": torch.int32, "device": scores.device}
    indices, counts = torch.empty(*lead, width, **there), torch.empty(lead, **there)
    if rows:
        inner = lead[-1] if lead else 1
        numbers = [each.reshape(-1, inner) for each in (begin, end, budget)]
        strides = [stride for each in numbers for stride in each.stride()]
        capacity = triton.cdiv(2 * width + SAMPLES, 8) * 8
        state = torch.empty(rows, 4, **there)
        tiles = torch.empty(scores.numel() // TILE + 2 * rows, 2, **there)
        kept = torch.empty(rows, 2, capacity, **there)
        given = scores, *numbers, scores.shape[-1] if pitch is None else pitch, state
        told, where = (capacity, width, inner, *strides), {"THERE": pitch is not None}
        _cut_kernel[(rows,)](*given, *told, **where, SAMPLES=SAMPLES, num_warps=8)
        _collect_kernel[(rows, PARTS)](
            *given, tiles, kept, *told, **where, PARTS=PARTS, TILE=TILE, num_warps=4
        )
        shapes = {"TILE": TILE, "GROUP": GROUP, "HELD": HELD, "BLOCK": BLOCK}
        _take_kernel[(rows,)](*given, tiles, kept, indices, counts, *told, **where, **shapes, num_warps=8)
    return indices, counts


@triton.jit
def _ordered(x):
    """Integers in the order of float32 numbers, -0.0 as +0.0."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _score(order):
    """The number of this order."""
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _narrowed(first, last, reached, above, middle, number, least):
    """Where an order is that at least so many scores reach, now that it is known how many reach the middle.

    Returns:
        its bounds; how many scores reach the lower one; how many are above the upper one.
    """
    enough = number >= least
    first, last = tl.where(enough, middle, first), tl.where(enough, last, middle - 1)
    return first, last, tl.where(enough, number, reached), tl.where(enough, above, number)


@triton.jit
def _halfway(first, last):
    """Rounded up; nothing overflows."""
    return (first | last) - ((first ^ last) >> 1)


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
def _sampled(i, n, SAMPLES: tl.constexpr):
    """Which of n candidates is the i-th sample: one of its own run of them, further on by the golden ratio."""
    run = n // SAMPLES
    return i * run + i * (n % SAMPLES) // SAMPLES + (((i * 40503) & 0xFFFF) * run >> 16)


# All but the tensors that lie where they were allocated: the rest follows from requests, or from who asks.
_NUMBERS = ["begin", "end", "budget", "pitch", "capacity", "width", "inner"]
_STRIDES = [f"{name}_{place}" for name in _NUMBERS[:3] for place in ("outer", "inner")]


@triton.jit(do_not_specialize=_NUMBERS + _STRIDES)
def _cut_kernel(
    scores, begin, end, budget, pitch, state, capacity, width, inner,
    begin_outer, begin_inner, end_outer, end_inner, budget_outer, budget_inner,
    THERE: tl.constexpr, SAMPLES: tl.constexpr,
):  # fmt: skip
    """By samples: what more of a row's scores reach than are taken, and fewer than ``capacity``.

    To ``state`` [rows, 4]: a score's order; how many of the first candidates reach it if they are equal to it; the
    room and the number of what has been found to reach it, none so far. A row of at most ``capacity`` candidates
    has no need of that.
    """
    row = tl.program_id(0)
    low, high, count = _limits(
        *(begin, end, budget, row, width, inner),
        *(begin_outer, begin_inner, end_outer, end_inner, budget_outer, budget_inner),
    )
    n = high - low
    if (count > 0) & (n > capacity):
        own = scores + row.to(tl.int64) * (tl.load(pitch) if THERE else pitch) + low
        i = tl.arange(0, SAMPLES)
        order = _ordered(tl.load(own + _sampled(i, n, SAMPLES)))
        # Not in the middle: the fewer samples reach it, the less their number varies.
        goal = count + (capacity - count) // 4
        least = (goal * (SAMPLES / n)).to(tl.int32) + 1
        most = least + least // 16
        first, last, reached, above = tl.min(order, 0), tl.max(order, 0), SAMPLES, 0
        while (first < last) & (reached > most):
            middle = _halfway(first, last)
            number = tl.sum((order >= middle).to(tl.int32), 0)
            first, last, reached, above = _narrowed(first, last, reached, above, middle, number, least)
        equal = n
        if reached > most:
            same = order == first
            some = same & (tl.cumsum(same.to(tl.int32), 0) <= least - above)
            equal = _sampled(tl.max(tl.where(some, i, 0), 0), n, SAMPLES) + 1
        tl.store(state + row * 4, first)
        tl.store(state + row * 4 + 1, equal)
        tl.store(state + row * 4 + 2, 0)
        tl.store(state + row * 4 + 3, 0)


@triton.jit
def _own_tiles(tiles, row, step, TILE: tl.constexpr):
    """Where those of a row begin: a row has at most two more than ``step`` fills."""
    return tiles + row.to(tl.int64) * (step // TILE + 2) * 2


@triton.jit
def _own_kept(kept, row, capacity):
    """Where the row's survivors begin; the capacity is a multiple of eight, which the compiler does not know."""
    return kept + row.to(tl.int64) * (capacity // 8 * 8) * 2


@triton.jit
def _ones(count):
    """So many of the lowest bits; all of them at least, none at most."""
    return tl.where(count >= 32, -1, (1 << tl.minimum(tl.maximum(count, 0), 31)) - 1)


@triton.jit
def _set_bits(word):
    """How many of 32 bits are set."""
    word -= (word >> 1) & 0x55555555
    word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
    word = (word + (word >> 4)) & 0x0F0F0F0F
    return (word * 0x01010101 >> 24) & 0xFF


@triton.jit(do_not_specialize=_NUMBERS + _STRIDES)
def _collect_kernel(
    scores, begin, end, budget, pitch, state, tiles, kept, capacity, width, inner,
    begin_outer, begin_inner, end_outer, end_inner, budget_outer, budget_inner,
    THERE: tl.constexpr, PARTS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """What reaches a row's cut: orders and indices, to ``kept`` [rows, 2, capacity], those of a tile together.

    A tile's are in order and have a multiple of eight places; where these begin and how many they are, in eights,
    goes to ``tiles``. Of 32 neighbours one word says which reach it; few do.
    """
    row, part = tl.program_id(0), tl.program_id(1)
    low, high, count = _limits(
        *(begin, end, budget, row, width, inner),
        *(begin_outer, begin_inner, end_outer, end_inner, budget_outer, budget_inner),
    )
    n = high - low
    if (count > 0) & (n > capacity):
        step = tl.load(pitch) if THERE else pitch
        level, equal = tl.load(state + row * 4), tl.load(state + row * 4 + 1)
        # Four at a time, from where the memory's fours begin; a few that are no candidates are read along.
        start = row.to(tl.int64) * step + low
        own = scores + start // 4 * 4
        before = (start % 4).to(tl.int32)
        full = tl.cdiv(before + n, 4) * 4
        own_tiles, own_kept = _own_tiles(tiles, row, step, TILE), _own_kept(kept, row, capacity)
        word, bit = tl.arange(0, TILE // 32), tl.arange(0, 32)[None, :]
        place = word[:, None] * 32
        for tile in range(part, tl.cdiv(n + 3, TILE), PARTS):
            done = tile * TILE
            if done + TILE <= full:  # the compiler would wait for each load if it had a mask
                x = tl.load(own + done + (place + bit))
            else:
                x = tl.load(own + done + (place + bit), mask=place + bit < full - done, other=0.0)
            least = tl.where(place < equal - done, _score(level), _score(level + 1))
            reach = tl.sum(tl.where(x >= least, 1 << bit, 0), 1)
            # One word for each thread, where several had the same.
            reach = tl.gather(reach, word, 0)
            first = done + word * 32 - before
            reach &= _ones(n - first) & ~_ones(-first)
            number = _set_bits(reach)
            ends = tl.cumsum(number, 0)
            together = tl.max(ends, 0)
            eights = tl.cdiv(together, 8)
            begins = tl.atomic_add(state + row * 4 + 2, eights * 8, sem="relaxed")
            tl.atomic_add(state + row * 4 + 3, together, sem="relaxed")
            tl.store(own_tiles + tile * 2, begins // 8)
            tl.store(own_tiles + tile * 2 + 1, eights)
            if begins + eights * 8 <= capacity:
                behind = together + tl.arange(0, 8)
                tl.store(
                    own_kept + begins + behind, tl.full((8,), -0x80000000, tl.int32), mask=behind < eights * 8
                )
                target = own_kept + begins + (ends - number)
                for i in range(tl.max(number, 0)):
                    lowest = reach & -reach
                    # The exponent of a power of two.
                    exact = lowest.to(tl.uint32, bitcast=True).to(tl.float32).to(tl.int32, bitcast=True)
                    j = first + (exact >> 23) - 127
                    score = tl.load(own + before + j, mask=reach != 0, other=0.0)
                    tl.store(target + i, _ordered(score), mask=reach != 0)
                    tl.store(target + i + capacity, low + j, mask=reach != 0)
                    reach ^= lowest


@triton.jit
def _orders(listed, kept, own, place, size):
    """Those of a row's survivors, or of its candidates; below that of any score where there is none."""
    inside = place < size
    if listed:
        order = tl.load(kept + place, mask=inside, other=-0x80000000)
    else:
        order = tl.where(inside, _ordered(tl.load(own + place, mask=inside, other=0.0)), -0x80000000)
    return order


@triton.jit
def _lowest(order, otherwise):
    """Of the orders of scores."""
    return tl.min(tl.where(order == -0x80000000, otherwise, order), 0)


@triton.jit
def _write(target, taken, ties, order, j, level, room):
    """The indices of what is above a level, and of as many that are at it as there is room for.

    Returns:
        how many of both there have been, and how many at the level.
    """
    above, same = order > level, order == level
    both = tl.cumsum(above.to(tl.int32) + (same.to(tl.int32) << 16), 0)
    rank, tie = both & 0xFFFF, ties + (both >> 16)
    place = taken + rank + tl.minimum(tie, room) - tl.minimum(ties, room) - 1
    tl.store(target + place, j, mask=above | (same & (tie <= room)))
    both = tl.max(both, 0)
    now = ties + (both >> 16)
    return taken + (both & 0xFFFF) + tl.minimum(now, room) - tl.minimum(ties, room), now


@triton.jit(do_not_specialize=_NUMBERS + _STRIDES)
def _take_kernel(
    scores, begin, end, budget, pitch, state, tiles, kept, indices, counts, capacity, width, inner,
    begin_outer, begin_inner, end_outer, end_inner, budget_outer, budget_inner,
    THERE: tl.constexpr, TILE: tl.constexpr, GROUP: tl.constexpr, HELD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The indices of one row: from what was collected, or from all candidates if that is too much or too little."""
    row = tl.program_id(0)
    low, high, count = _limits(
        *(begin, end, budget, row, width, inner),
        *(begin_outer, begin_inner, end_outer, end_inner, budget_outer, budget_inner),
    )
    tl.store(counts + row, count)
    target, block = indices + row.to(tl.int64) * width, tl.arange(0, BLOCK)
    if count > 0:
        step = tl.load(pitch) if THERE else pitch
        own, own_kept = scores + row.to(tl.int64) * step + low, _own_kept(kept, row, capacity)
        n = high - low
        size, reached, listed = n, n, n > capacity
        if listed:
            room, found = tl.load(state + row * 4 + 2), tl.load(state + row * 4 + 3)
            listed = (room <= capacity) & (found >= count)
            size, reached = tl.where(listed, room, n), tl.where(listed, found, n)
        # The orders of infinities.
        first, last, above = -0x7F800001, 0x7F800000, 0
        if size <= HELD + BLOCK:
            held = _orders(listed, own_kept, own, tl.arange(0, HELD), size)
            rest = _orders(listed, own_kept, own, HELD + block, size)
            last = tl.maximum(tl.max(held, 0), tl.max(rest, 0))
            first = tl.minimum(_lowest(held, last), _lowest(rest, last))
            while (first < last) & (reached > count):
                middle = _halfway(first, last)
                reach = tl.reshape((held >= middle).to(tl.int32), (HELD // BLOCK, BLOCK))
                number = tl.sum(tl.sum(reach, 0) + (rest >= middle).to(tl.int32), 0)
                first, last, reached, above = _narrowed(first, last, reached, above, middle, number, count)
        # Where they are not held.
        while (first < last) & (reached > count):
            middle = _halfway(first, last)
            reach = tl.zeros((BLOCK,), tl.int32)
            for start in range(0, size, BLOCK):
                reach += (_orders(listed, own_kept, own, start + block, size) >= middle).to(tl.int32)
            number = tl.sum(reach, 0)
            first, last, reached, above = _narrowed(first, last, reached, above, middle, number, count)
        taken, ties, room = 0, 0, count - above
        if listed:
            own_tiles, group = _own_tiles(tiles, row, step, TILE), tl.arange(0, GROUP)
            eight, own_j = tl.arange(0, BLOCK // 8), own_kept + capacity // 8 * 8
            number = tl.cdiv(n + 3, TILE)
            for tile in range(0, number, GROUP):
                entry = own_tiles + (tile + group) * 2
                begins = tl.load(entry, mask=tile + group < number, other=0)
                sizes = tl.load(entry + 1, mask=tile + group < number, other=0)
                ends = tl.cumsum(sizes, 0)
                together = tl.max(ends, 0)
                for start in range(0, together, BLOCK // 8):
                    place = start + eight
                    # Its tile: how many end before it, bit by bit.
                    which, half = tl.zeros((BLOCK // 8,), tl.int32), GROUP // 2
                    while half > 0:
                        which += tl.where(tl.gather(ends, which + (half - 1), 0) <= place, half, 0)
                        half //= 2
                    place += tl.gather(begins - (ends - sizes), which, 0)
                    place = tl.gather(place, block // 8, 0) * 8 + block % 8
                    inside = start * 8 + block < together * 8
                    order = tl.load(own_kept + place, mask=inside, other=-0x80000000)
                    j = tl.load(own_j + place, mask=inside, other=0)
                    taken, ties = _write(target, taken, ties, order, j, first, room)
        else:
            for start in range(0, n, BLOCK):
                order = _orders(False, own_kept, own, start + block, n)
                taken, ties = _write(target, taken, ties, order, low + start + block, first, room)
    for start in range(count, width, BLOCK):
        tl.store(target + start + block, tl.full((BLOCK,), -1, tl.int32), mask=start + block < width)


def specializations() -> list[tuple[str, Any, dict[str, str], dict[str, Any], dict[str, int]]]:
    """Label, kernel, signature, constants and options of a launch, for compilation without a device."""
    types = {"scores": "*fp32"} | dict.fromkeys(("state", "tiles", "kept", "indices", "counts"), "*i32")
    types |= dict.fromkeys(("begin", "end", "budget"), "*i64")
    found = []
    for label, pitch in (("", "i32"), (" captured", "*i32")):
        for name, kernel, shapes, warps in (
            ("cut", _cut_kernel, {"SAMPLES": SAMPLES}, 8),
            ("collect", _collect_kernel, {"PARTS": PARTS, "TILE": TILE}, 4),
            ("take", _take_kernel, {"TILE": TILE, "GROUP": GROUP, "HELD": HELD, "BLOCK": BLOCK}, 8),
        ):
            constants = {"THERE": pitch == "*i32"} | shapes
            told = signature(kernel, types | {"pitch": pitch}, constants)
            found.append((f"top_k {name}{label}", kernel, told, constants, {"num_warps": warps}))
    return found
