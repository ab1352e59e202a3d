"""Paged allocation on the CPU: slots follow each other inside pages, and no page is handed out twice."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator, alloc_extend_naive
from torch.utils._python_dispatch import TorchDispatchMode

from fathom.runtime.sglang_host.memory.torch_allocator import TorchPagedAllocator

PAGES = 1000


class NoCache:
    """Stands for the KV buffers, which allocation never touches."""


def allocator(pages: int, page_size: int) -> TorchPagedAllocator:
    return TorchPagedAllocator(pages * page_size, page_size, torch.float32, "cpu", NoCache(), need_sort=False)


@given(
    page_size=st.sampled_from([1, 4, 16]),
    growth=st.lists(st.lists(st.integers(0, 40), min_size=3, max_size=3), min_size=1, max_size=8),
)
@settings(max_examples=80, deadline=None)
def test_growing_requests_hold_disjoint_pages(page_size, growth):
    pool = allocator(PAGES, page_size)
    held: list[list[int]] = [[], [], []]
    for step in growth:
        before = torch.tensor([len(h) for h in held])
        after = before + torch.tensor(step)
        last = torch.tensor([h[-1] if h else -1 for h in held])
        slots = pool.alloc_extend(before, before, after, after, last, int(sum(step)))
        for h, part in zip(held, slots.split(step), strict=True):
            h.extend(part.tolist())
    pages = [{slot // page_size for slot in h} for h in held]
    assert sum(map(len, pages)) == len(set().union(*pages))
    assert pool.available_size() == (PAGES - sum(map(len, pages))) * page_size
    for h in held:
        assert all(slot >= page_size for slot in h), "page 0 is SGLang's dummy"
        assert [slot % page_size for slot in h] == [i % page_size for i in range(len(h))]
        assert all(h[i] + 1 == h[i + 1] for i in range(len(h) - 1) if (i + 1) % page_size)
    for h in held:
        pool.free(torch.tensor(h, dtype=torch.int64))
    assert pool.available_size() == PAGES * page_size


@given(
    page_size=st.sampled_from([1, 4, 16]),
    requests=st.lists(st.tuples(st.integers(0, 50), st.integers(0, 60)), min_size=1, max_size=8),
    decodes=st.booleans(),
)
@settings(max_examples=100, deadline=None)
def test_slots_are_sglangs_own(page_size, requests, decodes):
    """What SGLang works out on the device, operation by operation."""
    pool = allocator(PAGES, page_size)
    before, new = (torch.tensor(column) for column in zip(*requests, strict=True))
    new = torch.ones_like(new) if decodes else new
    after = before + new
    # Any slots do that end where the lengths say.
    last = torch.where(before > 0, page_size * (500 + torch.arange(len(new))) + (before - 1) % page_size, -1)
    expected = torch.empty(int(new.sum()), dtype=torch.int64)
    alloc_extend_naive(before, after, last, pool.free_pages, expected, page_size, "cpu")
    if decodes:
        slots = pool.alloc_decode(after, after, last.int())
    else:
        slots = pool.alloc_extend(before, before, after, after, last.int(), len(expected))
    assert slots.dtype == torch.int64 and torch.equal(slots, expected)


class Counted(TorchDispatchMode):
    """How many operations of PyTorch's run within it: on a GPU each is some microseconds of the host's."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **kwargs or {})


def test_a_decode_step_takes_its_slots_in_few_operations():
    """However many requests there are, and whether some of them need a page."""
    for lengths in ([7], [8], [9], list(range(1, 200))):
        pool, after = allocator(PAGES, 8), torch.tensor(lengths) + 1
        with Counted() as work:
            assert len(pool.alloc_decode(after, after, torch.tensor(lengths) + 800)) == len(lengths)
        assert work.count <= 15


class Rewritten(TorchPagedAllocator):
    """Frees as SGLang does."""

    _release_page_ids = PagedTokenToKVPoolAllocator._release_page_ids


@given(
    page_size=st.sampled_from([1, 4]),
    need_sort=st.booleans(),
    moves=st.lists(st.tuples(st.booleans(), st.integers(0, 50)), max_size=40),
)
@settings(max_examples=80, deadline=None)
def test_pages_come_back_in_sglangs_order_and_into_one_list(page_size, need_sort, moves):
    """A list that is written anew with each request that ends costs as much as the pool is large."""
    ours, stock = (
        kind(60 * page_size, page_size, torch.float32, "cpu", NoCache(), need_sort)
        for kind in (TorchPagedAllocator, Rewritten)
    )
    held, place = [], ours.free_pages.untyped_storage().data_ptr()
    for takes, count in moves:
        if takes:
            slots = [pool.alloc(count % 7 * page_size) for pool in (ours, stock)]
            assert [found is None for found in slots] in ([True] * 2, [False] * 2)
            if slots[0] is not None:
                assert torch.equal(*slots)
                held.append(slots[0])
        elif held:
            given_back = (
                held.pop(count % len(held)),
                held.pop() if held and count % 2 else torch.zeros(0).long(),
            )
            for pool in (ours, stock):
                pool.free_group_begin()
                for slots in given_back:
                    pool.free_segment(slots, start_pos=0)
                pool.free_group_end()
        assert torch.equal(ours.get_all_free_pages(), stock.get_all_free_pages())
        assert need_sort or ours.free_pages.untyped_storage().data_ptr() == place
    ours.clear()
    assert ours.available_size() == 60 * page_size


def test_a_full_pool_hands_out_nothing():
    pool = allocator(3, 4)
    none, ten, last = torch.tensor([0]), torch.tensor([10]), torch.tensor([-1])
    slots = pool.alloc_extend(none, none, ten, ten, last, 10)
    assert len(slots) == 10
    assert pool.alloc_extend(none, none, ten, ten, last, 10) is None
    eleven = torch.tensor([11])
    assert pool.alloc_decode(eleven, eleven, slots[-1:]).tolist() == [int(slots[-1]) + 1]
    assert isinstance(pool, PagedTokenToKVPoolAllocator)
