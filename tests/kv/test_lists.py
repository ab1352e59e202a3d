"""Lists that stay where they are while a draft decodes over them: what kernels read and write, token by token."""

from itertools import chain

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fathom.runtime.kv.device_view import DeviceTables
from fathom.runtime.kv.lists import ListView, SlotLists
from fathom.runtime.kv.view import SpanView


def lists_of(sizes, seed=0):
    """Of each request random slots, apart from each other."""
    slots = np.random.default_rng(seed).permutation(1000)[: sum(sizes)].astype(np.int32) + 1
    return SlotLists(list(torch.from_numpy(slots).split(list(sizes))))


def expect(there, lists, read, padded_to=0):
    """The view holds each segment's slots and those of its new tokens, and reads the dummy slot beyond.

    Filled up to so many rows, it has as many segments; the last ones may have no row.
    """
    flat, rows = there.table[:, 0], sum(new for _, _, new in read)
    padding = max(padded_to - rows, 0)
    empty = max(padded_to - len(read) - padding, 0) if padded_to >= rows else 0
    found = zip(there.begin.tolist(), there.lengths.tolist(), strict=True)
    assert [flat[begin : begin + length].tolist() for begin, length in found] == [
        *[lists.parts[which][:length].tolist() for which, length, _ in read],
        *[[0]] * padding,
        *[[]] * empty,
    ]
    written = [lists.parts[which][length - new : length].tolist() for which, length, new in read]
    assert there.write.tolist() == [*chain(*written), *[0] * padding]
    assert there.prefixes.tolist() == [*[length - new for _, length, new in read], *[0] * (padding + empty)]
    assert there.bounds.diff().tolist() == [*[new for _, _, new in read], *[1] * padding, *[0] * empty]


@st.composite
def rounds(draw):
    """Sizes of lists, and passes over them: each of some lists (which, how much is read, how much of it is new)."""
    sizes = draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    segment = st.integers(0, len(sizes) - 1).flatmap(
        lambda i: st.integers(1, sizes[i]).flatmap(
            lambda n: st.tuples(st.just(i), st.just(n), st.integers(1, n))
        )
    )
    unlike = st.lists(segment, min_size=1, max_size=4, unique_by=lambda part: part[0])
    return sizes, draw(st.lists(st.tuples(unlike, st.integers(0, 14)), min_size=1, max_size=4))


@given(steps=st.lists(rounds(), min_size=1, max_size=3))
@settings(max_examples=40)
def test_each_pass_reads_the_beginnings_of_its_lists(steps):
    """On a device, in buffers that may be too small at first; and on the host, by the view itself."""
    tables = DeviceTables(spans=1, segments=2, entries=9, rows=3, device="cpu")
    for seed, (sizes, passes) in enumerate(steps):
        lists = lists_of(sizes, seed)
        for read, padded_to in passes:
            view = ListView(lists, *zip(*read, strict=True))
            expect(tables.fill(0, view, padded_to), lists, read, padded_to)
            assert not {"slots", "write"} & set(view.__dict__)  # nobody has asked for them
            whole = [lists.parts[which][:length].tolist() for which, length, _ in read]
            assert view.slots.tolist() == list(chain(*whole))
            new = [part[len(part) - count :] for part, (_, _, count) in zip(whole, read, strict=True)]
            assert view.write.tolist() == list(chain(*new)) and view.write.dtype == np.int64


def test_lists_are_placed_once_for_all_tokens_and_buffers_stay():
    tables = DeviceTables(1, segments=4, entries=60, rows=4, device="cpu")
    lists, places = lists_of([12, 30, 5]), set()
    for which, lengths in [((0, 1, 2), (9, 27, 4)), ((0, 1), (10, 28)), ((1,), (29,)), ((1,), (30,))]:
        there = tables.fill(0, ListView(lists, which, lengths, [1] * len(which)), padded_to=4)
        expect(there, lists, [(i, n, 1) for i, n in zip(which, lengths, strict=True)], 4)
        places.add(tuple(x.data_ptr() for x in (there.table, there.begin, there.lengths, there.write)))
    assert tables.placed == len(places) == 1
    assert not there.packed and tables.fill(0, ListView(lists_of([3, 4]), [0, 1], [3, 4], [2, 2])).packed


def test_lists_are_placed_again_after_something_else_and_in_larger_buffers():
    tables = DeviceTables(1, segments=4, entries=20, rows=4, device="cpu")
    lists, read = lists_of([12, 6]), [(0, 11, 1), (1, 5, 1)]
    wide = [(0, 11, 4), (1, 5, 3)]
    other = SpanView(np.full(9, 7, np.int32).__getitem__, *[np.array([0, 9])] * 2, np.full(9, 7))
    for step in (read, other, read, wide, read, wide):
        if step is other:
            tables.fill(0, other)
        else:
            expect(tables.fill(0, ListView(lists, *zip(*step, strict=True))), lists, step)
    assert tables.grown == 1 and tables.placed == 5


def test_a_capture_begins_with_dummies_alone():
    there = DeviceTables(1, 4, 20, 4, "cpu").fill(0, ListView(SlotLists([]), [], [], []), padded_to=3)
    expect(there, None, [], 3)
