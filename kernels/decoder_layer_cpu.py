"""The two halves of a Llama-like decoder layer around its attention, for a few rows, each in one call.

A decode step's layer is some ten operators on a few rows, and while weights and KV stream through the processor's
caches, what lies between two operators is slow. Everything is rounded to bfloat16 where the operators would round
it, and a row's result is the same to the bit whatever rows are beside it.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numba import njit, prange

from fathom.kernels.few_rows_linear_cpu import (
    NOTHING,
    begin_products,
    block_products,
    blocks_in,
    end_products,
    example_lines,
    in_whole_tiles,
    products,
    whole_tiles,
)
from fathom.kernels.numba_cpu import LOOPS, as_array, from_float32, match_torch_threads
from fathom.kernels.rms_norm import add_norm_row, norm_row
from fathom.kernels.rotary import turn_token
from fathom.kernels.silu_and_mul import silu_row
from fathom.kernels.work_sharing_cpu import even_shares, take


@dataclass(frozen=True)
class BeforeAttention:
    """What a layer does before its attention: norm, projection to queries, keys and values, rotary embedding.

    Attributes:
        gain: [hidden] of the norm; eps: of all norms.
        lines: the projection, as ``few_rows_linear_cpu.py`` has it.
        bias: [outputs] of the projection; query_gain, key_gain: [head_dim] of the norms of every head. ``NOTHING``
            where there is none.
        cos_sin: [positions, rotary_dim].
        query, key, value: the projection's outputs are as many features of each.

    All arrays but ``lines`` hold bfloat16 numbers as uint16.
    """

    gain: np.ndarray
    eps: float
    lines: np.ndarray
    bias: np.ndarray
    query_gain: np.ndarray
    key_gain: np.ndarray
    cos_sin: np.ndarray
    head_dim: int
    query: int
    key: int
    value: int

    def __call__(
        self, positions: torch.Tensor, hidden: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """
        Args:
            positions: [rows] int64, each a row of ``cos_sin``.
            hidden: [rows, hidden] bfloat16, contiguous; residual: likewise, None for a model's first layer.

        Returns:
            Queries, keys and values, each [rows, features], and the new residual.

        Raises:
            IndexError: a position has no row in ``cos_sin``.
        """
        places = check_positions(positions, self.cos_sin)
        rows, total = len(hidden), hidden if residual is None else torch.empty_like(hidden)
        query, key, value = (
            hidden.new_empty(rows, features) for features in (self.query, self.key, self.value)
        )
        given = as_array(hidden)
        before_rows(
            given,
            given if residual is None else as_array(residual),
            residual is None,
            self.gain,
            np.float32(self.eps),
            self.lines,
            self.bias,
            self.query_gain,
            self.key_gain,
            self.cos_sin,
            places,
            self.head_dim,
            as_array(query),
            as_array(key),
            as_array(value),
            as_array(total),
            torch.get_num_threads(),
        )
        return query, key, value, total


@dataclass(frozen=True)
class AfterAttention:
    """What a layer does after its attention: output projection, norm, gated feed-forward.

    Attributes:
        output, gate_up, down: the matrices, likewise; of ``gate_up`` the gates come first, in whole blocks.
        gain: [hidden] of the norm; eps: its epsilon.
    """

    output: np.ndarray
    gain: np.ndarray
    eps: float
    gate_up: np.ndarray
    down: np.ndarray

    def __call__(self, attended: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Args:
            attended: [rows, heads * value_dim] bfloat16, contiguous; residual: [rows, hidden].

        Returns:
            Hidden states and residual, [rows, hidden].
        """
        hidden, total = torch.empty_like(residual), torch.empty_like(residual)
        after_rows(
            as_array(attended).view(np.int32),
            as_array(residual),
            self.output,
            self.gain,
            np.float32(self.eps),
            self.gate_up,
            self.down,
            as_array(hidden),
            as_array(total),
            torch.get_num_threads(),
        )
        return hidden, total


def check_positions(positions: torch.Tensor, cos_sin: np.ndarray) -> np.ndarray:
    """The positions as an array.

    Raises:
        IndexError: one has no row in ``cos_sin``.
    """
    places = positions.numpy()
    if places.min() < 0 or places.max() >= len(cos_sin):
        raise IndexError(f"position outside 0 .. {len(cos_sin) - 1}")
    return places


def warm_up(packed: bool) -> None:
    """Compile the kernels for one kind of weights now, so that no request waits for them."""
    match_torch_threads()
    one, gain = example_lines(1, 32, packed), np.zeros(32, np.uint16)
    hidden = torch.zeros(1, 32, dtype=torch.bfloat16)
    angles = gain.reshape(1, 32)
    before = BeforeAttention(gain, 1e-6, one, NOTHING, NOTHING, NOTHING, angles, 32, 32, 0, 32)
    for residual in (None, hidden):
        before(torch.zeros(1, dtype=torch.int64), hidden, residual)
    gate_up, down = example_lines(2, 32, packed), example_lines(1, 64, packed)
    AfterAttention(one, gain, 1e-6, gate_up, down)(hidden, hidden)


@njit(**LOOPS)
def _norm_heads(x, gain, epsilon, head_dim, out):
    for begin in range(0, len(x), head_dim):
        norm_row(x[begin : begin + head_dim], gain, epsilon, out[begin : begin + head_dim])


@njit(parallel=True, **LOOPS)
def before_rows(
    hidden,
    residual,
    first,
    gain,
    epsilon,
    lines,
    bias,
    query_gain,
    key_gain,
    cos_sin,
    positions,
    head_dim,
    query,
    key,
    value,
    total,
    threads,
):
    rows, width = hidden.shape
    normed = np.empty((whole_tiles(rows, lines), width), np.uint16)
    for r in range(rows):
        if first:
            norm_row(hidden[r], gain, epsilon, normed[r])
        else:
            add_norm_row(hidden[r], residual[r], gain, epsilon, normed[r], total[r])
    query_width, key_width = query.shape[1], key.shape[1]
    middle = query_width + key_width
    projected = np.empty((rows, middle + value.shape[1]), np.uint16)
    left = normed.view(np.int32)
    products(left, lines, bias, projected, threads)
    for r in prange(rows):
        by_head = np.empty(middle, np.uint16)
        angles, own = cos_sin[positions[r]], projected[r]
        if len(query_gain):
            _norm_heads(own[:query_width], query_gain, epsilon, head_dim, by_head[:query_width])
            _norm_heads(own[query_width:middle], key_gain, epsilon, head_dim, by_head[query_width:])
        else:
            by_head[:] = own[:middle]
        turn_token(by_head[:query_width], angles, head_dim, query[r])
        turn_token(by_head[query_width:], angles, head_dim, key[r])
        value[r] = own[middle:]


@njit(parallel=True, **LOOPS)
def after_rows(attended, residual, output, gain, epsilon, gate_up, down, hidden, total, threads):
    rows, width = hidden.shape
    tiles = whole_tiles(rows, output)
    left = in_whole_tiles(attended, output)
    projected = np.empty((rows, width), np.uint16)
    none = np.empty(0, np.uint16)
    products(left, output, none, projected, threads)
    normed = np.empty((tiles, width), np.uint16)
    for r in range(rows):
        add_norm_row(projected[r], residual[r], gain, epsilon, normed[r], total[r])
    inner = normed.view(np.int32)
    gates, size = blocks_in(gate_up, inner.shape[1]) // 2, gate_up.shape[1]
    active = np.empty((tiles, gates * size), np.uint16)
    shares = even_shares(gates, threads)
    taken = shares[:-1].copy()
    for thread in prange(len(taken)):
        others = begin_products()
        while True:
            block = take(taken, shares, thread)
            if block < 0:
                break
            gate = block_products(inner, gate_up, block)
            up = block_products(inner, gate_up, gates + block)
            both = np.empty((2, size), np.uint16)
            for r in range(rows):
                for j in range(size):
                    both[0, j] = from_float32(gate[r, j], both)
                    both[1, j] = from_float32(up[r, j], both)
                silu_row(both[0], both[1], active[r, block * size : block * size + size])
        end_products(others)
    pairs = active.view(np.int32)
    products(pairs, down, none, hidden, threads)
