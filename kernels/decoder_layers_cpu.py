"""The decoder layers of a decode step in one call, attention included.

While weights and KV stream through the processor's caches, what Python does between two kernels is slow. Here the
same kernels run in the same order, those of ``decoder_layer_cpu.py``, ``store_kv_cpu.py`` and
``paged_attention_cpu.py``: results are theirs to the bit.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numba import carray, njit, types
from numba.core import cgutils
from numba.extending import intrinsic, overload

from fathom.kernels.decoder_layer_cpu import (
    AfterAttention,
    BeforeAttention,
    after_rows,
    before_rows,
    check_positions,
)
from fathom.kernels.kv_pair import KvPair
from fathom.kernels.numba_cpu import INNER, LOOPS, as_array, from_float32, to_float32
from fathom.kernels.paged_attention_cpu import (
    NO_EVIDENCE,
    Tasks,
    address_of_kernel,
    plan_packed,
    takes_products,
)
from fathom.kernels.store_kv_cpu import store_rows


@dataclass(frozen=True)
class Reads:
    """What consecutive layers read in a step of one query row per request, where all have the same work.

    Attributes:
        tasks: the work on each page table.
        tables: of each layer [rows, entries] int32, all of one shape, contiguous.
        writes: of each layer [rows] int64, slots that take the rows' keys and values in its pool, contiguous.
        pools: of each layer the pool's keys and values.
        compacts: of each layer the compact buffer's; the pools where nothing is read from one.
    """

    tasks: Tasks
    tables: Sequence[torch.Tensor]
    writes: Sequence[np.ndarray]
    pools: Sequence[KvPair]
    compacts: Sequence[KvPair]

    @cached_property
    def layouts(self) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """How the pools and the compact buffers are laid out; None where some of them differ, or a pool's slots
        are not one block of memory.
        """
        pools, compacts = ({pair.layout for pair in pairs} for pairs in (self.pools, self.compacts))
        if len(pools) > 1 or len(compacts) > 1 or any(pair.rows is None for pair in self.pools):
            return None
        return pools.pop(), compacts.pop()

    @cached_property
    def addresses(self) -> np.ndarray:
        """[layers, 6] int64: where keys, values, compact keys, compact values, table and slots to write begin."""
        parts = zip(self.pools, self.compacts, self.tables, self.writes, strict=True)
        found = [
            (*pool.addresses, *run.addresses, table.data_ptr(), write.ctypes.data)
            for pool, run, table, write in parts
        ]
        return np.array(found, np.int64)


class DecoderLayers:
    """The layers of a model, all of the same sizes."""

    def __init__(
        self,
        halves: Sequence[tuple[BeforeAttention, AfterAttention]],
        heads: int,
        kv_heads: int,
        scale: float,
    ) -> None:
        """
        Args:
            halves: of every layer.
            heads, kv_heads: of the attention; scale: factor on its dot products.

        Raises:
            ValueError: layers differ in more than their numbers.
        """
        self.halves = list(halves)  # weights live as long as their addresses are used
        forms = {_form(*both) for both in halves}
        if len(forms) != 1:
            raise ValueError(f"layers are of {len(forms)} forms")
        before, after = self.halves[0]
        self.before = before
        dims = before.head_dim, before.value // kv_heads
        self.sizes = (heads, kv_heads, *dims)
        self.shapes = tuple(x.shape for x in _arrays(before, after))
        products = takes_products(torch.bfloat16, torch.bfloat16, *dims)
        self.operand = np.uint16 if products else np.float32
        self.weights = np.array([[x.ctypes.data for x in _arrays(*both)] for both in halves], np.int64)
        self.epsilons = np.float32(before.eps), np.float32(after.eps)
        self.scale = np.float32(scale)
        self.attention = address_of_kernel(heads // kv_heads, *dims, _ATTENTION[products])

    def __call__(
        self, positions: torch.Tensor, hidden: torch.Tensor, runs: Sequence[Reads]
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """
        Args:
            positions: [rows] int64, of the one token that each request computes.
            hidden: [rows, hidden] bfloat16, contiguous: what the first layer is given, before which there is no
                residual.
            runs: of all layers, in their order.

        Returns:
            Hidden states and residual, [rows, hidden]; None where keys and values of a run are not laid out
            alike, slot by slot: nothing is computed then.

        Raises:
            IndexError: a position has no angles, or a slot is outside the pool.
        """
        if any(reads.layouts is None for reads in runs):
            return None
        places = check_positions(positions, self.before.cos_sin)
        done, total = torch.empty_like(hidden), torch.empty_like(hidden)
        heads, _, head_dim, _ = self.sizes
        operand = np.empty((len(hidden), heads, head_dim), self.operand)
        given = so_far = as_array(hidden)
        results, first = (as_array(done), as_array(total)), 0
        for reads in runs:
            pool, compact = reads.layouts  # type: ignore[misc]
            complete = _layers(
                self.attention,
                self.weights[first : first + len(reads.pools)],
                reads.addresses,
                self.sizes,
                self.shapes,
                self.epsilons,
                operand,
                pool,
                compact,
                self.before.cos_sin,
                places,
                given,
                so_far,
                first == 0,
                tuple(reads.tables[0].shape),
                tuple(reads.tasks),
                NO_EVIDENCE,
                self.scale,
                *results,
                torch.get_num_threads(),
            )
            if not complete:
                raise IndexError(f"slot outside 0 .. {len(reads.pools[0][0]) - 1}")
            given, so_far = results
            first += len(reads.pools)
        return done, total


def _arrays(before: BeforeAttention, after: AfterAttention) -> tuple[np.ndarray, ...]:
    """What differs from layer to layer, in the order in which ``_layers`` unpacks it."""
    return (
        before.gain,
        before.lines,
        before.bias,
        before.query_gain,
        before.key_gain,
        after.output,
        after.gain,
        after.gate_up,
        after.down,
    )


def _form(before: BeforeAttention, after: AfterAttention) -> tuple:
    """What must not differ."""
    shapes = tuple(x.shape for x in _arrays(before, after))
    widths = before.head_dim, before.query, before.key, before.value
    angles = before.cos_sin.ctypes.data, before.cos_sin.shape
    return shapes, widths, angles, before.eps, after.eps


def warm_up(layers: DecoderLayers) -> None:
    """Compile for this process now, so that no request waits for it (seconds, cached on disk)."""
    before, kv_heads = layers.before, layers.sizes[1]
    dims = before.head_dim, before.value // kv_heads
    pair = KvPair(*(torch.zeros(1, kv_heads, dim, dtype=torch.bfloat16) for dim in dims))
    one, first = np.arange(2), torch.zeros(1, 1, dtype=torch.int32)
    count, tasks = len(layers.halves), plan_packed(one, one, kv_heads)
    pairs = [pair] * count
    reads = Reads(tasks, [first] * count, [np.zeros(1, np.int64)] * count, pairs, pairs)
    hidden = torch.zeros(1, len(before.gain), dtype=torch.bfloat16)
    layers(torch.zeros(1, dtype=torch.int64), hidden, [reads])


# --- what runs ---

_BITS, _FLOATS, _COUNTS = types.uint16, types.float32, types.int64[::1]
_POOL = types.Tuple((_BITS[:, ::1], types.int64, types.int64) * 2)
_ATTENTION_READS = (
    _POOL,
    _POOL,
    types.int32[:, ::1],
    types.Tuple((*(_COUNTS,) * 11, types.int64, types.int64, _COUNTS)),
    types.Tuple((_FLOATS[:, :, :, ::1], _FLOATS[:, :, ::1])),
    types.Tuple((_FLOATS[:, :, ::1], _FLOATS[:, ::1], _FLOATS[:, ::1])),
    types.Tuple((_FLOATS[:, :, ::1], _FLOATS[:, ::1])),
    _FLOATS,
)
_ATTENTION = {
    products: (query[:, :, ::1], *_ATTENTION_READS) for products, query in ((True, _BITS), (False, _FLOATS))
}
"""The arguments of attention's kernel over bfloat16 keys and values, with bfloat16 products and without."""


@intrinsic
def _attend(typing_context, address, arguments):
    """Call the kernel at ``address``, compiled for one of ``_ATTENTION``, with these arguments.

    By its address, because a function that names the kernel, one of many by shape, could not be kept on disk.
    """
    if tuple(arguments) not in _ATTENTION.values():
        return None

    def codegen(context, builder, signature, values):
        kinds = signature.args[1].types
        function = context.call_conv.get_function_type(types.none, kinds)
        kernel = builder.inttoptr(values[0], function.as_pointer())
        own = [builder.extract_value(values[1], i) for i in range(len(kinds))]
        status, _ = context.call_conv.call_function(builder, kernel, types.none, kinds, own)
        with cgutils.if_unlikely(builder, status.is_error):
            context.call_conv.return_status_propagate(builder, status)
        return context.get_dummy_value()

    return types.void(address, arguments), codegen


@intrinsic
def _pointer(typing_context, address, kind):
    """``address`` as a pointer to elements like ``kind``."""
    element = types.CPointer(kind)

    def codegen(context, builder, signature, values):
        return builder.inttoptr(values[0], context.get_value_type(signature.return_type))

    return element(address, kind), codegen


def _for_attention(query, operand):
    """Queries as attention's kernel takes them, [rows, heads, head_dim].

    Args:
        query: [rows, heads * head_dim] uint16, bfloat16 numbers.
        operand: float32, to be filled, or uint16 where they are taken as they are.
    """


@overload(_for_attention, jit_options=INNER)
def _queries(query, operand):
    if operand.dtype == types.uint16:
        return lambda query, operand: query.reshape(operand.shape)

    def widened(query, operand):
        numbers = operand.reshape(query.shape)
        for r in range(len(query)):
            for j in range(query.shape[1]):
                numbers[r, j] = to_float32(query[r, j])
        return operand

    return widened


_BIT, _LINE, _SLOT = np.uint16(0), np.int32(0), np.int64(0)


@njit(**LOOPS)
def _layers(
    attention,
    weights,
    kv,
    sizes,
    shapes,
    epsilons,
    operand,
    pool,
    compact,
    cos_sin,
    positions,
    hidden,
    residual,
    first,
    table_shape,
    tasks,
    evidence,
    scale,
    done,
    so_far,
    threads,
):
    heads, kv_heads, head_dim, value_dim = sizes
    gain, lines, bias, query_gain, key_gain, output, output_gain, gate_up, down = shapes
    key_lines, key_slot, key_head, value_lines, value_slot, value_head = pool
    packed_keys, packed_key_slot, packed_key_head, packed_values, packed_value_slot, packed_value_head = (
        compact
    )
    rows, slots = len(hidden), key_lines // kv_heads
    query = np.empty((rows, heads * head_dim), np.uint16)
    key = np.empty((rows, kv_heads * head_dim), np.uint16)
    value = np.empty((rows, kv_heads * value_dim), np.uint16)
    total = np.empty_like(hidden)
    attended = np.empty((rows, heads * value_dim), np.uint16)
    results = np.empty((rows, heads, value_dim), np.float32), np.empty((rows, heads), np.float32)
    most = heads // kv_heads * tasks[11]
    partials = (
        np.empty((len(tasks[0]), most, value_dim), np.float32),
        np.empty((len(tasks[0]), most), np.float32),
        np.empty((len(tasks[0]), most), np.float32),
    )
    for i in range(len(weights)):
        at = weights[i]
        if first and i == 0:
            total[:] = hidden
        before_rows(
            hidden,
            residual,
            first and i == 0,
            carray(_pointer(at[0], _BIT), gain),
            epsilons[0],
            carray(_pointer(at[1], _LINE), lines),
            carray(_pointer(at[2], _BIT), bias),
            carray(_pointer(at[3], _BIT), query_gain),
            carray(_pointer(at[4], _BIT), key_gain),
            cos_sin,
            positions,
            head_dim,
            query,
            key,
            value,
            total,
            threads,
        )
        keys = carray(_pointer(kv[i, 0], _BIT), (key_lines, head_dim))
        values = carray(_pointer(kv[i, 1], _BIT), (value_lines, value_dim))
        by_slot = keys.reshape(slots, kv_heads * head_dim), values.reshape(slots, kv_heads * value_dim)
        table = carray(_pointer(kv[i, 4], _LINE), table_shape)
        write = carray(_pointer(kv[i, 5], _SLOT), (rows,))
        if not store_rows(key, value, by_slot[0], by_slot[1], write):
            return False
        _attend(
            attention,
            (
                _for_attention(query, operand),
                (keys, key_slot, key_head, values, value_slot, value_head),
                (
                    carray(_pointer(kv[i, 2], _BIT), (packed_keys, head_dim)),
                    packed_key_slot,
                    packed_key_head,
                    carray(_pointer(kv[i, 3], _BIT), (packed_values, value_dim)),
                    packed_value_slot,
                    packed_value_head,
                ),
                table,
                tasks,
                evidence,
                partials,
                results,
                scale,
            ),
        )
        for r in range(rows):
            line, own = attended[r], results[0][r].reshape(-1)
            for j in range(len(line)):
                line[j] = from_float32(own[j], line)
        after_rows(
            attended.view(np.int32),
            total,
            carray(_pointer(at[5], _LINE), output),
            carray(_pointer(at[6], _BIT), output_gain),
            epsilons[1],
            carray(_pointer(at[7], _LINE), gate_up),
            carray(_pointer(at[8], _LINE), down),
            done,
            so_far,
            threads,
        )
        hidden, residual = done, so_far
    return True
