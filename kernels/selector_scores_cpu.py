"""SFI's Selector up to Top-K on the CPU; contract and plain version are in ``selector_scores.py``."""

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numba import njit
from numba.extending import overload

from fathom.kernels.numba_cpu import (
    INNER,
    LOOPS,
    exp_float32,
    exp_of_negative,
    literal_values,
    log_float32,
    match_torch_threads,
)
from fathom.kernels.work_sharing_cpu import all_threads, on_threads, share_of

BLOCK = 1024

PAIRS_AT_ONCE = 16
"""Requests times KV heads that are worked on together at least: few, so that what the first parallel part writes is
still in a cache when the second reads it."""


def selector_scores_cpu(
    logits: torch.Tensor, key_norms: torch.Tensor, begin: torch.Tensor, end: torch.Tensor, c: Any
) -> torch.Tensor:
    """``selector_scores`` on the CPU; same arguments.

    Where both exponents are one half, as they are by default, roots and products take the place of exponentials.
    """
    kernel = _scores(int(c.power == c.norm_decay == 0.5))
    requests, kv_heads, _, n = logits.shape
    scores = torch.empty(requests, kv_heads, n)
    low, high = begin.long().numpy(), end.long().numpy()
    # What the prior says of a position (Eq. 11), the same for all heads.
    position = np.empty((requests, n), np.float32)
    _positions(
        low, high, position, *map(np.float32, (c.position_decay, c.position_curve, c.tail_brake, c.epsilon))
    )
    at_once = -(-PAIRS_AT_ONCE // kv_heads)
    evidence, prior = np.empty((2, min(at_once, requests), kv_heads, n), np.float32)
    factors = np.empty((min(at_once, requests), kv_heads, 2), np.float32)
    numbers = (
        c.power,
        c.norm_decay,
        c.nms_strength,
        c.cross_head,
        1 / c.temperature,
        c.epsilon,
        math.log(c.epsilon),
    )
    parameters = tuple(map(np.float32, numbers))
    for first in range(0, requests, at_once):
        some = slice(first, first + at_once)
        kernel(
            logits[some].numpy(),
            key_norms[some].numpy(),
            low[some],
            high[some],
            (evidence, prior, position[some], factors),
            scores[some].numpy(),
            parameters,
            float(c.prior_clip),
            int(c.nms_radius),
        )
    return scores


# Without `reassoc`, which makes 1 + epsilon - u of 1 - u + epsilon, and so nothing of it at the last candidate.
_EXACT: dict[str, Any] = {"fastmath": {"contract"}, "error_model": "numpy", "cache": True}

_LOWEST, _ZERO, _ONE = np.float32(-np.inf), np.float32(0), np.float32(1)


@njit(**_EXACT)
def _positions(begin, end, position, decay, curve, brake, epsilon):
    on_threads(_positions_of_some, all_threads(), begin, end, position, decay, curve, brake, epsilon)


@njit(**_EXACT)
def _positions_of_some(thread, threads, begin, end, position, decay, curve, brake, epsilon):
    requests, n = position.shape
    blocks = -(-n // BLOCK)
    first_task, end_task = share_of(requests * blocks, thread, threads)
    for task in range(first_task, end_task):
        r, first = task // blocks, task % blocks * BLOCK
        low, high = begin[r], end[r]
        span = np.float32(high - low - 1) + epsilon
        own = position[r, first : first + BLOCK]
        for t in range(len(own)):
            u = min(max(np.float32(first - low + t) / span, _ZERO), _ONE)
            own[t] = exp_float32(
                brake * log_float32(_ONE - u + epsilon) - decay * exp_float32(curve * log_float32(u))
            )


@functools.cache
def _scores(halves: int) -> Callable[..., None]:
    """
    Args:
        halves: 1 where alpha (Eq. 7) and gamma (Eq. 9) are one half, else 0.
    """
    match_torch_threads()

    @njit(**LOOPS)
    def kernel(logits, key_norms, begin, end, scratch, scores, numbers, prior_clip, radius):
        threads, limits = all_threads(), (begin, end)
        on_threads(_mix, threads, logits, key_norms, limits, scratch, numbers, prior_clip, (halves,))
        on_threads(_suppress, threads, limits, scratch, scores, numbers, radius)

    return kernel


def _mix(thread, threads, logits, key_norms, limits, scratch, numbers, prior_clip, sizes):
    """Evidence (Eqs. 6 to 8) and prior (Eqs. 9 to 12), and the factors that make their mixture a distribution.

    Of the thread's share of requests and KV heads.
    """


@overload(_mix, jit_options=INNER, prefer_literal=True)
def _mix_some(thread, threads, logits, key_norms, limits, scratch, numbers, prior_clip, sizes):
    (halves,) = literal_values(sizes)

    def mix(thread, threads, logits, key_norms, limits, scratch, numbers, prior_clip, sizes):
        (begin, end), (evidence, prior, position, factors) = limits, scratch
        power, norm_decay, _, _, _, epsilon, _ = numbers
        requests, kv_heads, rows, _ = logits.shape
        first_pair, end_pair = share_of(requests * kv_heads, thread, threads)
        for pair in range(first_pair, end_pair):
            r, h = pair // kv_heads, pair % kv_heads
            low, high = begin[r], end[r]
            # Of each logit the power alpha of its exponential; of each row what makes its exponentials a softmax.
            powers, scale = np.empty((rows, max(high - low, 0)), np.float32), np.empty(rows, np.float32)
            for q in range(rows):
                best, top, total = np.full(BLOCK, _LOWEST), _LOWEST, 0.0
                for first in range(low, high, BLOCK):
                    source = logits[r, h, q, first : min(first + BLOCK, high)]
                    for t in range(len(source)):
                        best[t] = source[t] if source[t] > best[t] else best[t]
                for t in range(BLOCK):
                    top = max(top, best[t])
                for first in range(low, high, BLOCK):
                    source, part = logits[r, h, q, first : min(first + BLOCK, high)], _ZERO
                    own = powers[q, first - low : first - low + len(source)]
                    for t in range(len(source)):
                        own[t] = exp_of_negative(power * (source[t] - top))
                        part += own[t] * own[t] if halves else exp_of_negative(source[t] - top)
                    total += part
                scale[q] = exp_float32(-power * log_float32(np.float32(total)))
            sum_f = sum_r = sum_ff = sum_fr = sum_rr = 0.0
            each, root, mean = _ONE / np.float32(rows), _ONE / power, np.empty(BLOCK, np.float32)
            for first in range(low, high, BLOCK):
                size = min(BLOCK, high - first)
                mean[:] = _ZERO
                for q in range(rows):
                    own, factor = powers[q, first - low : first - low + size], each * scale[q]
                    for t in range(size):
                        mean[t] += factor * own[t]
                norms, place = key_norms[r, h, first : first + size], position[r, first : first + size]
                fs, xs = evidence[r, h, first : first + size], prior[r, h, first : first + size]
                part_f = part_r = part_ff = part_fr = part_rr = _ZERO
                for t in range(size):
                    norm = norms[t] + epsilon
                    if halves:
                        f, x = mean[t] * mean[t], place[t] / np.sqrt(norm)
                    else:
                        f = exp_float32(root * log_float32(mean[t])) if mean[t] > _ZERO else _ZERO
                        x = place[t] * exp_float32(-norm_decay * log_float32(norm))
                    fs[t], xs[t] = f, x
                    part_f += f
                    part_r += x
                    part_ff += f * f
                    part_fr += f * x
                    part_rr += x * x
                sum_f += part_f
                sum_r += part_r
                sum_ff += part_ff
                sum_fr += part_fr
                sum_rr += part_rr
            # The fusion weight of Eq. 18.
            ff, fr, rr = sum_ff / (sum_f * sum_f), sum_fr / (sum_f * sum_r), sum_rr / (sum_r * sum_r)
            bottom = ff - 2 * fr + rr
            weight = min(max((ff - fr) / bottom, 0.0), prior_clip) if bottom > 0 else 0.0
            factors[r, h, 0], factors[r, h, 1] = (1 - weight) / sum_f, weight / sum_r

    return mix


@njit(**LOOPS)
def _suppress(thread, threads, limits, scratch, scores, numbers, radius):
    """Soft non-maximum suppression (Eqs. 19 to 21) and cross-head exclusivity (Eqs. 22 and 23) of some blocks."""
    (begin, end), (evidence, prior, _, factors) = limits, scratch
    _, _, strength, cross_head, per_degree, epsilon, log_epsilon = numbers
    requests, kv_heads, n = scores.shape
    blocks, width = -(-n // BLOCK), 2 * radius + 1
    first_task, end_task = share_of(requests * blocks, thread, threads)
    for task in range(first_task, end_task):
        r, first = task // blocks, task % blocks * BLOCK
        low, high = max(first, begin[r]), min(first + BLOCK, end[r])
        scores[r, :, first : first + BLOCK] = _LOWEST
        size = high - low
        if size <= 0:
            continue
        near, far = max(low - radius, begin[r]), min(high + radius, end[r])
        z = np.empty(size, np.float32)
        peak, wider = np.empty(size + 2 * radius, np.float32), np.empty(size + 2 * radius, np.float32)
        top, total = np.full(size, _LOWEST), np.zeros(size, np.float32)
        for h in range(kv_heads):
            of_f, of_r = factors[r, h, 0], factors[r, h, 1]
            fs, xs, own = evidence[r, h, near:far], prior[r, h, near:far], scores[r, h, low:high]
            peak[:] = _LOWEST
            inner = peak[near - low + radius : far - low + radius]
            for t in range(far - near):
                inner[t] = log_float32(of_f * fs[t] + of_r * xs[t] + epsilon)
            for t in range(size):
                z[t] = peak[radius + t]
            # peak[i] is the largest of `covered` places from i on.
            covered = 1
            while 2 * covered <= width:
                ahead = peak[covered:]
                for t in range(len(ahead)):
                    wider[t] = ahead[t] if ahead[t] > peak[t] else peak[t]
                peak, wider, covered = wider, peak, 2 * covered
            ahead = peak[width - covered :]
            for t in range(size):
                largest = ahead[t] if ahead[t] > peak[t] else peak[t]
                value = z[t] - strength * (largest - z[t])
                own[t] = value
                top[t] = value if value > top[t] else top[t]
        for h in range(kv_heads):
            own = scores[r, h, low:high]
            for t in range(size):
                total[t] += exp_of_negative((own[t] - top[t]) * per_degree)
        for t in range(size):
            total[t] = log_float32(total[t])
        for h in range(kv_heads):
            own = scores[r, h, low:high]
            for t in range(size):
                share = (own[t] - top[t]) * per_degree - total[t]
                own[t] += cross_head * (share if share > log_epsilon else log_epsilon)
