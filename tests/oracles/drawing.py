"""A seeded draw by its definition: the most of log-probability and noise, a hash of seed, position and token."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

MASK = 0xFFFFFFFF


def murmur3_32(blocks: Iterable[Any]) -> Any:
    """MurmurHash3_x86_32 of whole 4-byte blocks, with seed 0 (Appleby, public domain definition).

    Args:
        blocks: each an integer below 2**32, or an array of them in uint64.
    """

    def rotate(x, r):
        return ((x << r) | (x >> (32 - r))) & MASK

    state, size = 0, 0
    for block in blocks:
        state = state ^ (rotate((block * 0xCC9E2D51) & MASK, 15) * 0x1B873593 & MASK)
        state = (rotate(state, 13) * 5 + 0xE6546B64) & MASK
        size += 4
    state = state ^ size
    state = ((state ^ (state >> 16)) * 0x85EBCA6B) & MASK
    state = ((state ^ (state >> 13)) * 0xC2B2AE35) & MASK
    return state ^ (state >> 16)


def noise(seed: int, position: int, vocabulary: int) -> torch.Tensor:
    """[vocabulary] float64, Gumbel noise of each token behind a position."""
    tokens = np.arange(vocabulary, dtype=np.uint64)
    chances = murmur3_32((seed & MASK, seed >> 32, position, tokens)) / MASK
    with np.errstate(divide="ignore"):
        return torch.from_numpy(-np.log(np.maximum(-np.log(chances), 2.0**-32)))


def may_draw(
    logits: torch.Tensor, token: int, position: int, sampling: Mapping[str, Any], tie: float
) -> bool:
    """Whether the seed draws this token, if sums and the filters' limits may be off by ``tie``.

    Args:
        logits: [vocabulary]. position: of the last token before the draw, from 0.
        sampling: ``temperature``, ``sampling_seed``, ``top_k`` (-1: all), ``top_p`` and ``min_p`` of a request.
    """
    known = (logits.double() / sampling["temperature"]).log_softmax(-1)
    sums = known + noise(sampling["sampling_seed"], position, len(known))
    surely = _stays(known, sampling, -tie)
    return bool(_stays(known, sampling, tie)[token]) and bool((sums[token] >= sums[surely] - tie).all())


def _stays(known: torch.Tensor, sampling: Mapping[str, Any], off: float) -> torch.Tensor:
    """[vocabulary] bool, what top-k, top-p and min-p leave; with ``off`` > 0 also what they almost leave."""
    order = known.sort().values
    above = torch.searchsorted(
        order, known + off, right=True
    )  # the first place of those that are more likely
    mass = torch.cat((order.exp().flip(0).cumsum(0).flip(0), torch.zeros(1)))[above]
    count, itself = len(known) - above, int(off < 0)
    stays = known >= known.max() - off + np.log(sampling["min_p"] or 1e-300)
    if sampling["top_k"] > 0:
        stays &= count - itself < sampling["top_k"]
    return stays & (mass - itself * known.exp() <= sampling["top_p"] + off)
