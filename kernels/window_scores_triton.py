"""The Triton kernels of ``window_scores``: the same scores on a GPU.

A tile holds ``ROWS`` query rows times ``GROUP_P`` query heads of one KV head (line = row * GROUP_P + head) against
``BLOCK`` keys. ``_statistics`` leaves each row's maximum and sum per split of the keys; ``_pooled_max`` and
``_row_mean`` compute the logits again and reduce them. Logits are in units of log2, so that exp2 serves.
"""

import torch
import triton
import triton.language as tl

from fathom.kernels.triton_aot import NARROW_KV, Specialization, least_for, signature

MAX_POOL = 32
TILE_LINES = 64
TILE_ROWS = 8
"""Query rows of a tile: as many as a window or a look-ahead usually has; keys are read once more for each further
eight."""

_OPTIONS = {"num_warps": 8, "num_stages": 2}
KEYS_PER_SPLIT = 4096
LOG2_E = 1.4426950408889634


@triton.jit
def _tile_lines(row_block, rows, GROUP: tl.constexpr, GROUP_P: tl.constexpr, ROWS: tl.constexpr):
    """Row and head (within its KV head) of each line of the tile, and whether they exist."""
    line = tl.arange(0, ROWS * GROUP_P)
    row = row_block * ROWS + line // GROUP_P
    head = line % GROUP_P
    return row, head, (row < rows) & (head < GROUP)


@triton.jit
def _tile_query(
    query, packed_row, head, exists, stride_row, stride_head, DIM: tl.constexpr, DIM_P: tl.constexpr
):
    """[lines, DIM_P] of the query; ``head`` counts over all heads."""
    d = tl.arange(0, DIM_P)
    place = (
        packed_row.to(tl.int64)[:, None] * stride_row + head.to(tl.int64)[:, None] * stride_head + d[None, :]
    )
    return tl.load(query + place, mask=exists[:, None] & (d < DIM)[None, :], other=0.0)


@triton.jit
def _tile_logits(
    q,
    keys,
    table_row,
    position,
    kv_head,
    row,
    rows,
    length,
    scale,
    stride_slot,
    stride_kv_head,
    CAUSAL: tl.constexpr,
    DIM: tl.constexpr,
    DIM_P: tl.constexpr,
):
    """[lines, BLOCK] logits against the keys at ``position``; -inf where there is none that the row sees."""
    there = (position >= 0) & (position < length)
    slot = tl.load(table_row + position, mask=there, other=0).to(tl.int64)
    d = tl.arange(0, DIM_P)
    place = slot[:, None] * stride_slot + kv_head * stride_kv_head + d[None, :]
    k = tl.load(keys + place, mask=there[:, None] & (d < DIM)[None, :], other=0.0)
    logits = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee") * scale
    seen = there[None, :]
    if CAUSAL:
        seen = seen & (position[None, :] <= length - rows + row[:, None])
    return tl.where(seen, logits, float("-inf"))


@triton.jit(do_not_specialize=["lengths", "table_stride", "total_rows"])
def _statistics(
    query,
    keys,
    table,
    first_row,
    lengths,
    part_max,
    part_sum,
    scale,
    q_stride_row,
    q_stride_head,
    k_stride_slot,
    k_stride_head,
    table_stride,
    total_rows,
    kv_heads,
    CAUSAL: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_P: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_P: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Program (request and KV head, split, block of rows): part_max and part_sum [splits, total_rows, heads]."""
    request = tl.program_id(0) // kv_heads
    kv_head = tl.program_id(0) % kv_heads
    split = tl.program_id(1)
    first = tl.load(first_row + request)
    rows = tl.load(first_row + request + 1) - first
    length = tl.load(lengths + request)
    if tl.program_id(2) * ROWS < rows:
        row, head, exists = _tile_lines(tl.program_id(2), rows, GROUP, GROUP_P, ROWS)
        head += kv_head * GROUP
        q = _tile_query(query, first + row, head, exists, q_stride_row, q_stride_head, DIM, DIM_P)
        top = tl.full([ROWS * GROUP_P], float("-inf"), tl.float32)
        total = tl.zeros([ROWS * GROUP_P], tl.float32)
        table_row = table + request.to(tl.int64) * table_stride
        for begin in range(split * SPLIT, tl.minimum((split + 1) * SPLIT, length), BLOCK):
            position = begin + tl.arange(0, BLOCK)
            logits = _tile_logits(
                q, keys, table_row, position, kv_head, row, rows, length, scale, k_stride_slot, k_stride_head,
                CAUSAL, DIM, DIM_P,
            )  # fmt: skip
            new_top = tl.maximum(top, tl.max(logits, 1))
            finite = tl.where(new_top == float("-inf"), 0.0, new_top)
            total = total * tl.exp2(top - finite) + tl.sum(tl.exp2(logits - finite[:, None]), 1)
            top = new_top
        place = (split.to(tl.int64) * total_rows + first + row) * (kv_heads * GROUP) + head
        tl.store(part_max + place, top, mask=exists)
        tl.store(part_sum + place, total, mask=exists)


@triton.jit
def _tile_probabilities(
    q,
    keys,
    table_row,
    position,
    kv_head,
    row,
    head,
    exists,
    rows,
    length,
    first,
    row_max,
    row_inverse,
    scale,
    k_stride_slot,
    k_stride_head,
    heads,
    CAUSAL: tl.constexpr,
    DIM: tl.constexpr,
    DIM_P: tl.constexpr,
):
    """[lines, BLOCK] softmax over the whole prompt; 0 where there is no key, row or head."""
    logits = _tile_logits(
        q, keys, table_row, position, kv_head, row, rows, length, scale, k_stride_slot, k_stride_head,
        CAUSAL, DIM, DIM_P,
    )  # fmt: skip
    place = (first + row).to(tl.int64) * heads + head
    top = tl.load(row_max + place, mask=exists, other=0.0)
    inverse = tl.load(row_inverse + place, mask=exists, other=0.0)
    return tl.exp2(logits - top[:, None]) * inverse[:, None]


@triton.jit(do_not_specialize=["lengths", "table_stride", "out_stride"])
def _pooled_max(
    query,
    keys,
    table,
    first_row,
    lengths,
    row_max,
    row_inverse,
    out,
    scale,
    q_stride_row,
    q_stride_head,
    k_stride_slot,
    k_stride_head,
    table_stride,
    out_stride,
    kv_heads,
    POOL: tl.constexpr,
    POOL_BITS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_P: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_P: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (request, block of keys, block of rows): the block's tokens in ``out`` [total_rows, max_keys]."""
    request = tl.program_id(0)
    first = tl.load(first_row + request)
    rows = tl.load(first_row + request + 1) - first
    length = tl.load(lengths + request)
    width: tl.constexpr = BLOCK - POOL + 1
    begin = tl.program_id(1) * width
    if (begin < length) & (tl.program_id(2) * ROWS < rows):
        row, head_in_group, exists = _tile_lines(tl.program_id(2), rows, GROUP, GROUP_P, ROWS)
        column = tl.arange(0, BLOCK)
        position = begin - POOL // 2 + column
        table_row = table + request.to(tl.int64) * table_stride
        best = tl.zeros([ROWS, BLOCK], tl.float32)
        for kv_head in range(kv_heads):
            head = kv_head * GROUP + head_in_group
            q = _tile_query(query, first + row, head, exists, q_stride_row, q_stride_head, DIM, DIM_P)
            power = _tile_probabilities(
                q, keys, table_row, position, kv_head, row, head, exists, rows, length, first, row_max, row_inverse,
                scale, k_stride_slot, k_stride_head, kv_heads * GROUP, False, DIM, DIM_P,
            )  # fmt: skip
            total = tl.zeros([ROWS * GROUP_P, BLOCK], tl.float32)
            # Sums of 1, 2, 4, … neighbours to the right; the columns past ``width`` are not used.
            for bit in tl.static_range(POOL_BITS):
                if (POOL >> bit) & 1:
                    total += _shifted(power, column, POOL & ((1 << bit) - 1), ROWS * GROUP_P, BLOCK)
                power += _shifted(power, column, 1 << bit, ROWS * GROUP_P, BLOCK)
            best = tl.maximum(best, tl.max(tl.reshape(total, [ROWS, GROUP_P, BLOCK]), 1))
        r = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
        token = begin + column
        mask = (r < rows)[:, None] & ((column < width) & (token < length))[None, :]
        place = (first + r).to(tl.int64)[:, None] * out_stride + token[None, :]
        earlier = tl.load(out + place, mask=mask, other=0.0)
        tl.store(out + place, tl.maximum(earlier, best / POOL), mask=mask)


@triton.jit
def _shifted(x, column, by, LINES: tl.constexpr, BLOCK: tl.constexpr):
    """``x`` [LINES, BLOCK] moved ``by`` columns to the left; the last column is repeated."""
    index = tl.minimum(column + by, BLOCK - 1)
    return tl.gather(x, tl.broadcast_to(index[None, :], [LINES, BLOCK]), 1)


@triton.jit(do_not_specialize=["lengths", "table_stride", "out_stride_request", "out_stride_head"])
def _row_mean(
    query,
    keys,
    table,
    first_row,
    lengths,
    row_max,
    row_inverse,
    out,
    scale,
    q_stride_row,
    q_stride_head,
    k_stride_slot,
    k_stride_head,
    table_stride,
    out_stride_request,
    out_stride_head,
    kv_heads,
    CAUSAL: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_P: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_P: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (request and KV head, block of keys): the block's tokens in ``out`` [batch, heads, max_keys]."""
    request = tl.program_id(0) // kv_heads
    kv_head = tl.program_id(0) % kv_heads
    first = tl.load(first_row + request)
    rows = tl.load(first_row + request + 1) - first
    length = tl.load(lengths + request)
    begin = tl.program_id(1) * BLOCK
    if begin < length:
        position = begin + tl.arange(0, BLOCK)
        table_row = table + request.to(tl.int64) * table_stride
        total = tl.zeros([GROUP_P, BLOCK], tl.float32)
        for row_block in range(tl.cdiv(rows, ROWS)):
            row, head, exists = _tile_lines(row_block, rows, GROUP, GROUP_P, ROWS)
            head += kv_head * GROUP
            q = _tile_query(query, first + row, head, exists, q_stride_row, q_stride_head, DIM, DIM_P)
            p = _tile_probabilities(
                q, keys, table_row, position, kv_head, row, head, exists, rows, length, first, row_max, row_inverse,
                scale, k_stride_slot, k_stride_head, kv_heads * GROUP, CAUSAL, DIM, DIM_P,
            )  # fmt: skip
            total += tl.sum(tl.reshape(p, [ROWS, GROUP_P, BLOCK]), 0)
        g = tl.arange(0, GROUP_P)
        place = (
            request.to(tl.int64) * out_stride_request
            + (kv_head * GROUP + g).to(tl.int64)[:, None] * out_stride_head
            + position[None, :]
        )
        tl.store(out + place, total / rows, mask=(g < GROUP)[:, None] & (position < length)[None, :])


def tile_constants(heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> dict[str, int]:
    """Tile sizes, powers of two: from 16 lines, a tensor core's least, to ``TILE_LINES`` or the size of a group.

    The same for any number of rows, so that a model's kernels are compiled once; they fit in the shared memory of
    every GPU in ``triton_aot.SHARED_MEMORY``.
    """
    group = heads // kv_heads
    group_p = triton.next_power_of_2(group)
    rows = min(TILE_ROWS, TILE_LINES // group_p)
    return {
        "GROUP": group,
        "GROUP_P": group_p,
        "ROWS": max(rows, 16 // group_p, 1),
        "DIM": head_dim,
        "DIM_P": max(triton.next_power_of_2(head_dim), 16),
        # float32 products run outside the tensor cores and keep more in registers; wide keys fill shared memory.
        "BLOCK": 64 if dtype == torch.float32 or head_dim > 128 else 128,
    }


def _statistics_of(
    query: torch.Tensor,
    keys: torch.Tensor,
    tables: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    max_length: int,
    row_blocks: int,
    causal: bool,
    scale: float,
    tile: dict[str, int],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Maximum and reciprocal sum [total_rows, heads] of every row over all its keys."""
    table, first_row, lengths = tables
    total_rows, heads, _ = query.shape
    kv_heads = keys.shape[1]
    splits = triton.cdiv(max_length, KEYS_PER_SPLIT)
    part_max = torch.full((splits, total_rows, heads), float("-inf"), device=query.device)
    part_sum = torch.zeros_like(part_max)
    _statistics[(len(lengths) * kv_heads, splits, row_blocks)](
        query, keys, table, first_row, lengths, part_max, part_sum, scale * LOG2_E,
        query.stride(0), query.stride(1), keys.stride(0), keys.stride(1), table.stride(0), total_rows, kv_heads,
        CAUSAL=causal, SPLIT=KEYS_PER_SPLIT, **tile, **_OPTIONS,
    )  # fmt: skip
    top = part_max.amax(0)
    return top, (part_sum * (part_max - top).exp2()).sum(0).reciprocal()


def pooled_max(
    query: torch.Tensor,
    keys: torch.Tensor,
    table: torch.Tensor,
    first_row: torch.Tensor,
    lengths: torch.Tensor,
    max_rows: int,
    max_length: int,
    scale: float,
    pool: int,
    out: torch.Tensor,
) -> None:
    """:func:`fathom.kernels.window_scores.pooled_max_scores` into ``out``; ``first_row`` is [batch + 1].

    Raises:
        ValueError: for a pooling width above ``MAX_POOL``.
    """
    if pool > MAX_POOL:
        raise ValueError(f"the pooling width must be at most {MAX_POOL}, got {pool}")
    kv_heads = keys.shape[1]
    tile = tile_constants(query.shape[1], kv_heads, query.shape[2], query.dtype)
    row_blocks = triton.cdiv(max_rows, tile["ROWS"])
    tables = (table, first_row, lengths)
    top, inverse = _statistics_of(query, keys, tables, max_length, row_blocks, False, scale, tile)
    _pooled_max[(len(lengths), triton.cdiv(max_length, tile["BLOCK"] - pool + 1), row_blocks)](
        query, keys, table, first_row, lengths, top, inverse, out, scale * LOG2_E,
        query.stride(0), query.stride(1), keys.stride(0), keys.stride(1), table.stride(0), out.stride(0), kv_heads,
        POOL=pool, POOL_BITS=pool.bit_length(), **tile, **_OPTIONS,
    )  # fmt: skip


def row_mean(
    query: torch.Tensor,
    keys: torch.Tensor,
    table: torch.Tensor,
    first_row: torch.Tensor,
    lengths: torch.Tensor,
    max_rows: int,
    max_length: int,
    causal: bool,
    scale: float,
    out: torch.Tensor,
) -> None:
    """:func:`fathom.kernels.window_scores.row_mean_scores` into ``out``; ``first_row`` is [batch + 1]."""
    kv_heads = keys.shape[1]
    tile = tile_constants(query.shape[1], kv_heads, query.shape[2], query.dtype)
    row_blocks = triton.cdiv(max_rows, tile["ROWS"])
    tables = (table, first_row, lengths)
    top, inverse = _statistics_of(query, keys, tables, max_length, row_blocks, causal, scale, tile)
    _row_mean[(len(lengths) * kv_heads, triton.cdiv(max_length, tile["BLOCK"]))](
        query, keys, table, first_row, lengths, top, inverse, out, scale * LOG2_E,
        query.stride(0), query.stride(1), keys.stride(0), keys.stride(1), table.stride(0),
        out.stride(0), out.stride(1), kv_heads, CAUSAL=causal, **tile, **_OPTIONS,
    )  # fmt: skip


def specializations() -> list[Specialization]:
    """What to compile ahead of time, for common shapes."""
    found = []
    for heads, kv_heads, dim, dtype, kv in (
        (32, 8, 128, torch.bfloat16, ""),
        (32, 4, 128, torch.bfloat16, ""),
        (16, 4, 256, torch.bfloat16, ""),
        (16, 2, 256, torch.bfloat16, ""),
        (4, 2, 64, torch.float32, ""),
        *((32, 8, 128, torch.bfloat16, kv) for kv in NARROW_KV),
    ):
        tile = tile_constants(heads, kv_heads, dim, dtype)
        for kernel, constants in (
            (_statistics, {"CAUSAL": True, "SPLIT": KEYS_PER_SPLIT} | tile),
            (_pooled_max, {"POOL": 13, "POOL_BITS": 4} | tile),
            (_row_mean, {"CAUSAL": True} | tile),
        ):
            name = (
                f"window {kernel.__name__.strip('_')} {heads}/{kv_heads}x{dim} {dtype}{kv and f', KV {kv}'}"
            )
            own = signature(kernel, _types("fp32" if dtype == torch.float32 else "bf16", kv), constants)
            found.append(Specialization(name, kernel, own, constants, _OPTIONS, least_for(kv)))
    return found


def _types(dtype: str, kv_dtype: str) -> dict[str, str]:
    kinds = {"query": f"*{dtype}", "keys": f"*{kv_dtype or dtype}", "table": "*i64", "scale": "fp32"}
    kinds |= dict.fromkeys(("first_row", "lengths"), "*i32")
    return kinds | dict.fromkeys(("part_max", "part_sum", "row_max", "row_inverse", "out"), "*fp32")
