"""Decode attention on a GPU over a span's page table: one query per request, keys and values read where they lie.

Flash decoding: each request's keys are dealt to programs (splits), whose partial results a second kernel merges.
All programs take about as many keys, so a long request among short ones is cut into more pieces. The query heads of
a KV head are the rows of one tile, so keys and values are loaded once for all of them. Grid and scratch depend on
shapes alone and lengths are read on the device: a launch can be captured in a CUDA graph and replayed with other
lengths.
``paged_decode_reference`` is the plain-PyTorch reference.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from fathom.kernels.triton_aot import ModelHeads, Specialization, signature

KEYS_PER_BLOCK = 64
PIECES_PER_PROCESSOR = 4
"""Programs with keys to read for each multiprocessor. Of 2, 4 and 6 the best on an H100."""
GRID = 4096
"""Programs of a launch at most, where that leaves each request `FEWEST_SPLITS`: those without keys cost time."""
FEWEST_SPLITS = 8
MIN_KEYS_PER_SPLIT = 256
MAX_SPLITS = 64
SPLITS_PER_BLOCK = 16
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
def online_softmax(q, k, v, visible, scale_log2, top, total, acc):
    """Adds the keys of one block to the running maximum, sum and output. By then every row must see a key."""
    scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee") * scale_log2
    scores = tl.where(visible, scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1))
    weights = tl.exp2(scores - new_top[:, None])
    rescale = tl.exp2(top - new_top)
    acc = tl.dot(weights.to(v.dtype), v, acc * rescale[:, None], input_precision="ieee")
    return new_top, total * rescale + tl.sum(weights, 1), acc


@triton.jit
def attend_entries(
    q, keys, values, table_row, first, end, kv_head, scale_log2,
    k_stride_page, k_stride_slot, k_stride_head, v_stride_page, v_stride_slot, v_stride_head,
    d, e, top, total, acc,
    DIM: tl.constexpr, VALUE_DIM: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Adds the entries ``first .. end - 1`` of a table's row to the running maximum, sum and output."""
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
        top, total, acc = online_softmax(q, k, v, there[None, :], scale_log2, top, total, acc)
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


@triton.jit
def piece_width(lengths, length, batch, pieces, splits, BLOCK: tl.constexpr):
    """Keys of a program where those of all requests are cut into ``pieces``, and of one into ``splits`` at most."""
    total = tl.zeros((), tl.int64)
    for start in range(0, batch, 128):
        i = start + tl.arange(0, 128)
        total += tl.sum(tl.load(lengths + i, mask=i < batch, other=0).to(tl.int64), 0)
    wanted = tl.minimum(tl.cdiv(total, pieces), length).to(tl.int32)
    return tl.cdiv(tl.maximum(wanted, tl.cdiv(length, splits)), BLOCK) * BLOCK


@triton.jit(do_not_specialize=["pieces"])
def _decode_kernel(
    query,
    keys,
    values,
    table,
    rows,
    lengths,
    output,
    lse,
    scale_log2,
    q_stride_request,
    q_stride_head,
    k_stride_page,
    k_stride_slot,
    k_stride_head,
    v_stride_page,
    v_stride_slot,
    v_stride_head,
    o_stride_request,
    o_stride_head,
    o_stride_split,
    table_stride,
    pieces,
    GROUP: tl.constexpr,
    GROUP_P: tl.constexpr,
    DIM: tl.constexpr,
    DIM_P: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_DIM_P: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (request, KV head, split): attention over the split's keys; ``lse`` is [batch, heads, splits]."""
    request, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    split, splits = tl.program_id(2), tl.num_programs(2)
    length = tl.load(lengths + request)
    width = piece_width(lengths, length, tl.num_programs(0), pieces, splits, BLOCK)
    first = split * width
    end = tl.minimum(first + width, length)
    line, d, e = tl.arange(0, GROUP_P), tl.arange(0, DIM_P), tl.arange(0, VALUE_DIM_P)
    head, exists = kv_head * GROUP + line, line < GROUP
    lse_place = (request * tl.num_programs(1) * GROUP + head) * splits + split
    if (first < end) | (splits == 1):
        q_place = request * q_stride_request + head[:, None] * q_stride_head + d[None, :]
        q = tl.load(query + q_place, mask=exists[:, None] & (d < DIM)[None, :], other=0.0)
        table_row = table + tl.load(rows + request).to(tl.int64) * table_stride
        top = tl.full([GROUP_P], float("-inf"), tl.float32)
        total = tl.zeros([GROUP_P], tl.float32)
        acc = tl.zeros([GROUP_P, VALUE_DIM_P], tl.float32)
        top, total, acc = attend_entries(
            q, keys, values, table_row, first, end, kv_head, scale_log2,
            k_stride_page, k_stride_slot, k_stride_head, v_stride_page, v_stride_slot, v_stride_head,
            d, e, top, total, acc, DIM, VALUE_DIM, PAGE, BLOCK,
        )  # fmt: skip
        o_place = request * o_stride_request + head * o_stride_head + split * o_stride_split
        store_rows(output, lse, o_place, lse_place, exists, e, top, total, acc, VALUE_DIM)
    else:
        # What nobody computed nobody reads: the merge looks at the sums first.
        tl.store(lse + lse_place, tl.full([GROUP_P], float("-inf"), tl.float32), mask=exists)


@triton.jit(do_not_specialize=["splits"])
def _merge_kernel(
    partial,
    partial_lse,
    output,
    lse,
    o_stride_row,
    o_stride_head,
    splits,
    VALUE_DIM: tl.constexpr,
    VALUE_DIM_P: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (row, head): merges partial [rows, heads, splits, value_dim] by partial_lse [rows, heads, splits]."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = row * tl.num_programs(1) + head
    e = tl.arange(0, VALUE_DIM_P)
    tops = tl.full([BLOCK], float("-inf"), tl.float32)
    for start in range(0, splits, BLOCK):
        split = start + tl.arange(0, BLOCK)
        part_lse = tl.load(partial_lse + at * splits + split, mask=split < splits, other=float("-inf"))
        tops = tl.maximum(tops, part_lse)
    top = tl.max(tops, 0)
    finite = tl.where(top == float("-inf"), 0.0, top)
    totals = tl.zeros([BLOCK], tl.float32)
    merged = tl.zeros([VALUE_DIM_P], tl.float32)
    for start in range(0, splits, BLOCK):
        split = start + tl.arange(0, BLOCK)
        part_lse = tl.load(partial_lse + at * splits + split, mask=split < splits, other=float("-inf"))
        weights = tl.exp(part_lse - finite)
        # What saw no key may not have been written.
        mask = (part_lse > float("-inf"))[:, None] & (e < VALUE_DIM)[None, :]
        place = (at * splits + split)[:, None] * VALUE_DIM + e[None, :]
        part = tl.load(partial + place, mask=mask, other=0.0)
        totals += weights
        merged += tl.sum(part * weights[:, None], 0)
    total = tl.sum(totals, 0)
    divisor = tl.where(total > 0, total, 1.0)
    place = row * o_stride_row + head * o_stride_head + e
    tl.store(output + place, (merged / divisor).to(output.dtype.element_ty), mask=e < VALUE_DIM)
    tl.store(lse + at, top + tl.log(divisor))


def pick_splits(programs: int, max_length: int, processors: int) -> int:
    """Splits for launches of ``programs`` tiles: about two programs per processor, none with very few keys."""
    wanted = triton.cdiv(2 * processors, max(programs, 1))
    return max(1, min(wanted, triton.cdiv(max_length, MIN_KEYS_PER_SPLIT), MAX_SPLITS))


def pick_pieces(
    batch: int, kv_heads: int, max_length: int, processors: int, each: int | None = None
) -> tuple[int, int]:
    """How a decode launch is cut, from shapes alone.

    Args:
        each: programs with keys to read for each processor, ``PIECES_PER_PROCESSOR`` by default. One request alone
            never has more: they would wait until others have ended.

    Returns:
        Programs of a request and KV head at most, and the pieces that the keys of all requests are cut into.
    """
    splits = min(max(GRID // max(batch * kv_heads, 1), FEWEST_SPLITS), MAX_SPLITS)
    return (
        max(min(splits, triton.cdiv(max_length, KEYS_PER_BLOCK)), 1),
        max((each or PIECES_PER_PROCESSOR) * processors // kv_heads, 1),
    )


def paged_decode(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    page_table: torch.Tensor,
    rows: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    splits: int,
    output: torch.Tensor | None = None,
    pieces: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of one query per request over the KV entries that a page table names.

    Args:
        query: [batch, heads, head_dim], bfloat16, float16 or float32, last dimension contiguous.
        keys: [slots, kv_heads, head_dim], where the table names slots, or [pages, page_size, kv_heads, head_dim],
            where it names pages; values: the same with value_dim. Any strides but a contiguous last dimension: one
            layer's view of a pool that interleaves layers will do.
        page_table: [table_rows, width] int32, rows contiguous; what lies beyond a request's length is not read.
        rows: [batch] int32 or int64, each request's row of the table.
        lengths: [batch] int32, keys of each request, its own new token included; 0 gives output 0 and log-sum-exp
            -inf.
        scale: factor on the dot products.
        splits: programs per request and KV head at most (:func:`pick_pieces`).
        output: [batch, heads, value_dim] to write to, last dimension contiguous; by default new, float32.
        pieces: for each KV head, into which the keys of all requests are cut, each as its length is; by default
            ``splits`` for each request on average.

    Returns:
        output, and the log-sum-exp of the scaled scores, [batch, heads] float32.
    """
    batch, heads, _ = query.shape
    keys, values = by_page(keys), by_page(values)
    kv_heads, value_dim = values.shape[2:]
    result = Result(query, value_dim, splits, output)
    _decode_kernel[(batch, kv_heads, splits)](
        query, keys, values, page_table, rows, lengths, result.first, result.first_lse, scale * LOG2_E,
        query.stride(0), query.stride(1), *keys.stride()[:3], *values.stride()[:3], *result.strides,
        page_table.stride(0), pieces or batch * splits,
        **_constants(heads // kv_heads, query.shape[2], value_dim, keys.shape[1]), **_WARPS,
    )  # fmt: skip
    return result.merged()


def by_page(buffer: torch.Tensor) -> torch.Tensor:
    """[pages, page_size, kv_heads, dim] of a buffer; one of [slots, …] has pages of one slot."""
    return buffer if buffer.dim() == 4 else buffer.unsqueeze(1)


class Result:
    """Where a kernel with splits writes: straight to the output if there is one split, else to scratch.

    Attributes:
        first, first_lse: what the kernel writes: output, and natural log-sum-exp [rows, heads, splits].
        strides: of ``first``, for row, head and split.
    """

    def __init__(self, query: torch.Tensor, value_dim: int, splits: int, output: torch.Tensor | None) -> None:
        rows, heads, _ = query.shape
        scratch = {"dtype": torch.float32, "device": query.device}
        self.output = torch.empty(rows, heads, value_dim, **scratch) if output is None else output
        self.first_lse = torch.empty(rows, heads, splits, **scratch)
        self.splits = splits
        if splits == 1:
            self.first = self.output
            self.strides = (*self.output.stride()[:2], 0)
        else:
            self.first = torch.empty(rows, heads, splits, value_dim, **scratch)
            self.strides = self.first.stride()[:3]

    def merged(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Output and log-sum-exp [rows, heads] over all splits."""
        if self.splits == 1:
            return self.output, self.first_lse.squeeze(2)
        rows, heads, value_dim = self.output.shape
        lse = torch.empty(rows, heads, device=self.output.device)
        _merge_kernel[(rows, heads)](
            self.first, self.first_lse, self.output, lse, *self.output.stride()[:2], self.splits,
            **_merge_constants(value_dim),
        )  # fmt: skip
        return self.output, lse


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


def _merge_constants(value_dim: int) -> dict[str, int]:
    padded = widths(value_dim, value_dim)["VALUE_DIM_P"]
    return {"VALUE_DIM": value_dim, "VALUE_DIM_P": padded, "BLOCK": SPLITS_PER_BLOCK}


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


def pool_types(dtype: str) -> dict[str, str]:
    """Types of the arguments that attention over a page table shares with other kernels of its kind."""
    tensors = dict.fromkeys(("query", "keys", "values"), f"*{dtype}")
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

    def add(
        label: str, kernel: Any, types: dict[str, str], constants: dict[str, int], **options: int
    ) -> None:
        found.append(Specialization(label, kernel, signature(kernel, types, constants), constants, options))

    for shape in ModelHeads.common():
        for page in (1, 16) if shape.head_dim == 128 else (1,):
            constants = _constants(shape.heads // shape.kv_heads, shape.head_dim, shape.head_dim, page)
            types = pool_types(shape.dtype) | {"lengths": "*i32", "output": "*fp32"}
            add(f"paged_decode {shape.name}, page {page}", _decode_kernel, types, constants, **_WARPS)
    types = dict.fromkeys(("partial", "partial_lse", "lse"), "*fp32") | {"output": "*bf16"}
    for dim in (128, 256):
        add(f"paged_decode merge, values of {dim}", _merge_kernel, types, _merge_constants(dim))
    return found
