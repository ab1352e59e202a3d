"""Two-segment decode attention that keeps its evidence, in Triton: every warp has keys and a softmax of its own.

One query per request, few query heads per KV head, bfloat16. The kernel of ``two_segment_attention.py`` does the
rest; there the warps of a program share a block of keys, so each block has two reductions across warps, the norms
cost as many instructions as the attention, and the logits go through shared memory before they are stored. Reads
of long tables then wait for arithmetic. Here:

- Products are batched, one of 16 keys per warp. Keys are their rows and the query heads, padded to 8, their
  columns: half of the padding, and no barrier but that of the copies. The softmaxes are merged once, at the end.
- Sums of weights are kept per key until then.
- Norms are products too: a number's square is the sum of two bfloat16 numbers, exactly, and a matrix of ones adds
  up what registers hold anyway. They come as columns like the logits': one of those to spare is stored, or, of a
  group of 8, which has none, the first.
- Logits and norms are stored from where the products leave them.
- Slots are loaded one block ahead of their keys.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from fathom.kernels.dispatch import INTERPRETED
from fathom.kernels.key_shares import Dealt, own_piece, pick_pieces
from fathom.kernels.triton_aot import ModelHeads, Specialization, signature
from fathom.kernels.two_segment_attention import Evidence, SegmentPlan, descriptor

COLUMNS = 8
"""Of a product, the fewest there can be: a group's heads, one for the norms where one is to spare, padding."""
DIMS = (64, 128)
WARPS = 4
KEYS_PER_BLOCK = 16 * WARPS
OPTIONS = {"num_warps": WARPS, "num_stages": 3}
PIECES_PER_PROCESSOR = 2
"""Programs with keys to read for each multiprocessor. Three fit, by registers and shared memory, and alone they are
2 to 5 % faster (on an H200, 131,072 entries for each of 1 and 16 requests); with selections renewed beside them two
are, by 2 to 8 %."""
SHARED_MEMORY = 195 << 10
"""Bytes that a multiprocessor must have: two programs of 64 KiB, and room beside them. Those of 9.0 and 10.0 do."""


def takes(device: torch.device, dtype: torch.dtype, group: int, head_dim: int, value_dim: int) -> bool:
    """Whether this kernel is for such keys and so many query heads of each KV head, on this device."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        if properties.shared_memory_per_multiprocessor < SHARED_MEMORY:
            return False
    return dtype == torch.bfloat16 and group <= COLUMNS and {head_dim, value_dim} <= set(DIMS)


@triton.jit
def _squares(k, PTX: tl.constexpr):
    """Two bfloat16 numbers whose sum is k * k: rounded, and what that left."""
    if PTX:
        high, low = tl.inline_asm_elementwise(
            "{ .reg .b32 n; mov.b32 n, 0x80008000; fma.rn.bf16x2 $0, $2, $2, n; "
            "neg.bf16x2 n, $0; fma.rn.bf16x2 $1, $2, $2, n; }",
            "=&r,=r,r", [k], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        wide = k.to(tl.float32)
        square = wide * wide
        high = square.to(tl.bfloat16)
        low = (square - high.to(tl.float32)).to(tl.bfloat16)
    return high, low


@triton.jit
def _store(at, value, mask, PTX: tl.constexpr):
    """Store float32 at addresses without another layout, which would go through shared memory."""
    if PTX:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.s32 p, $3, 0; @p st.global.f32 [$1], $2; mov.b32 $0, 0; }",
            "=r,l,f,r", [at, value, mask.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        # A condition on a scalar has made the interpreter's mask one of numbers.
        tl.store(at.to(tl.uint64).to(tl.pointer_type(tl.float32)), value, mask=mask.to(tl.int32) != 0)


@triton.jit
def _fold(q, k, v, there, scale_log2, top, total, acc):
    """One block of keys into each warp's softmax, of which scores are [WARPS, keys, COLUMNS].

    q is [WARPS, D, COLUMNS], k [WARPS, keys, D], v [WARPS, V, keys], there [WARPS, keys].
    """
    products = tl.dot(k, q)
    scores = tl.where(there[:, :, None], products * scale_log2, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1))
    safe = tl.where(new_top == float("-inf"), 0.0, new_top)
    rescale = tl.exp2(top - safe)
    weights = tl.exp2(scores - safe[:, None, :])
    total = total * rescale[:, None, :] + weights
    acc = tl.dot(v, weights.to(v.dtype), acc * rescale[:, None, :])
    return products, new_top, total, acc


@triton.jit
def _slot(base, slot, stride):
    """Where a slot begins; the stride is in bytes."""
    at = base.to(tl.pointer_type(tl.int8), bitcast=True) + slot.to(tl.int64) * stride
    return at.to(base.dtype, bitcast=True)


@triton.jit(do_not_specialize=["batch", "pieces"])
def _by_warp_kernel(
    query, keys, values, compact_keys, compact_values, table, packed, partial, partial_lse, where, logits, norms,
    pitch, scale, stride_query_batch, stride_query_head,
    stride_key_slot, stride_key_head, stride_value_slot, stride_value_head,
    stride_compact_key_slot, stride_compact_key_head, stride_compact_value_slot, stride_compact_value_head,
    stride_table_row, batch, pieces,
    GROUP: tl.constexpr, COLUMNS: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    WARPS: tl.constexpr, BLOCK: tl.constexpr, THERE: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Program (KV head, piece): attention over the keys of the piece, of both segments.

    ``stride_key_slot`` and ``stride_value_slot`` are in bytes.
    """
    h, kv_heads = tl.program_id(0), tl.num_programs(0)
    number, first, last = own_piece(packed, batch, pieces, where, BLOCK, 6)
    if number >= batch:
        return
    b = number.to(tl.int64)
    row, begin, _end, compact_start, length, kept = descriptor(packed, b)
    r = tl.arange(0, COLUMNS)
    head, real, spare = h * GROUP + r, r < GROUP, r == GROUP
    d, dv = tl.arange(0, HEAD_DIM), tl.arange(0, VALUE_DIM)
    q_at = b * stride_query_batch + head * stride_query_head
    q = tl.load(query + q_at[:, None] + d[None, :], mask=real[:, None], other=0.0).to(keys.dtype.element_ty)
    q = tl.broadcast_to(tl.trans(q)[None, :, :], (WARPS, HEAD_DIM, COLUMNS))
    top = tl.full((WARPS, COLUMNS), float("-inf"), tl.float32)
    total = tl.zeros((WARPS, BLOCK // WARPS, COLUMNS), tl.float32)
    acc = tl.zeros((WARPS, VALUE_DIM, COLUMNS), tl.float32)
    scale_log2 = scale * 1.4426950408889634
    n = tl.arange(0, WARPS)[:, None] * (BLOCK // WARPS) + tl.arange(0, BLOCK // WARPS)[None, :]

    # Beyond the last key, that one is read again.
    stop = tl.minimum(last, length)
    for start in range(first, stop, BLOCK):
        t = start + n
        at = (compact_start + tl.minimum(t, stop - 1)).to(tl.int64)
        k_at = at * stride_compact_key_slot + h.to(tl.int64) * stride_compact_key_head
        v_at = at * stride_compact_value_slot + h.to(tl.int64) * stride_compact_value_head
        k = tl.load(compact_keys + k_at[:, :, None] + d[None, None, :])
        v = tl.load(compact_values + v_at[:, None, :] + dv[None, :, None])
        _, top, total, acc = _fold(q, k, v, t < stop, scale_log2, top, total, acc)

    width = tl.load(pitch) if THERE else pitch
    kept_head = tl.maximum(kept, 0).to(tl.int64) * kv_heads + h
    norms_row = norms + kept_head * width
    logits_row = logits + (kept_head * GROUP + r) * width
    to = tl.where(spare, norms_row.to(tl.int64), logits_row.to(tl.int64))
    keep = (real | spare) & (kept >= 0)
    own_keys = keys + h.to(tl.int64) * stride_key_head
    own_values = values + h.to(tl.int64) * stride_value_head
    # Of the request's keys, number t is this plus t.
    entries = table + row.to(tl.int64) * stride_table_row + (begin - length)
    begun = tl.maximum(first, length)
    slots = tl.load(entries + tl.minimum(begun + n, last - 1), mask=begun + n * 0 < last, other=0)
    for start in range(begun, last, BLOCK):
        t = start + n
        there = t < last
        k = tl.load(_slot(own_keys, slots, stride_key_slot)[:, :, None] + d[None, None, :])
        v = tl.load(_slot(own_values, slots, stride_value_slot)[:, None, :] + dv[None, :, None])
        slots = tl.load(entries + tl.minimum(t + BLOCK, last - 1))
        products, top, total, acc = _fold(q, k, v, there, scale_log2, top, total, acc)
        high, low = _squares(k, PTX)
        # Halves of twice as much: else the compiler makes both one chain of products, each waiting for the last.
        ones, twos = tl.full(q.shape, 1.0, q.dtype), tl.full(q.shape, 2.0, q.dtype)
        square = tl.dot(high, ones) + 0.5 * tl.dot(low, twos)
        out = products * scale
        if GROUP < COLUMNS:
            out = tl.where(spare[None, None, :], tl.sqrt(square), out)
        index = (begin + t - length).to(tl.int64)
        _store(to[None, None, :] + index[:, :, None] * 4, out, keep[None, None, :] & there[:, :, None], PTX)
        if GROUP == COLUMNS:
            norms_at = norms_row.to(tl.int64) + index[:, :, None] * 4 + r[None, None, :] * 0
            _store(norms_at, tl.sqrt(square), (r == 0)[None, None, :] & (kept >= 0) & there[:, :, None], PTX)

    whole = tl.max(top, 0)
    rescale = tl.exp2(top - tl.where(whole == float("-inf"), 0.0, whole)[None, :])
    sums = tl.sum(tl.sum(total, 1) * rescale, 0)
    safe = tl.where(sums > 0, sums, 1.0)
    ln_2: tl.constexpr = 0.6931471805599453
    place = tl.program_id(1).to(tl.int64) * (kv_heads * GROUP) + head
    tl.store(
        partial_lse + place, tl.where(sums > 0, (whole + tl.log2(safe)) * ln_2, float("-inf")), mask=real
    )
    result = tl.trans(tl.sum(acc * rescale[:, None, :], 0)) / safe[:, None]
    tl.store(partial + place[:, None] * VALUE_DIM + dv[None, :], result, mask=real[:, None])


def _constants(group: int, head_dim: int, value_dim: int) -> dict[str, Any]:
    own = {"GROUP": group, "COLUMNS": COLUMNS, "HEAD_DIM": head_dim, "VALUE_DIM": value_dim}
    return own | {"WARPS": WARPS, "BLOCK": KEYS_PER_BLOCK}


def two_segments_by_warp(
    query: torch.Tensor,
    pool: tuple[torch.Tensor, torch.Tensor],
    compact: tuple[torch.Tensor, torch.Tensor],
    page_table: torch.Tensor,
    plan: SegmentPlan,
    scale: float,
    evidence: Evidence,
    pitch: torch.Tensor | int,
    processors: int,
    output: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``two_segment_attention`` of what this kernel ``takes``, in two launches.

    Args:
        pitch: of the evidence, in any case.
        processors: multiprocessors of the device.
        output: [batch, heads, value_dim] to write to, contiguous; by default new, float32.
    """
    batch, heads, head_dim = query.shape
    kv_heads, value_dim = pool[0].shape[1], pool[1].shape[2]
    pieces = pick_pieces(kv_heads, processors, PIECES_PER_PROCESSOR)
    dealt = Dealt(query, value_dim, batch, pieces, output)
    size = pool[0].itemsize
    _by_warp_kernel[(kv_heads, dealt.programs)](
        query, *pool, *compact, page_table, plan.packed, dealt.partial, dealt.lse, dealt.where, evidence.logits,
        evidence.key_norms, pitch, scale, *query.stride()[:2],
        pool[0].stride(0) * size, pool[0].stride(1), pool[1].stride(0) * size, pool[1].stride(1),
        *compact[0].stride()[:2], *compact[1].stride()[:2], page_table.stride(0), batch, pieces,
        **_constants(heads // kv_heads, head_dim, value_dim), THERE=isinstance(pitch, torch.Tensor),
        PTX=not INTERPRETED, **OPTIONS,
    )  # fmt: skip
    return dealt.merged()


def specializations() -> list[Specialization]:
    """What to compile ahead of time."""
    floats = dict.fromkeys(("partial", "partial_lse", "logits", "norms"), "*fp32")
    tensors = dict.fromkeys(("query", "keys", "values", "compact_keys", "compact_values"), "*bf16")
    types = floats | tensors | {"table": "*i32", "packed": "*i32", "scale": "fp32", "where": "*i32"}
    shapes = [
        (each.name, each.heads // each.kv_heads, each.head_dim, each.head_dim, captured)
        for each in ModelHeads.common()
        if each.dtype == "bf16" and each.head_dim in DIMS
        for captured in (False, True)
    ]
    shapes += [
        ("bf16 group 8", 8, 128, 128, True),
        ("bf16 group 7, values of 64", 7, 128, 64, True),
        ("bf16 group 1, keys of 64", 1, 64, 128, True),
    ]
    found = []
    for name, group, head_dim, value_dim, captured in shapes:
        constants = _constants(group, head_dim, value_dim) | {"THERE": captured, "PTX": True}
        own = signature(_by_warp_kernel, types | {"pitch": "*i32" if captured else "i32"}, constants)
        label = f"segments_by_warp {name}{', captured' if captured else ''}"
        found.append(Specialization(label, _by_warp_kernel, own, constants, OPTIONS))
    return found
