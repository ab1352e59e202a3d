"""Room behind requests' last tokens: all at once as one after the other, disjoint, and given back to the page."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fathom.runtime.kv.memory import Growth
from fathom.runtime.plan import build
from fathom.runtime.sglang_host.memory import kv_allocator
from fathom.runtime.sglang_host.memory.kv_allocator import DepthAllocator
from fathom.runtime.sglang_host.memory.tails import Tails

SPANS, WIDTH = 3, 40


def allocator(pages, page_size, monkeypatch, virtual=None):
    """Physical pages for so many virtual ones at all depths; more virtual ones than these, or so many."""
    monkeypatch.setattr(kv_allocator, "get_spec", lambda: SimpleNamespace(speculative_draft_model_path=None))
    size = pages * page_size
    pool = SimpleNamespace(size=size * SPANS, spans=SPANS, layer_num=SPANS, span=1)
    made = DepthAllocator(size, page_size, torch.float32, "cpu", pool, need_sort=False)
    if virtual is not None:
        made.virtual_pages = virtual
        made.clear()
    return made


def running(rows, lengths, made, page_size):
    """Dense requests that hold so many tokens."""
    requests = []
    for row, length in enumerate(lengths):
        start, end = torch.tensor([0]), torch.tensor([length])
        slots = made.alloc_extend(start, start, end, end, torch.tensor([-1]), length)
        rows[row, :length] = slots.int()
        pages = slots[::page_size].numpy() // page_size
        made.memory.grow([Growth(row, 0, length, pages)])
        kv = SimpleNamespace(kv_allocated_len=length, kv_committed_len=length, req_pool_idx=row)
        requests.append(SimpleNamespace(kv=kv))
    return requests


def pages_between(begin, end, size):
    return len({at // size for at in range(end)} - {at // size for at in range(begin)})


def one_after_the_other(lengths, wanted, free, size, virtual):
    """How many tokens each gets: what it wants, or half of it, and so on, until the pages are there."""
    found = []
    for length, count in zip(lengths, wanted, strict=True):
        count = min(count, WIDTH - length)
        while count and (
            pages_between(length, length + count, size) * SPANS > free
            or pages_between(length, length + count, size) > virtual
        ):
            count //= 2
        pages = pages_between(length, length + count, size)
        free, virtual = free - pages * SPANS, virtual - pages
        found.append(count)
    return found


@given(
    page_size=st.sampled_from([1, 4]),
    spare=st.integers(0, 12),
    virtual=st.integers(0, 12),
    requests=st.lists(st.tuples(st.integers(1, 36), *[st.integers(0, 9)] * 3), min_size=1, max_size=5),
)
@settings(max_examples=150, deadline=None)
def test_room_is_taken_for_all_at_once(page_size, spare, virtual, requests):
    lengths, wanted, stays, said = map(list, zip(*requests, strict=True))
    held = sum(pages_between(0, length, page_size) for length in lengths)
    with pytest.MonkeyPatch.context() as patch:
        made = allocator(held + spare, page_size, patch, held + virtual)
    rows = torch.zeros(len(requests), WIDTH, dtype=torch.int32)
    asked = running(rows, lengths, made, page_size)
    pool, tails = made.memory.pool, Tails(made, rows)

    def needed(requests, tokens):
        return made.decode_pages(requests, [lengths[row] for row in requests], tokens)

    each = list(range(len(lengths)))
    taken = tails.take(list(zip(asked, wanted, strict=True)))
    counts = [tail.count for tail in taken]
    assert SPANS * spare - pool.free == sum(
        needed([row], count) for row, count in zip(each, counts, strict=True)
    )
    assert needed(each, 3) == sum(needed([row], 3) for row in each)
    assert counts == one_after_the_other(lengths, wanted, spare * SPANS, page_size, virtual)
    ends = [length + count for length, count in zip(lengths, counts, strict=True)]
    assert pool.free == SPANS * (held + spare - sum(pages_between(0, end, page_size) for end in ends))
    own = [rows[row, :end].tolist() for row, end in enumerate(ends)]
    assert len({slot for slots in own for slot in slots}) == sum(ends)
    for slots in own:
        assert min(slots) >= page_size and [slot % page_size for slot in slots] == [
            at % page_size for at in range(len(slots))
        ]
        assert all(made.memory.shared.depth(slot // page_size) == SPANS for slot in slots)

    drafted = [min(count, most) for count, most in zip(counts, said, strict=True)]
    taken = tails.shrink(taken, drafted)  # a draft may say less than there is room for
    ends = [length + count for length, count in zip(lengths, drafted, strict=True)]
    assert pool.free == SPANS * (held + spare - sum(pages_between(0, end, page_size) for end in ends))
    kept = [min(count, stay) for count, stay in zip(drafted, stays, strict=True)]
    tails.settle(taken, kept)
    ends = [length + count for length, count in zip(lengths, kept, strict=True)]
    assert [request.kv.kv_allocated_len for request in asked] == ends
    assert [request.kv.kv_committed_len for request in asked] == ends
    assert pool.free == SPANS * (held + spare - sum(pages_between(0, end, page_size) for end in ends))
    left = {slot // page_size for row, end in enumerate(ends) for slot in rows[row, :end].tolist()}
    assert all(made.memory.shared.depth(page) == SPANS for page in left)


@given(
    page_size=st.sampled_from([1, 4]),
    prompt=st.integers(1, 12),
    counts=st.tuples(*[st.integers(0, 9)] * 3),
)
@settings(max_examples=60)
def test_tables_of_their_own_end_where_the_request_ends(page_size, prompt, counts):
    """Of a request whose upper layers keep less: as if only what stays had been computed."""
    drafted, kept = min(counts[:2]), min(counts)
    free, lengths = [], []
    for steps in ((counts[0], drafted, kept), (kept, kept, kept)):
        with pytest.MonkeyPatch.context() as patch:
            made = allocator(20, page_size, patch)
        rows = torch.zeros(1, WIDTH, dtype=torch.int32)
        made.memory.open(0, build({"depth_cutoff": 1, "anchors": "bos"}, SPANS, 1), prompt)
        asked = running(rows, [prompt], made, page_size)
        tails = Tails(made, rows)
        left = made.memory.pool.free - made.decode_pages([0], [prompt], steps[0])
        taken = tails.take([(asked[0], steps[0])])
        assert [tail.count for tail in taken] == [steps[0]]
        assert made.memory.pool.free == left
        tails.settle(tails.shrink(taken, [steps[1]]), [steps[2]])
        free.append((made.memory.pool.free, made.virtual_size()))
        lengths.append(made.memory.tables.lengths(0))
    assert lengths[0] == lengths[1] and len(lengths[0]) > 0
    assert free[0] == free[1]


@pytest.mark.parametrize("page_size", [1, 4])
def test_a_step_fits_where_each_beam_finds_a_page(page_size, monkeypatch):
    """The most that a step of them takes: one request goes on with two beams, one with five, one alone."""
    lengths, widths = [3, 4, 8], [2, 5, None]
    held = sum(pages_between(0, length, page_size) for length in lengths)
    fitted = []
    for spare in range(12):
        made = allocator(held + spare, page_size, monkeypatch)
        asked = running(torch.zeros(3, WIDTH, dtype=torch.int32), lengths, made, page_size)
        for request, width in zip(asked, widths, strict=True):
            request.beam_group = None if width is None else SimpleNamespace(beam_width=width)
        fitted.append(made.check_decode_capacity(num_tokens=3, tree_cache=None, requests=asked))
    own = sum(pages_between(length, length + 1, page_size) for length in lengths)
    assert fitted == [spare >= own + 1 + 4 for spare in range(12)]


@pytest.mark.parametrize(
    ("drafts", "device", "most"), [(False, "meta", 3), (True, "meta", 2), (True, "cpu", 3)]
)
def test_a_draft_on_a_gpu_takes_its_kv_from_the_pool(drafts, device, most, monkeypatch):
    """On a CPU it has its own, of each of the virtual slots."""
    spec = SimpleNamespace(speculative_draft_model_path="draft" if drafts else None)
    monkeypatch.setattr(kv_allocator, "get_spec", lambda: spec)
    pool = SimpleNamespace(size=40 * SPANS, spans=SPANS, layer_num=SPANS, span=1)
    made = DepthAllocator(40, 4, torch.float32, device, pool, need_sort=False)
    assert made.virtual_tokens == 40 * most and len(made.free_pages) == 10 * most
