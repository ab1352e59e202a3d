"""Rotary position embedding of queries and keys: both in one call, read once and written once.

``rotary`` is the CPU kernel, ``rotary_reference`` the plain-PyTorch reference it is tested against.
"""

import numpy as np
import torch
from numba import njit

from fathom.kernels.numba_cpu import (
    DTYPES,
    LOOPS,
    as_array,
    as_rows,
    from_float32,
    match_torch_threads,
    to_float32,
)
from fathom.kernels.work_sharing_cpu import on_threads, share_of, threads_for


def rotary_reference(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    cos_sin: torch.Tensor,
    head_dim: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Reference for :func:`rotary`; same shapes."""
    cos, sin = cos_sin[positions].float().unsqueeze(1).chunk(2, -1)
    turned = []
    for x in (query, key):
        heads = x.float().reshape(len(positions), -1, head_dim)
        part, rest = heads[..., : cos_sin.shape[1]], heads[..., cos_sin.shape[1] :]
        a, b = part.chunk(2, -1)
        both = torch.cat((a * cos - b * sin, b * cos + a * sin, rest), -1)
        turned.append(both.reshape(x.shape).to(x.dtype))
    return turned[0], turned[1]


def rotary(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    cos_sin: torch.Tensor,
    head_dim: int,
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Turn the first ``rotary_dim`` features of each head by its token's position, on the CPU.

    Feature i is paired with i + rotary_dim / 2 (the GPT-NeoX layout).

    Args:
        positions: [tokens] int64, rows of cos_sin.
        query: [tokens, heads * head_dim] or [tokens, heads, head_dim]; key: likewise with its own number of heads;
            float32, bfloat16 or float16. The features of a token contiguous, tokens evenly spaced.
        cos_sin: [positions, rotary_dim], the cosines, then the sines; dtype of query.

    Returns:
        Turned query and key, contiguous, in their shapes; None where the kernel does not take this layout or
        combination of dtypes.

    Raises:
        IndexError: a position has no row in cos_sin.
    """
    same = query.dtype == key.dtype == cos_sin.dtype and query.dtype in DTYPES
    if not same or positions.dtype != torch.int64 or positions.dim() != 1 or not cos_sin.is_contiguous():
        return None
    tokens = len(positions)
    packed_query, packed_key = _per_token(query, tokens, head_dim), _per_token(key, tokens, head_dim)
    if packed_query is None or packed_key is None or not positions.is_contiguous():
        return None
    places = positions.numpy()
    if places.min() < 0 or places.max() >= cos_sin.shape[0]:
        raise IndexError(f"position outside 0 .. {cos_sin.shape[0] - 1}")
    turned_query = query.new_empty(query.shape)
    turned_key = key.new_empty(key.shape)
    _turn_tokens(
        places,
        as_array(cos_sin),
        packed_query,
        as_array(turned_query).reshape(tokens, -1),
        packed_key,
        as_array(turned_key).reshape(tokens, -1),
        head_dim,
    )
    return turned_query, turned_key


def _per_token(x: torch.Tensor, tokens: int, head_dim: int) -> tuple[np.ndarray, int] | None:
    """Flat array of a query or key and the distance between its tokens."""
    if x.dim() == 3 and x.stride(1) == x.shape[2] == head_dim:
        x = x.flatten(1)
    if x.dim() != 2 or x.shape[0] != tokens or x.shape[1] % head_dim:
        return None
    rows = as_rows(x)
    return None if rows is None else rows[:2]


def warm_up(dtype: torch.dtype) -> None:
    """Compile for this dtype now, so that no request waits for it (cached on disk)."""
    match_torch_threads()
    x = torch.ones(1, 8, dtype=dtype)
    rotary(torch.zeros(1, dtype=torch.int64), x, x, x, 8)


@njit(**LOOPS)
def _turn_head(a, b, cos, sin, out_a, out_b):
    for d in range(len(cos)):
        x, y = to_float32(a[d]), to_float32(b[d])
        c, s = to_float32(cos[d]), to_float32(sin[d])
        out_a[d] = from_float32(x * c - y * s, out_a)
        out_b[d] = from_float32(y * c + x * s, out_b)


@njit(**LOOPS)
def turn_token(x, cos_sin, head_dim, out):
    """All heads of one token, [heads * head_dim] as :func:`as_array` has them; ``cos_sin`` [rotary_dim]."""
    turned = len(cos_sin)
    half = turned // 2
    cos, sin = cos_sin[:half], cos_sin[half:]
    for begin in range(0, len(out), head_dim):
        middle, end = begin + half, begin + turned
        _turn_head(x[begin:middle], x[middle:end], cos, sin, out[begin:middle], out[middle:end])
        for d in range(end, begin + head_dim):
            out[d] = x[d]


@njit(**LOOPS)
def _turn_tokens(positions, cos_sin, query, turned_query, key, turned_key, head_dim):
    threads = threads_for(turned_query.size + turned_key.size)
    on_threads(_turn_some, threads, positions, cos_sin, query, turned_query, key, turned_key, head_dim)


@njit(**LOOPS)
def _turn_some(thread, threads, positions, cos_sin, query, turned_query, key, turned_key, head_dim):
    q, q_stride = query
    k, k_stride = key
    q_width, k_width = turned_query.shape[1], turned_key.shape[1]
    begin, end = share_of(len(positions), thread, threads)
    for t in range(begin, end):
        angles = cos_sin[positions[t]]
        turn_token(q[t * q_stride : t * q_stride + q_width], angles, head_dim, turned_query[t])
        turn_token(k[t * k_stride : t * k_stride + k_width], angles, head_dim, turned_key[t])
