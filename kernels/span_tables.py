"""The page tables of a step, written where they are read: from tables that the device keeps, not from the host.

Of every request a span reads either the request's private table, or what the shared map says of its virtual slots.
The host sends a few numbers per request and span; the slots, as many as the requests have tokens, it does not see.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from fathom.kernels.dispatch import runs_triton

BLOCK = 256
"""Pages per block that tables are kept in, usually."""

ENTRIES = 1024
"""Entries that one Triton program writes."""


def span_tables(
    head: torch.Tensor,
    slots: torch.Tensor,
    write: torch.Tensor,
    requests: int,
    longest: int,
    beyond: int,
    request_table: torch.Tensor,
    backing: torch.Tensor,
    directory: torch.Tensor,
    blocks: torch.Tensor,
    page_size: int,
) -> None:
    """Write the slots that each request reads at each span, and those that take its new tokens.

    Args:
        head: [spans, 5, at least requests] int32, for each request where its entries begin in ``slots``; how many
            there are; how many of them come before its new tokens; its row, or ``-1 - row`` where the row's
            private table is read; and where its new tokens begin in ``write``.
        slots: [spans, entries] int32; write: [spans, tokens] int64. Changed in place.
        requests: how many there are; longest: most entries of one at a span.
        beyond: tokens behind each request's last one whose slots, where the tables name any, are written to
            ``slots`` behind its own.
        request_table: [rows, positions] int32 virtual slots.
        backing: [spans, virtual pages] int32 physical pages of virtual ones.
        directory: [spans, rows, blocks of a table] int32 numbers of the blocks that a private table lies in.
        blocks: [blocks, pages] int32 physical pages.
    """
    if runs_triton(slots):
        span_tables_triton(
            head,
            slots,
            write,
            requests,
            longest,
            beyond,
            request_table,
            backing,
            directory,
            blocks,
            page_size,
        )
        return
    span_tables_torch(
        head, slots, write, requests, beyond, request_table, backing, directory, blocks, page_size
    )


def span_tables_torch(
    head: torch.Tensor,
    slots: torch.Tensor,
    write: torch.Tensor,
    requests: int,
    beyond: int,
    request_table: torch.Tensor,
    backing: torch.Tensor,
    directory: torch.Tensor,
    blocks: torch.Tensor,
    page_size: int,
) -> None:
    """:func:`span_tables` in plain PyTorch, request after request."""
    for span, numbers in enumerate(head[:, :, :requests].tolist()):
        for begin, length, prefix, source, first in zip(*numbers, strict=True):
            entry = torch.arange(length + beyond)
            if source < 0:
                page = blocks[directory[span, -1 - source]].flatten()[entry // page_size]
                own = page * page_size + entry % page_size
            else:
                virtual = request_table[source, : length + beyond]
                own = backing[span, virtual // page_size] * page_size + virtual % page_size
            slots[span, begin : begin + length + beyond] = own
            write[span, first : first + length - prefix] = own[prefix:length]


# Buffers grow, and the tables are parts of one block of memory.
_VARYING = ["backing", "directory", "blocks", "stride_head", "width", "stride_slots", "stride_write"]
_VARYING += ["stride_rows", "stride_backing", "stride_span", "stride_table", "beyond"]


@triton.jit(do_not_specialize=_VARYING)
def _span_tables(
    head, slots, write, request_table, backing, directory, blocks,
    stride_head, width, stride_slots, stride_write, stride_rows, stride_backing, stride_span, stride_table,
    beyond, PAGE: tl.constexpr, BLOCK: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    """Program (block of entries, request, span)."""
    request, span = tl.program_id(1), tl.program_id(2).to(tl.int64)
    numbers = head + span * stride_head + request
    begin, length = tl.load(numbers), tl.load(numbers + width)
    prefix, source = tl.load(numbers + 2 * width), tl.load(numbers + 3 * width)
    first = tl.load(numbers + 4 * width)
    entry = tl.program_id(0) * ENTRIES + tl.arange(0, ENTRIES)
    reach = length + beyond
    there = entry < reach
    private = entry < tl.where(source < 0, reach, 0)
    mapped = entry < tl.where(source < 0, 0, reach)
    row = tl.where(source < 0, -1 - source, source).to(tl.int64)
    virtual = tl.load(request_table + row * stride_rows + entry, mask=mapped, other=0)
    shared = tl.load(backing + span * stride_backing + virtual // PAGE, mask=mapped, other=0)
    page = entry // PAGE
    own = directory + span * stride_span + row * stride_table + page // BLOCK
    block = tl.load(own, mask=private, other=0).to(tl.int64)
    listed = tl.load(blocks + block * BLOCK + page % BLOCK, mask=private, other=0)
    slot = tl.where(private, listed * PAGE + entry % PAGE, shared * PAGE + virtual % PAGE)
    tl.store(slots + span * stride_slots + begin + entry, slot, mask=there)
    fresh = (entry >= prefix) & (entry < length)
    tl.store(write + span * stride_write + first + entry - prefix, slot.to(tl.int64), mask=fresh)


def span_tables_triton(
    head: torch.Tensor,
    slots: torch.Tensor,
    write: torch.Tensor,
    requests: int,
    longest: int,
    beyond: int,
    request_table: torch.Tensor,
    backing: torch.Tensor,
    directory: torch.Tensor,
    blocks: torch.Tensor,
    page_size: int,
) -> None:
    """:func:`span_tables` in one launch; nothing waits for the device."""
    _span_tables[(triton.cdiv(longest + beyond, ENTRIES), requests, head.shape[0])](
        head, slots, write, request_table, backing, directory, blocks,
        *head.stride()[:2], slots.stride(0), write.stride(0), request_table.stride(0), backing.stride(0),
        *directory.stride()[:2], beyond, PAGE=page_size, BLOCK=blocks.shape[1], ENTRIES=ENTRIES,
    )  # fmt: skip


def specializations() -> list[tuple[Any, dict[str, str], dict[str, Any]]]:
    """Kernel, signature and constants of typical launches, for compilation without a device."""
    integers = ["head", "slots", "request_table", "backing", "directory", "blocks"]
    types = dict.fromkeys(integers, "*i32") | {"write": "*i64"}
    results = []
    for page_size in (1, 16):
        constants = {"PAGE": page_size, "BLOCK": BLOCK, "ENTRIES": ENTRIES}
        names = _span_tables.arg_names
        signature = {n: "constexpr" if n in constants else types.get(n, "i32") for n in names}
        results.append((_span_tables, signature, constants))
    return results
