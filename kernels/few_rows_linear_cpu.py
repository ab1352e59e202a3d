"""Linear layers of a few bfloat16 rows, which are bound by reading the weights.

Weights lie in memory in one of two ways, which the number of dimensions of their *lines* tells:

- *packed* by oneDNN, [outputs / width, inputs / 2, width, 2]: what products of tiles (``bfloat16_cpu.py``,
  ``amx_cpu.py``) read in the order of memory, on processors that have AVX512-BF16;
- *plain*, [outputs, inputs], for all others (``plain_linear_cpu.py``).

A row's result is the same to the bit whatever rows are beside it.
"""

import ctypes

import numpy as np
import torch
from numba import njit, prange

from fathom.kernels.amx_cpu import has_amx
from fathom.kernels.bfloat16_cpu import has_bfloat16_products, tile_products
from fathom.kernels.matrix_products_cpu import ROWS, begin_products, end_products, product
from fathom.kernels.numba_cpu import LOOPS, as_array, from_float32, match_torch_threads, to_float32
from fathom.kernels.plain_linear_cpu import plain_products
from fathom.kernels.work_sharing_cpu import even_shares, take

WIDTHS = 64, 32
"""Outputs that may lie together, in a *block*: 32 where the processor has AMX."""

FEW_ROWS = 32
"""Up to so many rows this is faster than oneDNN's own product."""

# Pairs of inputs whose sums stay in registers. With several tiles of rows, runs are shorter, with two of them more
# so, and the last tile asks for what comes later: by themselves, the processor's prefetchers rest while the other
# tiles are computed.
_LONG_RUN, _RUN, _SHORT_RUN, _AHEAD = 128, 32, 16, 32
_ADD = 1


def blocks_of(packed: torch.Tensor, weight: torch.Tensor) -> np.ndarray | None:
    """A packed weight's memory as lines of pairs, which lives as long as ``packed``.

    Args:
        packed: what oneDNN made of ``weight``.
        weight: [outputs, inputs] bfloat16.

    Returns:
        [blocks * inputs / 2, width] int32, of a width of ``WIDTHS``, outputs rounded up to whole blocks; None where
        oneDNN has laid it out in another way, which is looked for in the first and last blocks and some between,
        or the processor lacks the products.
    """
    inputs = weight.shape[1]
    if inputs % (2 * _SHORT_RUN) or not has_bfloat16_products():
        return None
    size = torch.ops.mkldnn._nbytes(packed)
    memory = (ctypes.c_char * size).from_address(torch.ops.mkldnn.data_ptr(packed))
    words = np.frombuffer(memory, np.int32)
    return next((words.reshape(-1, width) for width in WIDTHS if _lies_in(words, weight, width)), None)


def _lies_in(words: np.ndarray, weight: torch.Tensor, width: int) -> bool:
    """Whether memory holds a weight in blocks of ``width`` outputs."""
    outputs, inputs = weight.shape
    count, pairs = -(-outputs // width), inputs // 2
    if words.size != count * pairs * width:
        return False
    blocks = words.reshape(count, pairs, width)
    for block in {0, count // 3, count // 2, count - 1}:
        part = weight[block * width : (block + 1) * width].contiguous()
        if not np.array_equal(blocks[block, :, : len(part)], as_array(part).view(np.int32).T):
            return False
    return True


def few_rows_linear(
    x: torch.Tensor, lines: np.ndarray, outputs: int, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """``x @ weight.T + bias``, added up in float32 and rounded once.

    Args:
        x: [rows, inputs] bfloat16, contiguous.
        lines: of :func:`blocks_of` or ``plain_blocks``; outputs: of the weight.
        bias: [outputs] bfloat16.

    Returns:
        [rows, outputs] bfloat16.
    """
    result = x.new_empty(len(x), outputs)
    added = NOTHING if bias is None else as_array(bias)
    left = in_whole_tiles(as_array(x).view(np.int32), lines)
    products(left, lines, added, as_array(result), torch.get_num_threads())
    return result


def packed_rows(ids: torch.Tensor, lines: np.ndarray, outputs: int) -> torch.Tensor:
    """Rows of the packed weight itself: the embedding whose weight is also the output matrix.

    Args:
        ids: [..] int64, each a row of the weight.
        lines, outputs: as for :func:`few_rows_linear`.

    Returns:
        [.., inputs] bfloat16.

    Raises:
        IndexError: an id has no row.
    """
    flat = ids.reshape(-1).numpy()
    if flat.size and (flat.min() < 0 or flat.max() >= outputs):
        raise IndexError(f"id outside 0 .. {outputs - 1}")
    pairs = len(lines) // -(-outputs // lines.shape[1])
    result = torch.empty(len(flat), 2 * pairs, dtype=torch.bfloat16)
    _rows(flat, lines, as_array(result).view(np.int32))
    return result.view(*ids.shape, 2 * pairs)


NOTHING = np.empty(0, np.uint16)
"""In place of a bias or of a gain that there is not."""


def warm_up(packed: bool) -> None:
    """Compile the kernels for packed or plain weights now, so that no request waits for them."""
    match_torch_threads()
    one = torch.zeros(1, 32, dtype=torch.bfloat16)
    lines = example_lines(1, 32, packed)
    few_rows_linear(one, lines, lines.shape[1])
    if packed:
        packed_rows(torch.zeros(1, dtype=torch.int64), lines, lines.shape[1])


def example_lines(blocks: int, inputs: int, packed: bool) -> np.ndarray:
    """Lines of zeros of so many blocks of outputs, to compile kernels with."""
    if packed:
        return np.zeros((blocks * inputs // 2, WIDTHS[0]), np.int32)
    return np.zeros((blocks, WIDTHS[0], inputs // 2), np.int32)


@njit(**LOOPS)
def whole_tiles(rows, lines):
    """Rows of a buffer that is the left side of :func:`block_products`; those beyond ``rows`` count for nothing."""
    if lines.ndim == 3:
        return rows
    return (rows + ROWS - 1) // ROWS * ROWS


@njit(**LOOPS)
def in_whole_tiles(x, lines):
    """A copy of [rows, inputs / 2] int32 that is such a left side."""
    rows, pairs = x.shape
    left = np.empty((whole_tiles(rows, lines), pairs), np.int32)
    for r in range(rows):
        left[r] = x[r]
    return left


@njit(**LOOPS)
def _by_amx(x, lines, block):
    pairs = x.shape[1]
    sums = np.empty((len(x), lines.shape[1]), np.float32)
    product(sums, 0, x, 0, len(x), lines[block * pairs : (block + 1) * pairs])
    return sums


def _tile(ahead: int):
    @njit(**LOOPS)
    def tile(sums, row, left, right):
        pairs = right.shape[0]
        if right.shape[1] == 64:
            tile_products(sums, row, 0, left, row, right, pairs, ROWS, 4, _ADD, ahead)
        else:
            tile_products(sums, row, 0, left, row, right, pairs, ROWS, 2, _ADD, ahead)

    return tile


_add_tile, _add_last_tile = _tile(0), _tile(_AHEAD)


@njit(**LOOPS)
def _by_vectors(x, lines, block):
    rows, pairs = x.shape
    sums = np.zeros((rows, lines.shape[1]), np.float32)
    own = lines[block * pairs : (block + 1) * pairs]
    last, done = rows - ROWS, 0
    if last == 0:
        done = pairs // _LONG_RUN * _LONG_RUN
        for begin in range(0, done, _LONG_RUN):
            _add_tile(sums, 0, x[:, begin : begin + _LONG_RUN], own[begin : begin + _LONG_RUN])
    run = _RUN if rows > 2 * ROWS else _SHORT_RUN
    for begin in range(done, pairs, run):
        end = min(begin + run, pairs)
        left, right = x[:, begin:end], own[begin:end]
        for r in range(0, last, ROWS):
            _add_tile(sums, r, left, right)
        _add_last_tile(sums, last, left, right)
    return sums


_packed_products = _by_amx if has_amx() else _by_vectors


@njit(**LOOPS)
def block_products(x, lines, block):
    """[rows, width] float32, the rows' products with one block of outputs, between ``begin_products`` and
    ``end_products``.

    Args:
        x: [rows, inputs / 2] int32, pairs of bfloat16 numbers, in whole tiles of rows.
    """
    if lines.ndim == 3:
        return plain_products(x, lines, block)
    return _packed_products(x, lines, block)


@njit(**LOOPS)
def blocks_in(lines, pairs):
    """Blocks of outputs of a weight for so many pairs of inputs."""
    if lines.ndim == 3:
        return len(lines)
    return len(lines) // pairs


@njit(**LOOPS)
def block_outputs(x, lines, block, bias, out):
    """One block of the outputs of all rows, rounded, into ``out`` [rows, outputs] uint16."""
    sums = block_products(x, lines, block)
    first = block * lines.shape[1]
    end = min(first + lines.shape[1], out.shape[1])
    for r in range(len(out)):
        line = out[r, first:end]
        if len(bias):
            added = bias[first:end]
            for j in range(len(line)):
                line[j] = from_float32(sums[r, j] + to_float32(added[j]), line)
        else:
            for j in range(len(line)):
                line[j] = from_float32(sums[r, j], line)


@njit(parallel=True, **LOOPS)
def products(left, lines, bias, out, threads):
    """``left @ weight.T + bias``, rounded, into ``out`` [rows, outputs] uint16.

    Args:
        left: as ``x`` of :func:`block_products`; bias: [outputs] uint16 or ``NOTHING``.
    """
    shares = even_shares(blocks_in(lines, left.shape[1]), threads)
    taken = shares[:-1].copy()
    for thread in prange(len(taken)):
        others = begin_products()
        while True:
            block = take(taken, shares, thread)
            if block < 0:
                break
            block_outputs(left, lines, block, bias, out)
        end_products(others)


@njit(parallel=True, **LOOPS)
def _rows(ids, lines, out):
    pairs, width = out.shape[1], lines.shape[1]
    for r in prange(len(ids)):
        first, column = ids[r] // width * pairs, ids[r] % width
        for p in range(pairs):
            out[r, p] = lines[first + p, column]
