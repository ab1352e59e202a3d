"""Extend attention on a GPU over a span's page table: the new tokens of several requests, packed one after another.

Each new token attends to its request's whole prefix, read in place through the page table, and causally to the new
tokens before it and itself, read from the packed tensors. The rows of a tile are (token, query head of one KV
head), so keys and values are loaded once for all of them; the prefix of a few new tokens (verifying a draft) is
shared by several programs. ``paged_extend_reference`` is the plain-PyTorch reference.
"""

import torch
import triton
import triton.language as tl

from fathom.kernels.key_shares import Split
from fathom.kernels.paged_decode import (
    LOG2_E,
    MIN_ROWS,
    attend_entries,
    by_page,
    gather_entries,
    load_entries,
    online_softmax,
    pool_types,
    store_rows,
    widths,
)
from fathom.kernels.triton_aot import NARROW_KV, ModelHeads, Specialization, least_for, signature


@triton.jit(do_not_specialize=["splits"])
def _extend_kernel(
    query,
    new_keys,
    new_values,
    keys,
    values,
    table,
    rows,
    prefixes,
    cu_seqlens,
    reach,
    output,
    lse,
    scale_log2,
    q_stride_token,
    q_stride_head,
    nk_stride_token,
    nk_stride_head,
    nv_stride_token,
    nv_stride_head,
    k_stride_page,
    k_stride_slot,
    k_stride_head,
    v_stride_page,
    v_stride_slot,
    v_stride_head,
    o_stride_token,
    o_stride_head,
    o_stride_split,
    table_stride,
    kv_heads,
    splits,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_P: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_DIM_P: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    LIMITED: tl.constexpr,
):
    """Program (tile, request and split, KV head): prefix keys of the split; the last split has the new keys too."""
    request, split = tl.program_id(1) // splits, tl.program_id(1) % splits
    kv_head = tl.program_id(2)
    first = tl.load(cu_seqlens + request).to(tl.int64)
    new = (tl.load(cu_seqlens + request + 1) - first).to(tl.int32)
    first_row = tl.program_id(0) * ROWS
    if first_row < new * GROUP:
        prefix = tl.load(prefixes + request)
        row = first_row + tl.arange(0, ROWS)
        d, e = tl.arange(0, DIM_P), tl.arange(0, VALUE_DIM_P)
        token, head = row // GROUP, kv_head * GROUP + row % GROUP
        exists = token < new
        q_place = (first + token) * q_stride_token + head * q_stride_head
        q = tl.load(
            query + q_place[:, None] + d[None, :], mask=exists[:, None] & (d < DIM)[None, :], other=0.0
        )
        top = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, VALUE_DIM_P], tl.float32)

        table_row = table + tl.load(rows + request).to(tl.int64) * table_stride
        # Entries are counted from the request's first, its new tokens' behind the prefix. Of what a row sees the
        # first never lies before what the rows before it see.
        oldest, begin, skipped = token, 0, 0
        if LIMITED:
            oldest = prefix + token - tl.load(reach + first + token, mask=exists, other=0)
            begin = tl.maximum(prefix + first_row // GROUP - tl.load(reach + first + first_row // GROUP), 0)
            skipped = tl.minimum(begin, prefix)
        width = tl.cdiv(tl.cdiv(prefix - skipped, splits), BLOCK) * BLOCK
        end = tl.minimum(skipped + (split + 1) * width, prefix)
        top, total, acc = attend_entries(
            q, keys, values, table_row, skipped + split * width, end, kv_head, scale_log2,
            k_stride_page, k_stride_slot, k_stride_head, v_stride_page, v_stride_slot, v_stride_head,
            d, e, top, total, acc, oldest, DIM, VALUE_DIM, PAGE, BLOCK, LIMITED,
        )  # fmt: skip

        last_token = tl.minimum((first_row + ROWS - 1) // GROUP, new - 1)
        own_end = tl.where(split == splits - 1, last_token + 1, 0)
        for start in range((begin - skipped) // BLOCK * BLOCK, own_end, BLOCK):
            other = start + tl.arange(0, BLOCK)
            there = other < own_end
            at = first + other
            k = load_entries(new_keys, at, 0, there, kv_head, nk_stride_token, 0, nk_stride_head, d, DIM)
            v = load_entries(
                new_values, at, 0, there, kv_head, nv_stride_token, 0, nv_stride_head, e, VALUE_DIM
            )
            visible = there[None, :] & (other[None, :] <= token[:, None])
            if LIMITED:
                visible = visible & (prefix + other[None, :] >= oldest[:, None])
            top, total, acc = online_softmax(q, k, v, visible, scale_log2, top, total, acc, LIMITED)

        o_place = (first + token) * o_stride_token + head * o_stride_head + split * o_stride_split
        lse_place = ((first + token) * kv_heads * GROUP + head) * splits + split
        store_rows(output, lse, o_place, lse_place, exists, e, top, total, acc, VALUE_DIM)


def paged_extend(
    query: torch.Tensor,
    new_keys: torch.Tensor,
    new_values: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    page_table: torch.Tensor,
    rows: torch.Tensor,
    prefixes: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_new: int,
    scale: float,
    splits: int = 1,
    output: torch.Tensor | None = None,
    usual_new: int | None = None,
    reach: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of packed new tokens over their requests' prefixes and, causally, over themselves.

    Args:
        query: [tokens, heads, head_dim], bfloat16, float16 or float32.
        new_keys: [tokens, kv_heads, head_dim] and new_values: [tokens, kv_heads, value_dim] of the same tokens, in
            the pool's type.
        keys, values, page_table, rows: the pool's buffers and the table that names the prefixes' entries, as in
            :func:`fathom.kernels.paged_decode.paged_decode`. The new tokens' own entries are not read from there.
        prefixes: [requests] int32, entries before the new tokens; 0 is legal.
        cu_seqlens: [requests + 1] int32, where each request's new tokens begin, and their total.
        max_new: most new tokens of a request.
        scale: factor on the dot products.
        splits: programs that share a prefix (:func:`pick_splits`).
        output: [tokens, heads, value_dim] to write to, last dimension contiguous; by default new, float32.
        usual_new: new tokens that one program's tile is made for, where a request mostly has less than ``max_new``.
        reach: [tokens] int32, how many tokens before it each token sees; None for all. A token's place less its
            reach never decreases within a request.

    Every tensor's last dimension is contiguous.

    Returns:
        output, and the log-sum-exp of the scaled scores, [tokens, heads] float32.
    """
    _, heads, head_dim = query.shape
    keys, values = by_page(keys), by_page(values)
    kv_heads, value_dim = values.shape[2:]
    group = heads // kv_heads
    result = Split(query, value_dim, splits, output)
    lines = (max_new if usual_new is None else usual_new) * group
    constants, options = _tile(group, head_dim, value_dim, keys.shape[1], lines, query.element_size())
    tiles = triton.cdiv(max_new * group, constants["ROWS"])
    _extend_kernel[(tiles, len(prefixes) * splits, kv_heads)](
        query, new_keys, new_values, keys, values, page_table, rows, prefixes, cu_seqlens,
        prefixes if reach is None else reach, result.first, result.first_lse, scale * LOG2_E,
        *query.stride()[:2], *new_keys.stride()[:2], *new_values.stride()[:2],
        *keys.stride()[:3], *values.stride()[:3], *result.strides, page_table.stride(0), kv_heads, splits,
        LIMITED=reach is not None, **constants, **options,
    )  # fmt: skip
    return result.merged()


MIN_KEYS_PER_SPLIT = 256
MAX_SPLITS = 64


def pick_splits(programs: int, max_length: int, processors: int) -> int:
    """Splits for launches of ``programs`` tiles: about two programs per processor, none with very few keys."""
    wanted = triton.cdiv(2 * processors, max(programs, 1))
    return max(1, min(wanted, triton.cdiv(max_length, MIN_KEYS_PER_SPLIT), MAX_SPLITS))


TILES = (16, 32, 64, 128)
"""Lines (tokens times the query heads of a KV head) of a program, by how many a request has."""


def tiles_of(max_new: int, group: int, head_dim: int, value_dim: int, itemsize: int) -> int:
    """Programs of one split for each request and KV head; ``itemsize`` is the query's, in bytes."""
    constants, _ = _tile(group, head_dim, value_dim, 1, max_new * group, itemsize)
    return triton.cdiv(max_new * group, constants["ROWS"])


def _tile(
    group: int, head_dim: int, value_dim: int, page_size: int, lines: int, itemsize: int
) -> tuple[dict[str, int], dict[str, int]]:
    """Constants and options for requests of at most ``lines`` (token, head) rows per KV head.

    In 16 bits, tiles that spill no register on any GPU in ``triton_aot.SHARED_MEMORY`` and fit in its shared
    memory. float32 multiplies without tensor cores: a smaller tile over as many warps, which spills where heads are
    wider than 64.
    """
    half, wide = itemsize == 2, max(head_dim, value_dim) > 128
    most = (TILES[-1] if half else 32) // (2 if wide else 1)
    rows = max(min(triton.next_power_of_2(lines), most), MIN_ROWS)
    small = half and rows <= 32
    constants = {"GROUP": group, "ROWS": rows, "PAGE": page_size, "BLOCK": 64 if small and not wide else 32}
    options = {"num_warps": 4 if small else 8, "num_stages": 3 if rows == 128 else 2}
    return constants | widths(head_dim, value_dim), options


def paged_extend_reference(
    query: torch.Tensor,
    new_keys: torch.Tensor,
    new_values: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    page_table: torch.Tensor,
    rows: torch.Tensor,
    prefixes: torch.Tensor,
    cu_seqlens: torch.Tensor,
    scale: float,
    reach: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Reference for :func:`paged_extend` in float32 with an explicit mask, request by request; same shapes."""
    tokens, heads, _ = query.shape
    output, lse = torch.zeros(tokens, heads, values.shape[-1]), torch.zeros(tokens, heads)
    bounds = cu_seqlens.tolist()
    for i, (row, prefix) in enumerate(zip(rows.tolist(), prefixes.tolist(), strict=True)):
        own = slice(bounds[i], bounds[i + 1])
        new = bounds[i + 1] - bounds[i]
        k = torch.cat([gather_entries(keys, page_table[row], prefix), new_keys[own].float()])
        v = torch.cat([gather_entries(values, page_table[row], prefix), new_values[own].float()])
        group = heads // k.shape[1]
        scores = torch.einsum("thd,nhd->htn", query[own].float(), k.repeat_interleave(group, 1)) * scale
        entry, place = torch.arange(prefix + new), prefix + torch.arange(new).unsqueeze(1)
        hidden = entry > place
        if reach is not None:
            hidden |= entry < place - reach[own].unsqueeze(1)
        scores = scores.masked_fill(hidden, float("-inf"))
        output[own] = torch.einsum("htn,nhd->thd", scores.softmax(-1), v.repeat_interleave(group, 1))
        lse[own] = scores.logsumexp(-1).T
    return output, lse


def specializations() -> list[Specialization]:
    """What to compile ahead of time: every tile, one over pages of several slots, 8-bit keys and values, and rows
    that see some of the tokens before them.
    """
    found = []
    for shape in ModelHeads.common():
        group, itemsize = shape.heads // shape.kv_heads, 4 if shape.dtype == "fp32" else 2
        variants = [*((lines, 1, "", False) for lines in TILES), (32, 16, "", False)]
        if shape.head_dim >= 128:
            variants += [(lines, 1, "", True) for lines in TILES]
        if shape.head_dim == 128:
            variants += [(lines, 1, kv, False) for kv in NARROW_KV for lines in TILES]
        for lines, page, kv, limited in variants:
            constants, options = _tile(group, shape.head_dim, shape.head_dim, page, lines, itemsize)
            if constants["ROWS"] < lines:
                continue
            constants["LIMITED"] = limited
            types = pool_types(shape.dtype, kv or shape.dtype)
            types |= dict.fromkeys(("prefixes", "cu_seqlens", "reach"), "*i32")
            types |= dict.fromkeys(("new_keys", "new_values"), f"*{kv or shape.dtype}")
            label = f"paged_extend {shape.name}, {lines} lines, page {page}{kv and f', KV {kv}'}"
            label += ", windows" if limited else ""
            types_of = signature(_extend_kernel, types, constants)
            found.append(Specialization(label, _extend_kernel, types_of, constants, options, least_for(kv)))
    return found
