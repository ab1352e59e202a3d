"""Decode attention over two segments of KV, one launch for a batch whose rows are in different phases.

Segment 1 is a run of a compact buffer, in which each KV head has its own tokens; segment 2 is a range of the
request's page table, read in place. Both are folded into one softmax by log-sum-exp. A row that reads everything
has an empty segment 1 and its whole table as the range, and may keep what it saw: the attention logits and the key
norms (Slow-Fast Inference, section 4.2).

The CPU kernel is in ``paged_attention_cpu.py``; the Triton kernel and the plain reference are here. Triton's for
rows of bfloat16 that keep what they saw is in ``segments_by_warp.py``.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import triton
import triton.language as tl

from fathom.kernels.dispatch import runs_triton
from fathom.kernels.key_shares import Dealt, own_piece, pick_pieces
from fathom.kernels.triton_aot import Specialization, least_for, signature

FIELDS = ("row", "begin", "end", "compact_start", "compact_length", "evidence")


@dataclass(frozen=True)
class Evidence:
    """Where the rows that keep their logits write them; index i along the last dimension is table entry i.

    Attributes:
        logits: [capacity, heads, width] float32, scaled dot products.
        key_norms: [capacity, kv_heads, width] float32, Euclidean norms.
        pitch: [1] int32, on a GPU: entries from the start of one row to that of the next, for a captured launch
            that serves any lengths. ``width`` is then what the memory is divided into; fewer rows may be longer.
    """

    logits: torch.Tensor
    key_norms: torch.Tensor
    pitch: torch.Tensor | None = None


@dataclass(frozen=True)
class SegmentPlan:
    """Which keys each request reads; built once per step, read by every layer.

    Attributes:
        packed: [batch, 6] int32 on the device, the columns of ``FIELDS``: page-table row; range [begin, end) of its
            entries; start and length of the run in the compact buffer; row of :class:`Evidence`, or -1 for none.
        kv_heads: of the attention.
    """

    packed: torch.Tensor
    kv_heads: int

    @cached_property
    def tasks(self) -> Any:
        """The work list of the CPU kernel, for one query per request."""
        from fathom.kernels.paged_attention_cpu import plan_tasks

        return plan_tasks(self.packed.numpy(), self.kv_heads)


def plan_segments(
    rows: torch.Tensor,
    begin: torch.Tensor,
    end: torch.Tensor,
    compact_start: torch.Tensor,
    compact_length: torch.Tensor,
    evidence: torch.Tensor,
    kv_heads: int,
) -> SegmentPlan:
    """Pack one step's descriptor. All arguments but the last are [batch] integers; see :class:`SegmentPlan`."""
    columns = (rows, begin, end, compact_start, compact_length, evidence)
    return SegmentPlan(torch.stack([column.to(torch.int32) for column in columns], -1), kv_heads)


def two_segment_attention_reference(
    query: torch.Tensor,
    pool: tuple[torch.Tensor, torch.Tensor],
    compact: tuple[torch.Tensor, torch.Tensor],
    page_table: torch.Tensor,
    plan: SegmentPlan,
    scale: float,
    evidence: Evidence | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Reference for :func:`two_segment_attention` in float32; same shapes."""
    group = query.shape[1] // pool[0].shape[1]
    output, lse = [], []
    for b, (row, begin, end, start, length, kept) in enumerate(plan.packed.tolist()):
        slots = page_table[row, begin:end].long()
        own = slice(start, start + length)
        key = torch.cat((compact[0][own], pool[0][slots])).float()
        value = torch.cat((compact[1][own], pool[1][slots])).float().repeat_interleave(group, 1)
        scores = torch.einsum("hd,nhd->hn", query[b].float(), key.repeat_interleave(group, 1)) * scale
        lse.append(scores.logsumexp(-1))
        output.append(torch.einsum("hn,nhd->hd", scores.softmax(-1), value))
        if evidence is not None and kept >= 0:
            evidence.logits[kept, :, begin:end] = scores[:, length:]
            evidence.key_norms[kept, :, begin:end] = key[length:].norm(dim=-1).T
    return torch.stack(output), torch.stack(lse)


def two_segment_attention(
    query: torch.Tensor,
    pool: tuple[torch.Tensor, torch.Tensor],
    compact: tuple[torch.Tensor, torch.Tensor],
    page_table: torch.Tensor,
    plan: SegmentPlan,
    scale: float,
    evidence: Evidence | None = None,
    output: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of the last token of each request over its two segments.

    Args:
        query: [batch, heads, head_dim], float32, bfloat16 or float16, last dimension contiguous.
        pool: keys [slots, kv_heads, head_dim] and values [slots, kv_heads, value_dim] of one layer.
        compact: the same of the layer's compact buffer, the pool's dtype. Last dimensions contiguous.
        page_table: [rows, max_length] int32, slot of each table entry.
        scale: factor on the dot products.
        evidence: written in place for the rows whose descriptor names a row of it.
        output: [batch, heads, value_dim] to write to, contiguous; by default new, float32.

    Returns:
        output, zero for a row that sees nothing, and log-sum-exp [batch, heads] float32. On a GPU nothing waits for
        the device.
    """
    if runs_triton(query):
        return two_segment_attention_triton(query, pool, compact, page_table, plan, scale, evidence, output)
    from fathom.kernels.paged_attention_cpu import paged_attention

    wide, lse = paged_attention(query, pool, page_table, plan.tasks, scale, compact, evidence)
    return wide if output is None else output.copy_(wide), lse


@triton.jit
def _fold(q, k, v, visible, scale, top, total, acc):
    """One block of keys into the running softmax; q [ROWS, D], k and v [BLOCK, D], visible [ROWS, BLOCK]."""
    k, v = k.to(q.dtype), v.to(q.dtype)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    scores = tl.where(visible, scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1))
    safe = tl.where(new_top == float("-inf"), 0.0, new_top)
    rescale = tl.exp(top - safe)
    weights = tl.exp(scores - safe[:, None])
    total = total * rescale + tl.sum(weights, 1)
    acc = acc * rescale[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
    return scores, new_top, total, acc


@triton.jit
def descriptor(packed, request):
    """``FIELDS`` of a request in their order."""
    at = packed + request * 6
    row, begin, end = tl.load(at), tl.load(at + 1), tl.load(at + 2)
    return row, begin, end, tl.load(at + 3), tl.load(at + 4), tl.load(at + 5)


@triton.jit(do_not_specialize=["batch", "pieces"])
def _segments_kernel(
    query, keys, values, compact_keys, compact_values, table, packed, partial, partial_lse, where, logits, norms,
    pitch, scale, stride_query_batch, stride_query_head,
    stride_key_slot, stride_key_head, stride_value_slot, stride_value_head,
    stride_compact_key_slot, stride_compact_key_head, stride_compact_value_slot, stride_compact_value_head,
    stride_table_row, batch, pieces,
    GROUP: tl.constexpr, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK: tl.constexpr,
    EVIDENCE: tl.constexpr, THERE: tl.constexpr,
):  # fmt: skip
    """Program (KV head, piece): attention over the keys of the piece, of both segments."""
    h, kv_heads = tl.program_id(0), tl.num_programs(0)
    number, first, last = own_piece(packed, batch, pieces, where, BLOCK, 6)
    if number >= batch:
        return
    b = number.to(tl.int64)
    row, begin, _end, compact_start, length, kept = descriptor(packed, b)
    r = tl.arange(0, ROWS)
    head, real = h * GROUP + r, r < GROUP
    d, dv = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    in_d, in_v = d < HEAD_DIM, dv < VALUE_DIM
    q_at = b * stride_query_batch + head * stride_query_head
    q = tl.load(query + q_at[:, None] + d[None, :], mask=real[:, None] & in_d[None, :], other=0.0)
    if keys.dtype.element_ty.primitive_bitwidth > 8:
        q = q.to(keys.dtype.element_ty)
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, BLOCK_V), tl.float32)

    stop = tl.minimum(last, length)
    for start in range(first, stop, BLOCK):
        t = start + tl.arange(0, BLOCK)
        there = t < stop
        at = (compact_start + t).to(tl.int64)
        k_at = at * stride_compact_key_slot + h.to(tl.int64) * stride_compact_key_head
        v_at = at * stride_compact_value_slot + h.to(tl.int64) * stride_compact_value_head
        k = tl.load(compact_keys + k_at[:, None] + d[None, :], mask=there[:, None] & in_d[None, :], other=0.0)
        v = tl.load(
            compact_values + v_at[:, None] + dv[None, :], mask=there[:, None] & in_v[None, :], other=0.0
        )
        _, top, total, acc = _fold(q, k, v, real[:, None] & there[None, :], scale, top, total, acc)

    for start in range(tl.maximum(first, length), last, BLOCK):
        t = start + tl.arange(0, BLOCK)
        there = t < last
        index = begin + t - length
        at = tl.load(table + row.to(tl.int64) * stride_table_row + index, mask=there, other=0).to(tl.int64)
        k_at = at * stride_key_slot + h * stride_key_head
        v_at = at * stride_value_slot + h * stride_value_head
        k = tl.load(keys + k_at[:, None] + d[None, :], mask=there[:, None] & in_d[None, :], other=0.0)
        v = tl.load(values + v_at[:, None] + dv[None, :], mask=there[:, None] & in_v[None, :], other=0.0)
        scores, top, total, acc = _fold(q, k, v, real[:, None] & there[None, :], scale, top, total, acc)
        if EVIDENCE and kept >= 0:
            width = tl.load(pitch) if THERE else pitch
            kept_head = kept.to(tl.int64) * kv_heads + h
            kept_at = (kept_head * GROUP + r) * width
            tl.store(logits + kept_at[:, None] + index[None, :], scores, mask=real[:, None] & there[None, :])
            wide = k.to(tl.float32)
            norm = tl.sqrt(tl.sum(wide * wide, 1))
            tl.store(norms + kept_head * width + index, norm, mask=there)

    safe = tl.where(total > 0, total, 1.0)
    place = tl.program_id(1).to(tl.int64) * (kv_heads * GROUP) + head
    tl.store(partial_lse + place, tl.where(total > 0, top + tl.log(safe), float("-inf")), mask=real)
    to = partial + place[:, None] * VALUE_DIM + dv[None, :]
    tl.store(to, acc / safe[:, None], mask=real[:, None] & in_v[None, :])


PLAIN, WITH_EVIDENCE = (32, 4, 3), (32, 4, 2)
"""Keys per block, warps and stages for up to 16 rows of 16-bit numbers, 128 wide; the best of four on an H100. With
evidence of 64 keys the norms alone take 64 registers, and only two programs fit on a multiprocessor."""


def _tile(rows: int, dim: int, itemsize: int, evidence: bool) -> tuple[int, dict[str, int]]:
    """Keys per block, warps and stages with which nothing spills.

    Args:
        dim: a head's, of keys or values. itemsize: of what is multiplied.
    """
    many = rows > 16
    if not many and dim <= 128 and itemsize == 2:
        block, warps, stages = WITH_EVIDENCE if evidence else PLAIN
        return block, {"num_warps": warps, "num_stages": stages}
    return 32 if itemsize == 2 else 16, {"num_warps": 8 if many else 4, "num_stages": 2}


def two_segment_attention_triton(
    query: torch.Tensor,
    pool: tuple[torch.Tensor, torch.Tensor],
    compact: tuple[torch.Tensor, torch.Tensor],
    page_table: torch.Tensor,
    plan: SegmentPlan,
    scale: float,
    evidence: Evidence | None = None,
    output: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`two_segment_attention` in two launches."""
    from fathom.kernels import segments_by_warp as by_warp

    batch, heads, head_dim = query.shape
    kv_heads, value_dim = pool[0].shape[1], pool[1].shape[2]
    group, processors = heads // kv_heads, 8
    if query.device.type == "cuda":
        processors = torch.cuda.get_device_properties(query.device).multi_processor_count
    pitch: torch.Tensor | int = 0
    if evidence is not None:
        if not (evidence.logits.is_contiguous() and evidence.key_norms.is_contiguous()):
            raise ValueError("evidence must be contiguous")
        pitch = evidence.logits.shape[-1] if evidence.pitch is None else evidence.pitch
        if by_warp.takes(query.device, pool[0].dtype, group, head_dim, value_dim):
            return by_warp.two_segments_by_warp(
                query, pool, compact, page_table, plan, scale, evidence, pitch, processors, output
            )
    pieces = pick_pieces(kv_heads, processors)
    # tl.dot needs 16 rows.
    rows = max(triton.next_power_of_2(group), 16)
    itemsize = query.itemsize if pool[0].itemsize == 1 else pool[0].itemsize
    block, options = _tile(rows, max(head_dim, value_dim), itemsize, evidence is not None)
    dealt = Dealt(query, value_dim, batch, pieces, output)
    lse = dealt.lse
    logits, norms = (lse, lse) if evidence is None else (evidence.logits, evidence.key_norms)
    _segments_kernel[(kv_heads, dealt.programs)](
        query, *pool, *compact, page_table, plan.packed, dealt.partial, lse, dealt.where, logits, norms, pitch,
        scale, *query.stride()[:2], *pool[0].stride()[:2], *pool[1].stride()[:2],
        *compact[0].stride()[:2], *compact[1].stride()[:2], page_table.stride(0), batch, pieces,
        GROUP=group, ROWS=rows, HEAD_DIM=head_dim, VALUE_DIM=value_dim,
        BLOCK_D=triton.next_power_of_2(head_dim), BLOCK_V=triton.next_power_of_2(value_dim), BLOCK=block,
        EVIDENCE=evidence is not None, THERE=isinstance(pitch, torch.Tensor), **options,
    )  # fmt: skip
    return dealt.merged()


def specializations() -> list[Specialization]:
    """What to compile ahead of time."""
    shapes = [  # dtype, dtype of KV, group, head_dim, evidence, captured
        ("bf16", "bf16", 4, 128, False, False),
        ("bf16", "bf16", 4, 128, True, False),
        ("bf16", "bf16", 4, 128, True, True),
        ("bf16", "bf16", 8, 256, True, True),
        ("bf16", "fp8e4nv", 4, 128, True, True),
        ("bf16", "fp8e5", 4, 128, False, False),
        ("fp16", "fp8e5", 4, 128, True, True),
        ("fp32", "fp32", 4, 128, True, False),
        ("fp16", "fp16", 3, 80, False, False),
    ]
    rows = 16
    floats = dict.fromkeys(["partial", "partial_lse", "logits", "norms"], "*fp32")
    results = []
    for dtype, kv, group, dim, evidence, captured in shapes:
        padded = triton.next_power_of_2(dim)
        block, options = _tile(rows, dim, 4 if dtype == "fp32" else 2, evidence)
        constants = {"GROUP": group, "ROWS": rows, "HEAD_DIM": dim, "VALUE_DIM": dim}
        constants |= {"BLOCK_D": padded, "BLOCK_V": padded, "BLOCK": block}
        constants |= {"EVIDENCE": evidence, "THERE": captured}
        tensors = dict.fromkeys(["keys", "values", "compact_keys", "compact_values"], "*" + kv)
        tensors["query"] = "*" + dtype
        types = floats | tensors | {"table": "*i32", "packed": "*i32", "scale": "fp32", "where": "*i32"}
        types["pitch"] = "*i32" if captured else "i32"
        label = f"{dtype} group {group} dim {dim}{' with evidence' if evidence else ''}"
        label += (", captured" if captured else "") + (f", KV {kv}" if kv != dtype else "")
        own = signature(_segments_kernel, types, constants)
        results.append(
            Specialization(
                f"segments_kernel {label}", _segments_kernel, own, constants, options, least_for(kv)
            )
        )
    return results
