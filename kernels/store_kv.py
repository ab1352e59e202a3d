"""New keys and values into the slots of an 8-bit pool, on a GPU: rounded on the way, both in one launch.

``narrowed`` is the plain-PyTorch reference of the rounding.
"""

import math

import torch
import triton
import triton.language as tl

from fathom.kernels.triton_aot import NARROW_KV, Specialization, least_for, signature

EIGHT_BITS = (torch.float8_e4m3fn, torch.float8_e5m2)
"""Four bits of exponent and three of fraction, up to 448; five and two, up to 57,344. No scales."""
TOKENS = 16
"""Rows that one program rounds, of one head."""


def narrowed(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``x`` in one of ``EIGHT_BITS``: the nearest number, even ones at half way; the largest for what is beyond it,
    which in e5m2 would become infinite."""
    most = torch.finfo(dtype).max
    return x.clamp(-most, most).to(dtype)


@triton.jit
def _eight_bits(x, MOST: tl.constexpr, EXPONENT: tl.constexpr, FRACTION: tl.constexpr):
    """Bytes of the nearest numbers; ``EXPONENT`` of the smallest that is normal, ``FRACTION`` bits of fraction.

    By arithmetic alone: up to Triton 3.7 a conversion goes by way of float16, cut off, and before compute
    capability 8.9 it rounds what is half way up and makes NaN a zero.
    """
    sign = (x.to(tl.int32, bitcast=True) >> 24) & 0x80
    x = tl.clamp(tl.abs(x), 0.0, MOST, propagate_nan=tl.PropagateNan.ALL)
    exponent = tl.maximum(x.to(tl.int32, bitcast=True) >> 23, EXPONENT + 127)
    # What a float32 of this size has no bits for is rounded away.
    large = ((exponent + 23 - FRACTION) << 23).to(tl.float32, bitcast=True)
    rounded = (x + large) - large
    # Brought to where numbers of float16 are subnormal too; their upper bits are then those of 8.
    half = (rounded * 2.0 ** (-14 - EXPONENT)).to(tl.float16).to(tl.int16, bitcast=True)
    return (sign | tl.where(x == x, half >> (10 - FRACTION), 0x7F)).to(tl.uint8)


@triton.jit
def _narrow(source, pool, row, slot, head, there, stride_row, stride_row_head, stride_slot, stride_head,
            MOST: tl.constexpr, EXPONENT: tl.constexpr, FRACTION: tl.constexpr,
            DIM: tl.constexpr, DIM_P: tl.constexpr):  # fmt: skip
    d = tl.arange(0, DIM_P)
    mask = there[:, None] & (d < DIM)[None, :]
    at = row[:, None] * stride_row + head * stride_row_head + d[None, :]
    x = tl.load(source + at, mask=mask, other=0.0).to(tl.float32)
    at = slot[:, None] * stride_slot + head * stride_head + d[None, :]
    narrow = _eight_bits(x, MOST, EXPONENT, FRACTION)
    tl.store(pool + at, narrow.to(pool.dtype.element_ty, bitcast=True), mask=mask)


@triton.jit(do_not_specialize=["rows"])
def _store_kernel(
    keys, values, key_pool, value_pool, slots, rows,
    k_stride_row, k_stride_row_head, v_stride_row, v_stride_row_head,
    k_stride_slot, k_stride_head, v_stride_slot, v_stride_head,
    MOST: tl.constexpr, EXPONENT: tl.constexpr, FRACTION: tl.constexpr,
    DIM: tl.constexpr, DIM_P: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_DIM_P: tl.constexpr,
    TOKENS: tl.constexpr,
):  # fmt: skip
    """Program (block of rows, KV head)."""
    row = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    head, there = tl.program_id(1).to(tl.int64), row < rows
    slot = tl.load(slots + row, mask=there, other=0)
    _narrow(keys, key_pool, row, slot, head, there, k_stride_row, k_stride_row_head, k_stride_slot, k_stride_head,
            MOST, EXPONENT, FRACTION, DIM, DIM_P)  # fmt: skip
    _narrow(values, value_pool, row, slot, head, there, v_stride_row, v_stride_row_head, v_stride_slot,
            v_stride_head, MOST, EXPONENT, FRACTION, VALUE_DIM, VALUE_DIM_P)  # fmt: skip


def store_kv_8bit(
    keys: torch.Tensor, values: torch.Tensor, pool: tuple[torch.Tensor, torch.Tensor], slots: torch.Tensor
) -> None:
    """Round each row and write it to its slot; NaN stays NaN. Nothing waits for the device.

    Args:
        keys: [rows, kv_heads, head_dim], values: [rows, kv_heads, value_dim]; float32, bfloat16 or float16, last
            dimension contiguous.
        pool: keys [slots, kv_heads, head_dim] and values [slots, kv_heads, value_dim] in one of ``EIGHT_BITS``,
            last dimension contiguous. Changed in place.
        slots: [rows] int64, within the pool; where two are alike, either row may be the one that stays.
    """
    if not len(slots):
        return
    _store_kernel[(triton.cdiv(len(slots), TOKENS), keys.shape[1])](
        keys, values, *pool, slots, len(slots), *keys.stride()[:2], *values.stride()[:2],
        *pool[0].stride()[:2], *pool[1].stride()[:2], **_constants(pool[0].dtype, keys.shape[2], values.shape[2]),
    )  # fmt: skip


def _constants(dtype: torch.dtype, dim: int, value_dim: int) -> dict[str, float]:
    padded = {"DIM_P": triton.next_power_of_2(dim), "VALUE_DIM_P": triton.next_power_of_2(value_dim)}
    limits = torch.finfo(dtype)
    exponents = {
        name: round(math.log2(x)) for name, x in (("EXPONENT", limits.tiny), ("FRACTION", 1 / limits.eps))
    }
    dims = {"DIM": dim, "VALUE_DIM": value_dim, "TOKENS": TOKENS}
    return {"MOST": limits.max} | exponents | dims | padded


def specializations() -> list[Specialization]:
    """What to compile ahead of time."""
    found = []
    for dtype, name, own in zip(EIGHT_BITS, NARROW_KV, ("bf16", "fp16"), strict=True):
        constants = _constants(dtype, 128, 128)
        types = dict.fromkeys(("keys", "values"), f"*{own}") | {"slots": "*i64"}
        types |= dict.fromkeys(("key_pool", "value_pool"), f"*{name}")
        label = f"store_kv 128 {own} to {name}"
        own_types = signature(_store_kernel, types, constants)
        found.append(Specialization(label, _store_kernel, own_types, constants, least=least_for(name)))
    return found
