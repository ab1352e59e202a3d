"""Decode attention on a GPU over a span's page table: one query per request, keys and values read where they lie.

Flash decoding: the keys of all requests are dealt to programs (``key_shares.py``), whose partial results a second
kernel merges. The query heads of a KV head are the rows of one tile, so keys and values are loaded once for all of
them.
``paged_decode_reference`` is the plain-PyTorch reference.
"""

import torch
import triton
import triton.language as tl

from fathom.kernels.key_shares import Dealt, own_piece
from fathom.kernels.triton_aot import NARROW_KV, ModelHeads, Specialization, least_for, signature

KEYS_PER_BLOCK = 64
MIN_ROWS = 16
"""Smallest tile that tensor cores multiply; a KV head's query heads are padded to it."""

LOG2_E = 1.4426950408889634
_WARPS = {"num_warps": 4, "num_stages": 2}


@triton.jit
def load_entries(
    buffer, slot, place, there, kv_head, stride_page, stride_slot, stride_head, d, DIM: tl.constexpr
):
    """[positions, d] of one KV head; 0 where there is no key and beyond DIM."""
    at = slot * stride_page + place * stride_slot + kv_head * stride_head
    return tl.load(buffer + at[:, None] + d[None, :], mask=there[:, None] & (d < DIM)[None, :], other=0.0)


@triton.jit
def online_softmax(q, k, v, visible, scale_log2, top, total, acc, LIMITED: tl.constexpr):
    """Adds the keys of one block to the running maximum, sum and output.

    By then every row must see a key, unless how far rows see is LIMITED.
    """
    scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee") * scale_log2
    scores = tl.where(visible, scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1))
    base = new_top
    if LIMITED:
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
    weights = tl.exp2(scores - base[:, None])
    rescale = tl.exp2(top - base)
    v = v.to(q.dtype)
    acc = tl.dot(weights.to(v.dtype), v, acc * rescale[:, None], input_precision="ieee")
    return new_top, total * rescale + tl.sum(weights, 1), acc


@triton.jit
def attend_entries(
    q, keys, values, table_row, first, end, kv_head, scale_log2,
    k_stride_page, k_stride_slot, k_stride_head, v_stride_page, v_stride_slot, v_stride_head,
    d, e, top, total, acc, oldest,
    DIM: tl.constexpr, VALUE_DIM: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr, LIMITED: tl.constexpr,
):  # fmt: skip
    """Adds the entries ``first .. end - 1`` of a table's row to the running maximum, sum and output; of rows whose
    sight is LIMITED those from ``oldest`` [rows] on.
    """
    for start in range(first, end, BLOCK):
        position = start + tl.arange(0, BLOCK)
        there = position < end
        page = tl.load(table_row + position // PAGE, mask=there, other=0).to(tl.int64)
        place = position % PAGE
        k = load_entries(
            keys, page, place, there, kv_head, k_stride_page, k_stride_slot, k_stride_head, d, DIM
        )
        v = load_entries(
            values, page, place, there, kv_head, v_stride_page, v_stride_slot, v_stride_head, e, VALUE_DIM
        )
        visible = there[None, :]
        if LIMITED:
            visible = visible & (position[None, :] >= oldest[:, None])
        top, total, acc = online_softmax(q, k, v, visible, scale_log2, top, total, acc, LIMITED)
    return top, total, acc


@triton.jit
def store_rows(output, lse, o_place, lse_place, exists, e, top, total, acc, VALUE_DIM: tl.constexpr):
    """Output and natural log-sum-exp of a tile's rows; 0 and -inf for a row that saw no key."""
    divisor = tl.where(total > 0, total, 1.0)
    ln_2: tl.constexpr = 0.6931471805599453
    tl.store(lse + lse_place, (top + tl.log2(divisor)) * ln_2, mask=exists)
    mask = exists[:, None] & (e < VALUE_DIM)[None, :]
    result = acc / divisor[:, None]
    tl.store(output + o_place[:, None] + e[None, :], result.to(output.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["batch", "pieces"])
def _decode_kernel(
    query, keys, values, table, rows, lengths, partial, partial_lse, where, scale_log2, batch, pieces,
    q_stride_request, q_stride_head, k_stride_page, k_stride_slot, k_stride_head,
    v_stride_page, v_stride_slot, v_stride_head, table_stride,
    GROUP: tl.constexpr, GROUP_P: tl.constexpr, DIM: tl.constexpr, DIM_P: tl.constexpr,
    VALUE_DIM: tl.constexpr, VALUE_DIM_P: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (KV head, piece): attention over the keys of the piece."""
    kv_head, heads = tl.program_id(0), tl.num_programs(0) * GROUP
    number, first, end = own_piece(lengths, batch, pieces, where, BLOCK, 1)
    if number < batch:
        request = number.to(tl.int64)
        line, d, e = tl.arange(0, GROUP_P), tl.arange(0, DIM_P), tl.arange(0, VALUE_DIM_P)
        head, exists = kv_head * GROUP + line, line < GROUP
        q_place = request * q_stride_request + head[:, None] * q_stride_head + d[None, :]
        q = tl.load(query + q_place, mask=exists[:, None] & (d < DIM)[None, :], other=0.0)
        table_row = table + tl.load(rows + request).to(tl.int64) * table_stride
        top = tl.full([GROUP_P], float("-inf"), tl.float32)
        total = tl.zeros([GROUP_P], tl.float32)
        acc = tl.zeros([GROUP_P, VALUE_DIM_P], tl.float32)
        top, total, acc = attend_entries(
            q, keys, values, table_row, first, end, kv_head, scale_log2,
            k_stride_page, k_stride_slot, k_stride_head, v_stride_page, v_stride_slot, v_stride_head,
            d, e, top, total, acc, line, DIM, VALUE_DIM, PAGE, BLOCK, False,
        )  # fmt: skip
        place = tl.program_id(1).to(tl.int64) * heads + head
        store_rows(partial, partial_lse, place * VALUE_DIM, place, exists, e, top, total, acc, VALUE_DIM)


def paged_decode(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    page_table: torch.Tensor,
    rows: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    pieces: int,
    output: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of one query per request over the KV entries that a page table names.

    Args:
        query: [batch, heads, head_dim], bfloat16, float16 or float32, last dimension contiguous.
        keys: [slots, kv_heads, head_dim], where the table names slots, or [pages, page_size, kv_heads, head_dim],
            where it names pages; values: the same with value_dim. Any strides but a contiguous last dimension: one
            layer's view of a pool that interleaves layers will do. Numbers of 8 bits are read as the query's type.
        page_table: [table_rows, width] int32, rows contiguous; what lies beyond a request's length is not read.
        rows: [batch] int32 or int64, each request's row of the table.
        lengths: [batch] int32, keys of each request, its own new token included; 0 gives output 0 and log-sum-exp
            -inf.
        scale: factor on the dot products.
        pieces: into which the keys of all requests are cut, for each KV head
            (:func:`fathom.kernels.key_shares.pick_pieces`).
        output: [batch, heads, value_dim] to write to, last dimension contiguous; by default new, float32.

    Returns:
        output, and the log-sum-exp of the scaled scores, [batch, heads] float32.
    """
    batch, heads, _ = query.shape
    keys, values = by_page(keys), by_page(values)
    kv_heads, value_dim = values.shape[2:]
    dealt = Dealt(query, value_dim, batch, pieces, output)
    _decode_kernel[(kv_heads, dealt.programs)](
        query, keys, values, page_table, rows, lengths, dealt.partial, dealt.lse, dealt.where, scale * LOG2_E,
        batch, pieces, *query.stride()[:2], *keys.stride()[:3], *values.stride()[:3], page_table.stride(0),
        **_constants(heads // kv_heads, query.shape[2], value_dim, keys.shape[1]), **_WARPS,
    )  # fmt: skip
    return dealt.merged()


def by_page(buffer: torch.Tensor) -> torch.Tensor:
    """[pages, page_size, kv_heads, dim] of a buffer; one of [slots, …] has pages of one slot."""
    return buffer if buffer.dim() == 4 else buffer.unsqueeze(1)


def widths(head_dim: int, value_dim: int) -> dict[str, int]:
    """Widths of keys and values as constants, padded to powers of two."""
    return {
        "DIM": head_dim,
        "DIM_P": max(triton.next_power_of_2(head_dim), 16),
        "VALUE_DIM": value_dim,
        "VALUE_DIM_P": max(triton.next_power_of_2(value_dim), 16),
    }


def _constants(group: int, head_dim: int, value_dim: int, page_size: int) -> dict[str, int]:
    padded = max(triton.next_power_of_2(group), MIN_ROWS)
    own = {"GROUP": group, "GROUP_P": padded, "PAGE": page_size, "BLOCK": KEYS_PER_BLOCK}
    return own | widths(head_dim, value_dim)


def paged_decode_reference(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    page_table: torch.Tensor,
    rows: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Reference for :func:`paged_decode` in float32, request by request; same shapes."""
    batch, heads, _ = query.shape
    output = torch.zeros(batch, heads, values.shape[-1])
    lse = torch.full((batch, heads), float("-inf"))
    for i, (row, length) in enumerate(zip(rows.tolist(), lengths.tolist(), strict=True)):
        if length:
            k, v = (
                gather_entries(keys, page_table[row], length),
                gather_entries(values, page_table[row], length),
            )
            group = heads // k.shape[1]
            scores = torch.einsum("hd,nhd->hn", query[i].float(), k.repeat_interleave(group, 1)) * scale
            lse[i] = scores.logsumexp(-1)
            output[i] = torch.einsum("hn,nhd->hd", scores.softmax(-1), v.repeat_interleave(group, 1))
    return output, lse


def gather_entries(buffer: torch.Tensor, table_row: torch.Tensor, length: int) -> torch.Tensor:
    """[length, kv_heads, dim] float32: the entries that a table row names, in order."""
    position = torch.arange(length)
    pages = by_page(buffer)
    return pages[table_row[position // pages.shape[1]].long(), position % pages.shape[1]].float()


def pool_types(dtype: str, kv_dtype: str) -> dict[str, str]:
    """Types of the arguments that attention over a page table shares with other kernels of its kind."""
    tensors = {"query": f"*{dtype}"} | dict.fromkeys(("keys", "values"), f"*{kv_dtype}")
    return tensors | {
        "table": "*i32",
        "rows": "*i32",
        "output": f"*{dtype}",
        "lse": "*fp32",
        "scale_log2": "fp32",
    }


def specializations() -> list[Specialization]:
    """What to compile ahead of time."""
    found = []
    for shape in ModelHeads.common():
        common = shape.head_dim == 128
        for page, kv in ((1, ""), (16, ""), *((1, each) for each in NARROW_KV)) if common else ((1, ""),):
            constants = _constants(shape.heads // shape.kv_heads, shape.head_dim, shape.head_dim, page)
            types = pool_types(shape.dtype, kv or shape.dtype) | {"lengths": "*i32", "where": "*i32"}
            types |= dict.fromkeys(("partial", "partial_lse"), "*fp32")
            label = f"paged_decode {shape.name}, page {page}{kv and f', KV {kv}'}"
            own = signature(_decode_kernel, types, constants)
            found.append(Specialization(label, _decode_kernel, own, constants, _WARPS, least_for(kv)))
    return found
