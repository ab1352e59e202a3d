"""New keys and values into their slots, against plain indexing."""

import pytest
import torch

from fathom.kernels.store_kv_cpu import store_kv

SLOTS = 4000


def pool_of(dtype):
    return tuple(torch.randn(SLOTS, 3, dim).to(dtype) for dim in (32, 16))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [0, 1, 7, 900])  # on the calling thread, and as a parallel loop
def test_rows_go_to_their_slots_and_nowhere_else(dtype, rows):
    torch.manual_seed(rows)
    pool = pool_of(dtype)
    slots = torch.randperm(SLOTS)[:rows]
    new = tuple(torch.randn(rows, 3, dim).to(dtype) for dim in (32, 16))
    want = tuple(part.clone() for part in pool)
    for part, rows_of_part in zip(want, new, strict=True):
        part[slots] = rows_of_part
    assert store_kv(*new, pool, slots)
    assert all(map(torch.equal, pool, want))


@pytest.mark.parametrize("slot", [-1, SLOTS])
def test_a_slot_outside_the_pool_is_refused_before_anything_is_written(slot):
    pool = pool_of(torch.float32)
    before = tuple(part.clone() for part in pool)
    new = tuple(torch.randn(2, 3, dim) for dim in (32, 16))
    with pytest.raises(IndexError, match=f"0 .. {SLOTS - 1}"):
        store_kv(*new, pool, torch.tensor([5, slot]))
    assert all(map(torch.equal, pool, before))


def test_what_the_kernel_does_not_take_is_left_to_others():
    pool = pool_of(torch.float32)
    keys, values = torch.randn(2, 3, 64)[..., ::2], torch.randn(2, 3, 16)
    slots = torch.tensor([1, 2])
    before = tuple(part.clone() for part in pool)
    assert not store_kv(keys, values, pool, slots), "not contiguous"
    assert not store_kv(keys.contiguous().bfloat16(), values.bfloat16(), pool, slots), "another dtype"
    assert all(map(torch.equal, pool, before))
