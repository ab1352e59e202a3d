"""Views in device buffers: what kernels read is the view, whatever was there before, and nothing moves."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fathom.kernels.paged_decode import paged_decode_reference
from fathom.kernels.paged_extend import paged_extend_reference
from fathom.runtime.kv.device_view import DeviceTables
from fathom.runtime.kv.view import SpanView

SLOTS, HEADS, KV_HEADS, DIM = 120, 4, 2, 8


def span_view(lengths, new, seed=0):
    """Segments that read ``lengths`` random slots, the last ``new`` of them their own."""
    rng = np.random.default_rng(seed)
    parts = [rng.permutation(SLOTS - 1)[:length] + 1 for length in lengths]
    bounds = [np.concatenate([[0], np.cumsum(counts)]).astype(np.int64) for counts in (lengths, new)]
    write = [part[length - own :] for part, length, own in zip(parts, lengths, new, strict=True)]
    empty = np.zeros(0, np.int64)
    return SpanView(
        np.concatenate([empty, *parts]).astype(np.int32).__getitem__,
        *bounds,
        np.concatenate([empty, *write]).astype(np.int64),
    )


def pool():
    torch.manual_seed(1)
    return torch.randn(SLOTS, KV_HEADS, DIM), torch.randn(SLOTS, KV_HEADS, DIM)


def addresses(there):
    tensors = (there.table, there.begin, there.lengths, there.prefixes, there.bounds, there.write)
    return [(tensor.data_ptr(), tensor.stride(), tensor.shape) for tensor in tensors]


def page_table(there):
    """The table as kernels read it: a row begins at every entry and goes on as far as it is asked for."""
    return torch.nn.functional.pad(there.table[:, 0], (0, SLOTS)).unfold(0, SLOTS, 1)


def numbers_of(there, segments):
    """What a kernel finds: the slots of each segment."""
    flat = there.table[:, 0]
    return [
        flat[begin : begin + length].tolist()
        for begin, length in zip(
            there.begin[:segments].tolist(), there.lengths[:segments].tolist(), strict=True
        )
    ]


segments = st.lists(
    st.integers(1, 9).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n))), min_size=1, max_size=6
)


@given(steps=st.lists(segments, min_size=1, max_size=5))
@settings(max_examples=40)
def test_each_fill_is_the_view_and_nothing_else(steps):
    tables = DeviceTables(spans=2, segments=2, entries=5, rows=3, device="cpu")
    for number, step in enumerate(steps):
        view = span_view(*map(list, zip(*step, strict=True)), seed=number)
        there = tables.fill(number % 2, view)
        parts = np.split(view.slots, view.entry[1:-1])
        assert numbers_of(there, len(step)) == [part.tolist() for part in parts]
        assert there.write.tolist() == view.write.tolist()
        assert there.bounds.tolist() == view.query.tolist()
        assert there.prefixes.tolist() == [length - new for length, new in step]
        assert there.most_new == max(new for _, new in step)
        assert there.most_prefix == max(length - new for length, new in step)
        assert tables.fill(number % 2, view) is there


def test_decode_steps_of_any_lengths_find_their_buffers_in_place():
    """Requests grow, leave and come, and a batch is filled up to its size: a captured launch would find it all."""
    tables = DeviceTables(1, segments=8, entries=64, rows=8, device="cpu")
    places = set()
    for step, lengths in enumerate([[3, 9, 1], [4, 10, 2], [5, 3], [30, 1, 1, 1], [7]]):
        view = span_view(lengths, [1] * len(lengths), step)
        there = tables.fill(0, view, padded_to=4)
        places.add(tuple(addresses(there)))
        padded = 4 - len(lengths)
        assert numbers_of(there, 4) == [
            *[part.tolist() for part in np.split(view.slots, view.entry[1:-1])],
            *[[0]] * padded,  # the dummy slot
        ]
        assert there.write.tolist() == [*view.write.tolist(), *[0] * padded]
        assert there.prefixes[len(lengths) :].tolist() == [0] * padded
        assert there.bounds.diff().tolist() == [1] * 4
    assert len(places) == 1 and tables.grown == 0


def test_passes_over_several_rows_find_their_buffers_in_place_too():
    """Any segments with so many rows are filled up to as many of each; those without a row have no entries."""
    tables = DeviceTables(1, segments=8, entries=64, rows=8, device="cpu")
    places = set()
    for step, new in enumerate([[3, 1, 2], [6], [1, 1, 1, 1, 1, 1], [2, 1], [4, 2]]):
        view = span_view([count + 3 * step for count in new], new, step)
        there = tables.fill(0, view, padded_to=6)
        places.add(tuple(addresses(there)))
        padded = 6 - sum(new)
        behind = [[0]] * padded + [[]] * (6 - len(new) - padded)
        assert numbers_of(there, 6) == [*map(list, np.split(view.slots, view.entry[1:-1])), *behind]
        assert there.write.tolist() == [*view.write.tolist(), *[0] * padded]
        assert there.prefixes.tolist() == [3 * step] * len(new) + [0] * (6 - len(new))
        assert there.bounds.diff().tolist() == [*new, *map(len, behind)]
    assert len(places) == 1 and tables.grown == 0


@pytest.mark.parametrize("sizes", [(1, 64, 64), (8, 2, 64), (8, 64, 1)])
def test_what_does_not_fit_gets_larger_buffers(sizes):
    tables = DeviceTables(1, *sizes, device="cpu")
    for seed, lengths in enumerate([[9, 9, 9, 9, 9], [3, 4, 9, 2, 2], [9, 9, 9, 9, 9]]):
        view = span_view(lengths, [2] * 5, seed)
        parts = np.split(view.slots, view.entry[1:-1])
        assert numbers_of(tables.fill(0, view), 5) == [part.tolist() for part in parts]
    assert tables.grown == 1


def test_steps_that_fit_stay_in_the_first_buffers():
    """A step that is too large for them takes larger ones; captured launches find the next one where it was."""
    tables = DeviceTables(1, segments=8, entries=64, rows=8, device="cpu")
    tables.widen(9, 9)
    places = []
    for seed, lengths in enumerate([[3, 9], [50, 40], [5, 3], [60, 50], [9, 2]]):
        view = span_view(lengths, [1, 1], seed)
        there = tables.fill(0, view, padded_to=9)
        places.append(tuple(addresses(there)))
        parts = np.split(view.slots, view.entry[1:-1])
        assert numbers_of(there, 9) == [*(part.tolist() for part in parts), *[[0]] * 7]
        assert there.first.tolist() == there.begin[:2].tolist()
    assert len({places[0], places[2], places[4]}) == 1 and places[1] == places[3] != places[0]
    assert tables.grown == 1


def test_the_flat_list_is_a_page_table():
    """Through the kernels' references: attention of each segment over its own slots."""
    keys, values = pool()
    lengths, new = [7, 1, 12], [1, 1, 1]
    view = span_view(lengths, new)
    there = DeviceTables(1, 4, 40, 4, "cpu").fill(0, view)
    query = torch.randn(3, HEADS, DIM)
    got, _ = paged_decode_reference(query, keys, values, page_table(there), there.begin, there.lengths, 0.3)
    for row, slots in enumerate(np.split(view.slots, view.entry[1:-1])):
        k, v = (
            x[torch.from_numpy(slots).long()].repeat_interleave(HEADS // KV_HEADS, 1) for x in (keys, values)
        )
        weights = (torch.einsum("hd,nhd->hn", query[row], k) * 0.3).softmax(-1)
        torch.testing.assert_close(got[row], torch.einsum("hn,nhd->hd", weights, v))


def test_new_tokens_follow_their_prefixes():
    keys, values = pool()
    view = span_view([7, 3, 12], [2, 3, 1])
    there = DeviceTables(1, 4, 40, 8, "cpu").fill(0, view)
    query, own = torch.randn(6, HEADS, DIM), torch.from_numpy(view.write)
    got, _ = paged_extend_reference(
        query,
        *(keys[own], values[own], keys, values),
        *(page_table(there), there.begin, there.prefixes, there.bounds, 0.3),
    )
    # Row by row over the slots up to its own.
    for i, slots in enumerate(np.split(view.slots, view.entry[1:-1])):
        first, last = view.query[i : i + 2]
        for row in range(first, last):
            seen = torch.from_numpy(slots[: len(slots) - (last - 1 - row)]).long()
            one = query[row : row + 1], keys, values, seen.int().view(1, -1), torch.tensor([0])
            want, _ = paged_decode_reference(*one, torch.tensor([len(seen)]), 0.3)
            torch.testing.assert_close(got[row], want[0])
