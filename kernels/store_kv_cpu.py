"""New keys and values into their slots of a layer's pool, on the CPU, both in one call."""

import torch
from numba import njit

from fathom.kernels.kv_pair import KvPair
from fathom.kernels.numba_cpu import DTYPES, LOOPS, as_array, match_torch_threads
from fathom.kernels.work_sharing_cpu import on_threads, share_of, threads_for


def store_kv(
    keys: torch.Tensor, values: torch.Tensor, pool: tuple[torch.Tensor, torch.Tensor], slots: torch.Tensor
) -> bool:
    """Copy each row to its slot.

    Args:
        keys: [rows, kv_heads, head_dim], values: [rows, kv_heads, value_dim], contiguous; float32, bfloat16 or
            float16.
        pool: keys [slots, kv_heads, head_dim] and values [slots, kv_heads, value_dim], contiguous, same dtype.
        slots: [rows] int64; where two are alike, either row may be the one that stays.

    Returns:
        False where the kernel does not take these layouts or dtypes; nothing is written then.

    Raises:
        IndexError: a slot is outside the pool; nothing is written.
    """
    dtype, (key_pool, value_pool) = keys.dtype, pool
    alike = dtype == values.dtype == key_pool.dtype == value_pool.dtype
    if not alike or dtype not in DTYPES or not keys.is_contiguous() or not values.is_contiguous():
        return False
    there = KvPair.of(pool).rows
    if there is None:
        return False
    rows = [as_array(x.flatten(1)) for x in (keys, values)]
    if not store_rows(*rows, *there, slots.numpy()):
        raise IndexError(f"slot outside 0 .. {len(pool[0]) - 1}")
    return True


def warm_up(dtype: torch.dtype) -> None:
    """Compile for this dtype now, so that no request waits for it (cached on disk)."""
    match_torch_threads()
    one = torch.zeros(1, 1, 1, dtype=dtype)
    store_kv(one, one, (one.clone(), one.clone()), torch.zeros(1, dtype=torch.int64))


@njit(**LOOPS)
def store_rows(keys, values, key_pool, value_pool, slots):
    for slot in slots:
        if slot < 0 or slot >= len(key_pool):
            return False
    on_threads(_store_some, threads_for(keys.size + values.size), keys, values, key_pool, value_pool, slots)
    return True


@njit(**LOOPS)
def _store_some(thread, threads, keys, values, key_pool, value_pool, slots):
    begin, end = share_of(len(slots), thread, threads)
    for r in range(begin, end):
        key, value, own_key, own_value = key_pool[slots[r]], value_pool[slots[r]], keys[r], values[r]
        for d in range(len(own_key)):
            key[d] = own_key[d]
        for d in range(len(own_value)):
            value[d] = own_value[d]
