"""What top-k, top-p and min-p leave of probabilities, and the draw from it, on the CPU; one task per row.

The rules and their plain version are in ``runtime/sampling.py``, which sorts. Here nothing is sorted: how many
tokens and how much mass lie above a probability is counted by the probability's bits, coarsely for all tokens, then
more closely for those of the bin where a rule's limit lies.
"""

import numpy as np
import torch
from numba import njit

from fathom.kernels.numba_cpu import LOOPS, match_torch_threads
from fathom.kernels.work_sharing_cpu import all_threads, on_threads, share_of

BITS = (20, 10, 0)
"""Below the bits of a float32 by which its bin is found: 12 of them, then 10 and 10."""
BLOCK = 256
"""Probabilities whose sum is taken at once before a draw."""
NEVER = np.finfo(np.float64).max
"""What -log(0) is taken for."""
ROUNDED = 1 - 1e-12
"""Of a bound, so that its own rounding leaves nothing out."""


def warm_up() -> None:
    """Compile now, so that no request waits for it (cached on disk)."""
    one = torch.ones(1, 1)
    filtered_cpu(one, *torch.ones(3, 1))
    draw_cpu(one, torch.zeros(1, dtype=torch.double))
    draw_seeded_cpu(one, *torch.zeros(2, 1))


def filtered_cpu(
    probs: torch.Tensor, top_ks: torch.Tensor, top_ps: torch.Tensor, min_ps: torch.Tensor
) -> torch.Tensor:
    """``filtered`` on the CPU, with the same arguments; of equally likely tokens the lower ids stay.

    What is negative or no number counts as zero. Sums are float64.
    """
    rows = probs.float().contiguous()
    rest = torch.empty_like(rows)
    match_torch_threads()
    _filter(
        rows.numpy(),
        top_ks.view(-1).long().contiguous().numpy(),
        *(values.view(-1).double().contiguous().numpy() for values in (top_ps, min_ps)),
        rest.numpy(),
    )
    return rest


def draw_cpu(weights: torch.Tensor, chances: torch.Tensor) -> torch.Tensor:
    """A token of each row, by the place of its chance in the sum of weights.

    Args:
        weights: [rows, vocabulary] float32, not negative; chances: [rows] float64 in [0, 1).

    Returns:
        [rows] int64, never a token of weight zero but where all are; then the first.
    """
    tokens = torch.empty(len(weights), dtype=torch.int64)
    match_torch_threads()
    _draw(weights.float().contiguous().numpy(), chances.contiguous().numpy(), tokens.numpy())
    return tokens


@njit(cache=True)
def _filter(probs, top_ks, top_ps, min_ps, rest):
    on_threads(_filter_some, all_threads(), probs, top_ks, top_ps, min_ps, rest)


@njit(cache=True)
def _filter_some(thread, threads, probs, top_ks, top_ps, min_ps, rest):
    first, end = share_of(len(probs), thread, threads)
    for i in range(first, end):
        row, least, surplus = probs[i], np.float32(0), 0
        if top_ks[i] < len(row) or top_ps[i] < 1:
            least, surplus = _limit(row, top_ks[i], np.inf if top_ps[i] >= 1 else top_ps[i])
        floor = _highest(row) * np.float32(min_ps[i])
        mass = _keep(row, max(least, floor), rest[i])
        if least > 0 and floor <= least:
            t = len(row)
            while surplus > 0:
                t -= 1
                if row[t] == least:
                    rest[i, t] = 0
                    mass -= np.float64(least)
                    surplus -= 1
        if mass > 0:
            _divide(rest[i], np.float32(mass))


@njit(**LOOPS)
def _highest(row):
    most = np.float32(0)
    for x in row:
        most = x if x > most else most
    return most


@njit(**LOOPS)
def _keep(row, least, rest):
    """What is at least so likely, and its sum."""
    mass = 0.0
    for t in range(len(row)):
        x = row[t] if row[t] >= least and row[t] > 0 else np.float32(0)
        rest[t] = x
        mass += np.float64(x)
    return mass


@njit(**LOOPS)
def _divide(row, mass):
    for t in range(len(row)):
        row[t] /= mass


@njit(cache=True)
def _limit(row, top_k, top_p):
    """The least probability that stays, and how many tokens that are just as likely do not."""
    size = len(row)
    keys = np.empty(size, np.uint32)
    bits = row.view(np.uint32)
    for t in range(size):
        keys[t] = bits[t] if row[t] > 0 else np.uint32(0)
    counts, masses = np.empty(1 << 12, np.int64), np.empty(1 << 12, np.float64)
    above, mass = 0, 0.0  # of tokens that are in higher bins
    known = np.uint32(0)
    for shift in BITS:
        counts[:] = 0
        masses[:] = 0
        inside = (1 << 12 if shift == 20 else 1 << 10) - 1
        values = keys[:size].view(np.float32)
        for t in range(size):
            place = (keys[t] >> np.uint32(shift)) & np.uint32(inside)
            counts[place] += 1
            masses[place] += np.float64(values[t])
        border = inside
        while border > 0 and above + counts[border] <= top_k and mass + masses[border] <= top_p:
            above += counts[border]
            mass += masses[border]
            border -= 1
        known = known | (np.uint32(border) << np.uint32(shift))
        stay = 0
        for t in range(size):
            if (keys[t] >> np.uint32(shift)) & np.uint32(inside) == border:
                keys[stay] = keys[t]
                stay += 1
        size = stay
    place = np.empty(1, np.uint32)
    place[0] = known
    least = place.view(np.float32)[0]
    kept = min(size, top_k - above)
    if least > 0 and top_p - mass < least * kept:
        kept = min(kept, np.int64((top_p - mass) / least) + 1)
    return least, size - kept


@njit(cache=True)
def _draw(weights, chances, tokens):
    on_threads(_draw_some, all_threads(), weights, chances, tokens)


@njit(cache=True)
def _draw_some(thread, threads, weights, chances, tokens):
    first, end = share_of(len(weights), thread, threads)
    width = weights.shape[1]
    sums = np.empty((width + BLOCK - 1) // BLOCK, np.float64)
    for i in range(first, end):
        _sum_blocks(weights[i], sums)
        wanted, before, block = chances[i] * sums.sum(), 0.0, 0
        while block < len(sums) - 1 and before + sums[block] <= wanted:
            before += sums[block]
            block += 1
        token = -1
        for t in range(block * BLOCK, min((block + 1) * BLOCK, width)):
            if weights[i, t] > 0:
                token = t
                before += np.float64(weights[i, t])
                if before > wanted:
                    break
        if token < 0:  # rounding left the chance behind the last token that can be drawn
            token = block * BLOCK
            while token > 0 and not weights[i, token] > 0:
                token -= 1
        tokens[i] = token


@njit(**LOOPS)
def _sum_blocks(row, sums):
    for block in range(len(sums)):
        mass = 0.0
        for t in range(block * BLOCK, min((block + 1) * BLOCK, len(row))):
            mass += np.float64(row[t])
        sums[block] = mass


def draw_seeded_cpu(weights: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """A token of each row by the Gumbel trick; a token's noise is a hash of its id, the row's seed and position.

    The most of ``log(weight) + noise`` is that of ``weight / -log(u)``, where u is the hash as a number of [0, 1].
    The hash is the one of ``murmur_hash.py``.

    Args:
        weights: [rows, vocabulary] float32, not negative; seeds: [rows] int64; positions: [rows] integers.

    Returns:
        [rows] int64, never a token of weight zero but where all are; then the first.
    """
    tokens = torch.empty(len(weights), dtype=torch.int64)
    match_torch_threads()
    numbers = (values.long().contiguous().numpy() for values in (seeds, positions))
    _draw_seeded(weights.float().contiguous().numpy(), *numbers, tokens.numpy())
    return tokens


@njit(cache=True)
def _draw_seeded(weights, seeds, positions, tokens):
    on_threads(_draw_seeded_some, all_threads(), weights, seeds, positions, tokens)


@njit(cache=True)
def _draw_seeded_some(thread, threads, weights, seeds, positions, tokens):
    first, end = share_of(len(weights), thread, threads)
    most_likely = 2.0**-32  # of -log(u), so that no noise is infinite
    for i in range(first, end):
        state = _mixed(np.uint32(0), np.uint32(seeds[i] & 0xFFFFFFFF))
        state = _mixed(state, np.uint32((seeds[i] >> 32) & 0xFFFFFFFF))
        state = _mixed(state, np.uint32(positions[i] & 0xFFFFFFFF))
        best, token = -1.0, 0
        for t in range(weights.shape[1]):
            if not weights[i, t] > 0:
                continue
            chance = _finished(_mixed(state, np.uint32(t))) / 0xFFFFFFFF
            if weights[i, t] < best * (1 - chance) * ROUNDED:  # 1 - u is never more than -log(u)
                continue
            exponential = max(-np.log(chance), most_likely) if chance > 0 else NEVER
            if weights[i, t] / exponential > best:
                best, token = weights[i, t] / exponential, t
        tokens[i] = token


@njit(cache=True)
def _rotated(x, bits):
    return (x << np.uint32(bits)) | (x >> np.uint32(32 - bits))


@njit(cache=True)
def _mixed(state, block):
    block = _rotated(np.uint32(block * np.uint32(0xCC9E2D51)), 15)
    state = _rotated(np.uint32(state ^ np.uint32(block * np.uint32(0x1B873593))), 13)
    return np.uint32(state * np.uint32(5) + np.uint32(0xE6546B64))


@njit(cache=True)
def _finished(state):
    state = np.uint32(state ^ np.uint32(16))
    state = np.uint32((state ^ (state >> np.uint32(16))) * np.uint32(0x85EBCA6B))
    state = np.uint32((state ^ (state >> np.uint32(13))) * np.uint32(0xC2B2AE35))
    return np.uint32(state ^ (state >> np.uint32(16)))
