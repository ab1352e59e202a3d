"""Copy kept KV entries of one layer into other slots, each KV head its own tokens.

Heads may keep different tokens because keys already carry their rotary position: entry ``i`` of a destination page
holds another token's key in each head. ``compact_kv_reference`` is the plain reference; on a GPU one Triton launch
copies keys and values, on a CPU ``compact_kv_cpu``.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from fathom.kernels.dispatch import runs_triton

ENTRIES = 16
"""Entries that one Triton program copies."""


def compact_kv_reference(
    keys: torch.Tensor, values: torch.Tensor, source: torch.Tensor, destination: torch.Tensor
) -> None:
    """Reference for :func:`compact_kv`; same arguments."""
    for head, slots in enumerate(source.tolist()):
        for entry, slot in enumerate(slots):
            keys[int(destination[entry]), head] = keys[slot, head]
            values[int(destination[entry]), head] = values[slot, head]


def compact_kv(
    keys: torch.Tensor,
    values: torch.Tensor,
    source: torch.Tensor,
    destination: torch.Tensor,
    disjoint: bool = False,
) -> None:
    """Copy ``keys[source[h, i], h]`` to ``keys[destination[i], h]`` for all heads h and entries i, values too.

    Args:
        keys: [slots, kv_heads, head_dim]; values: [slots, kv_heads, value_dim]; one layer of the pool, any dtype,
            last dimension contiguous. Changed in place.
        source: [kv_heads, kept] slot of each kept entry.
        destination: [kept] distinct slots, none of them in ``source``: entries are copied in no particular order.
        disjoint: the caller vouches for that. Otherwise it is checked, which on a GPU waits for the device.

    Raises:
        ValueError: when shapes do not fit, or source and destination share a slot; on a CPU also where slots or
            heads are not a whole number of heads' widths apart.
        IndexError: on a CPU, for a slot outside the buffers; nothing is copied.
    """
    kv_heads, kept = source.shape
    if keys.shape[:2] != values.shape[:2] or keys.shape[1] != kv_heads or destination.shape != (kept,):
        raise ValueError(
            f"keys {list(keys.shape)}, values {list(values.shape)}, source {list(source.shape)} and destination "
            f"{list(destination.shape)} do not fit together"
        )
    if not disjoint:
        _require_disjoint(source, destination, keys.shape[0])
    if kept == 0:
        return
    if runs_triton(keys):
        _launch(keys, values, source, destination)
        return
    from fathom.kernels.compact_kv_cpu import compact_kv_cpu

    compact_kv_cpu(keys, values, source.long(), destination.long())


def _require_disjoint(source: torch.Tensor, destination: torch.Tensor, slots: int) -> None:
    count = torch.zeros(slots, dtype=torch.int32, device=source.device)
    count.index_add_(0, destination.long(), torch.ones_like(destination, dtype=torch.int32))
    if bool((count > 1).any()):
        raise ValueError("two entries have the same destination slot")
    if bool(count[source.long()].any()):
        raise ValueError("source and destination slots must not overlap")


@triton.jit(do_not_specialize=["kept", "source_stride"])
def _copy(
    keys,
    values,
    source,
    destination,
    kept,
    k_stride_slot,
    k_stride_head,
    v_stride_slot,
    v_stride_head,
    source_stride,
    DIM: tl.constexpr,
    DIM_P: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_DIM_P: tl.constexpr,
    ENTRIES: tl.constexpr,
):
    """Program (block of entries, KV head)."""
    entry = tl.program_id(0) * ENTRIES + tl.arange(0, ENTRIES)
    head = tl.program_id(1)
    there = entry < kept
    origin = tl.load(source + head * source_stride + entry, mask=there, other=0).to(tl.int64)
    target = tl.load(destination + entry, mask=there, other=0).to(tl.int64)
    d = tl.arange(0, DIM_P)
    mask = there[:, None] & (d < DIM)[None, :]
    place = head * k_stride_head + d[None, :]
    moved = tl.load(keys + origin[:, None] * k_stride_slot + place, mask=mask)
    tl.store(keys + target[:, None] * k_stride_slot + place, moved, mask=mask)
    d = tl.arange(0, VALUE_DIM_P)
    mask = there[:, None] & (d < VALUE_DIM)[None, :]
    place = head * v_stride_head + d[None, :]
    moved = tl.load(values + origin[:, None] * v_stride_slot + place, mask=mask)
    tl.store(values + target[:, None] * v_stride_slot + place, moved, mask=mask)


def _constants(dim: int, value_dim: int) -> dict[str, int]:
    return {
        "DIM": dim,
        "DIM_P": triton.next_power_of_2(dim),
        "VALUE_DIM": value_dim,
        "VALUE_DIM_P": triton.next_power_of_2(value_dim),
        "ENTRIES": ENTRIES,
    }


def _launch(
    keys: torch.Tensor, values: torch.Tensor, source: torch.Tensor, destination: torch.Tensor
) -> None:
    kv_heads, kept = source.shape
    source, destination = source.contiguous(), destination.contiguous()
    _copy[(triton.cdiv(kept, ENTRIES), kv_heads)](
        keys, values, source, destination, kept, keys.stride(0), keys.stride(1), values.stride(0), values.stride(1),
        source.stride(0), **_constants(keys.shape[2], values.shape[2]),
    )  # fmt: skip


def specializations() -> list[tuple[str, Any, dict[str, str], dict[str, Any]]]:
    """What to compile ahead of time: label, kernel, signature and constants."""
    found = []
    for dtype, dim, value_dim in (
        ("bf16", 128, 128),
        ("fp32", 64, 64),
        ("fp16", 192, 128),
        ("fp8e5", 128, 128),
    ):
        constants = _constants(dim, value_dim)
        kinds = {"keys": f"*{dtype}", "values": f"*{dtype}", "source": "*i64", "destination": "*i64"}
        signature = {n: "constexpr" if n in constants else kinds.get(n, "i32") for n in _copy.arg_names}
        found.append((f"compact_kv {dim}/{value_dim} {dtype}", _copy, signature, constants))
    return found
