"""Pack sink and selected KV entries of many requests into their runs of a compact buffer, one layer at a time.

``pack_segment_torch`` is the reference of the Triton kernel here and of the CPU kernel in ``refresh_cpu.py``.
"""

import torch
import triton
import triton.language as tl

from fathom.kernels.dispatch import runs_triton
from fathom.kernels.triton_aot import Specialization, signature

TOKENS = 16
"""Tokens that one Triton program copies."""


def pack_segment(
    pool: tuple[torch.Tensor, torch.Tensor],
    compact: tuple[torch.Tensor, torch.Tensor],
    page_table: torch.Tensor,
    rows: torch.Tensor,
    start: torch.Tensor,
    indices: torch.Tensor,
    sink: int,
) -> None:
    """Write entry t of request e and KV head h to ``compact[start[e] + t, h]``: its sink, then its selection.

    Args:
        pool: keys [slots, kv_heads, head_dim] and values [slots, kv_heads, value_dim] of one layer.
        compact: the layer's compact buffer, the pool's dtype and trailing shape. Changed in place.
        page_table: [table_rows, max_length] int32, slot of each table entry.
        rows: [requests] page-table row, or -1 for a place that no request takes.
        start: [requests] first token of each request's run.
        indices: [requests, kv_heads, width] int32 table entries, those to be copied first, then -1.
        sink: table entries ``0 .. sink - 1`` are copied before the selection; they must exist.
    """
    if runs_triton(indices):
        pack_segment_triton(pool, compact, page_table, rows, start, indices, sink)
        return
    from fathom.kernels.refresh_cpu import pack_segment_cpu

    pack_segment_cpu(pool, compact, page_table, rows, start, indices, sink)


def pack_segment_torch(
    pool: tuple[torch.Tensor, torch.Tensor],
    compact: tuple[torch.Tensor, torch.Tensor],
    page_table: torch.Tensor,
    rows: torch.Tensor,
    start: torch.Tensor,
    indices: torch.Tensor,
    sink: int,
) -> None:
    """:func:`pack_segment` in plain PyTorch."""
    first = torch.arange(sink)
    for row, begin, heads in zip(rows.tolist(), start.tolist(), indices, strict=True):
        if row < 0:
            continue
        for h, entries in enumerate(heads):
            # index_select copies whole rows; indexing would copy element by element.
            slots = page_table[row].index_select(0, torch.cat((first, entries[entries >= 0])))
            run = slice(begin, begin + len(slots))
            for buffer, origin in zip(compact, pool, strict=True):
                buffer[run, h] = origin[:, h].index_select(0, slots)


@triton.jit(do_not_specialize=["rows", "start", "width"])
def _pack_kernel(
    keys, values, compact_keys, compact_values, table, rows, start, indices, sink, width,
    stride_key_slot, stride_key_head, stride_value_slot, stride_value_head,
    stride_packed_key, stride_packed_key_head, stride_packed_value, stride_packed_value_head,
    stride_table, kv_heads,
    DIM: tl.constexpr, DIM_P: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_DIM_P: tl.constexpr,
    TOKENS: tl.constexpr,
):  # fmt: skip
    """Program (request and KV head, block of tokens)."""
    e, h = tl.program_id(0) // kv_heads, tl.program_id(0) % kv_heads
    row = tl.load(rows + e).to(tl.int64)
    if row < 0:
        return
    place = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    chosen = (place >= sink) & (place < sink + width)
    at = tl.program_id(0).to(tl.int64) * width + place - sink
    entry = tl.load(indices + at, mask=chosen, other=-1)
    entry = tl.where(place < sink, place, entry)
    there = entry >= 0
    source = tl.load(table + row * stride_table + entry, mask=there, other=0).to(tl.int64)
    target = tl.load(start + e).to(tl.int64) + place
    d = tl.arange(0, DIM_P)
    mask = there[:, None] & (d < DIM)[None, :]
    moved = tl.load(keys + source[:, None] * stride_key_slot + h * stride_key_head + d[None, :], mask=mask)
    to = compact_keys + target[:, None] * stride_packed_key + h.to(tl.int64) * stride_packed_key_head
    tl.store(to + d[None, :], moved, mask=mask)
    d = tl.arange(0, VALUE_DIM_P)
    mask = there[:, None] & (d < VALUE_DIM)[None, :]
    moved = tl.load(
        values + source[:, None] * stride_value_slot + h * stride_value_head + d[None, :], mask=mask
    )
    to = compact_values + target[:, None] * stride_packed_value + h.to(tl.int64) * stride_packed_value_head
    tl.store(to + d[None, :], moved, mask=mask)


def _constants(dim: int, value_dim: int) -> dict[str, int]:
    padded = {"DIM_P": triton.next_power_of_2(dim), "VALUE_DIM_P": triton.next_power_of_2(value_dim)}
    return {"DIM": dim, "VALUE_DIM": value_dim, "TOKENS": TOKENS} | padded


def pack_segment_triton(
    pool: tuple[torch.Tensor, torch.Tensor],
    compact: tuple[torch.Tensor, torch.Tensor],
    page_table: torch.Tensor,
    rows: torch.Tensor,
    start: torch.Tensor,
    indices: torch.Tensor,
    sink: int,
) -> None:
    """:func:`pack_segment` in one launch; nothing waits for the device."""
    requests, kv_heads, width = indices.shape
    indices = indices.contiguous()
    _pack_kernel[(requests * kv_heads, triton.cdiv(sink + width, TOKENS))](
        *pool, *compact, page_table, rows, start, indices, sink, width,
        *pool[0].stride()[:2], *pool[1].stride()[:2], *compact[0].stride()[:2], *compact[1].stride()[:2],
        page_table.stride(0), kv_heads, **_constants(pool[0].shape[2], pool[1].shape[2]),
    )  # fmt: skip


def specializations() -> list[Specialization]:
    """What to compile ahead of time."""
    integers = {"table": "*i32", "rows": "*i64", "start": "*i64", "indices": "*i32"}
    results = []
    for dtype, dim in (("bf16", 128), ("fp32", 64), ("fp16", 80), ("fp8e5", 128)):
        tensors = dict.fromkeys(["keys", "values", "compact_keys", "compact_values"], "*" + dtype)
        constants = _constants(dim, dim)
        own = signature(_pack_kernel, tensors | integers, constants)
        results.append(Specialization(f"pack_segment {dim} {dtype}", _pack_kernel, own, constants))
    return results
