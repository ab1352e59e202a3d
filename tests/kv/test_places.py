"""What layers with a sliding window see: by positions, whichever entries there are."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fathom.runtime.kv.device_view import DUMMY, DeviceTables
from fathom.runtime.kv.memory import Growth, KvMemory
from fathom.runtime.kv.near import NearBuffers, near
from fathom.runtime.kv.places import Places
from fathom.runtime.kv.view import Batch, SpanView, Views
from fathom.runtime.plan import SCORED, PrefillPlan, Retention, Step, speed_step

LAYERS = 4


@st.composite
def segments(draw):
    """Where a segment's entries are, and how many there are and are rows."""
    early = np.array(sorted(draw(st.sets(st.integers(0, 30), max_size=12))), np.int64)
    onward = draw(st.integers(int(early[-1]) + 1 if len(early) else 0, 40))
    total = draw(st.integers(max(len(early), 1), len(early) + 12))
    return Places(early, onward), total, draw(st.integers(0, total))


def positions_of(places, total):
    early = places.early.tolist()[:total]
    return [*early, *range(places.onward, places.onward + total - len(early))]


def view_of(parts):
    """Of segments at some places, their slots in order from 1 on."""
    totals, rows = [total for _, total, _ in parts], [new for *_, new in parts]
    entry, query = (np.concatenate([[0], np.cumsum(counts)]).astype(np.int64) for counts in (totals, rows))
    slots = np.arange(1, entry[-1] + 1, dtype=np.int32)
    write = np.zeros(query[-1], np.int64)
    return SpanView(slots.__getitem__, entry, query, write, [places for places, *_ in parts])


def seen_by(parts, window):
    """Of each row the slots that it sees."""
    found, first = [], 1
    for places, total, new in parts:
        where = positions_of(places, total)
        for own in range(total - new, total):
            found.append([first + e for e in range(own + 1) if where[e] >= where[own] - window])
        first += total
    return found


@given(parts=st.lists(segments(), min_size=1, max_size=4), window=st.integers(0, 45))
def test_a_row_sees_the_entries_at_the_last_positions(parts, window):
    view, want = view_of(parts), seen_by(parts, window)
    assert (view.reach(window) + 1).tolist() == [len(seen) for seen in want]
    assert view.reach(-1) is None
    # A row by itself, as in a decode step.
    ends = [(places, total, 1) for places, total, _ in parts]
    assert (view_of(ends).reach(window) + 1).tolist() == [len(seen) for seen in seen_by(ends, window)]


@given(
    parts=st.lists(segments(), min_size=1, max_size=4),
    windows=st.sets(st.integers(0, 45), min_size=1, max_size=2),
    more=st.integers(0, 3),
)
def test_a_device_reads_what_rows_see(parts, windows, more):
    """By itself, and filled up to more rows in buffers that hold another view already."""
    view = view_of(parts)
    rows, segments = int(view.query[-1]), len(parts)
    padded_to = max(rows, segments, 1) + more
    # Of the first span's layers none has a window.
    buffers = NearBuffers([[], sorted(windows)], padded_to, padded_to, torch.device("cpu"))
    buffers.fill([view_of([(Places(np.zeros(0, np.int64), 0), 9, 2)])] * 2, padded_to)
    most = buffers.fill([view, view], padded_to)
    flat = DeviceTables(1, segments, int(view.entry[-1]), max(rows, 1), "cpu").fill(0, view).table[:, 0]
    for window in windows:
        want = seen_by(parts, window)
        alone = near(view, window, torch.device("cpu"))
        filled = buffers.near(1, window, padded_to, padded_to, most)
        for read in (alone, filled):
            spans = zip(read.first[:rows].tolist(), read.lengths[:rows].tolist(), strict=True)
            assert [flat[begin : begin + length].tolist() for begin, length in spans] == want
            assert (read.reach[:rows] + 1).tolist() == [len(seen) for seen in want]
            for i, (begin, stop) in enumerate(zip(view.query[:-1], view.query[1:], strict=True)):
                if begin < stop:
                    first, before = int(read.begin[i]), int(read.prefixes[i])
                    union = sorted({slot for seen in want[begin:stop] for slot in seen})
                    assert flat[first : first + before + stop - begin].tolist() == union
                    assert before <= read.most_prefix
        assert filled.first[rows:].tolist() == [DUMMY] * (padded_to - rows)
        assert filled.lengths[rows:].tolist() == [1] * (padded_to - rows)


def memory_with(plan, prompt, length):
    """A request of one row, its tables as long as after ``length`` tokens."""
    memory = KvMemory(pages=400, page_size=1, spans=LAYERS, virtual_pages=100)
    memory.open(0, plan, prompt)
    memory.grow([Growth(0, 0, length, np.arange(1, length + 1))])
    return memory


def test_positions_of_a_request_above_its_steps():
    """SpecPrefill's prompt, of which FastKV lets less go on, and SPEED the anchor and the last token."""
    prompt, length = 20, 23
    steps = (
        Step(0, "SpecPrefill", SCORED, kept=6),
        Step(1, "FastKV", SCORED, kept=3),
        Step(3, "SPEED"),
    )
    memory = memory_with(PrefillPlan(LAYERS, 1, steps), prompt, length)
    memory.choose(0, 0, np.array([0, 3, 4, 9, 18, 19]))
    memory.choose(0, 1, np.array([0, 9, 19]))
    new = [20, 21, 22]
    assert positions_of(memory.places(0, 0), 9) == [0, 3, 4, 9, 18, 19, *new]
    assert positions_of(memory.places(0, 1), 6) == positions_of(memory.places(0, 2), 6) == [0, 9, 19, *new]
    assert positions_of(memory.places(0, 3), 5) == [0, 19, *new]
    memory.close(0)
    memory.open(0, PrefillPlan(LAYERS, 1, (Step(0, "SpecPrefill", SCORED, kept=2),)), prompt)
    memory.choose(0, 0, np.array([0, 19]))
    assert positions_of(memory.places(0, 3), 4) == [0, 19, 20, 21]


@pytest.mark.parametrize("anchors", ["bos", "none"])
def test_speeds_entries(anchors):
    step = speed_step({"depth_cutoff": 2, "anchors": anchors}, LAYERS)
    memory = memory_with(PrefillPlan(LAYERS, 1, (step,)), 20, 22)
    view = Views(memory, Batch.plain(np.zeros(1, np.int64), np.array([22]), [np.arange(22)], np.ones(1, int)))
    anchored = anchors == "bos"
    # At position 21, of 0, 19, 20 and 21.
    assert [view[3].reach(window).tolist() for window in (0, 1, 20, 21)] == [[0], [1], [2], [2 + anchored]]
    assert [view[1].reach(window).tolist() for window in (0, 1, 20, 21)] == [[0], [1], [20], [21]]


def test_what_is_kept_of_a_prompt_are_its_last_entries():
    """For layers with a window; before the prompt is complete, all of it is there."""
    prompt, length = 20, 22
    retention = Retention(0.25, 5, 2, 7, "saliency")
    steps = (Step(2, "FastKV", SCORED, kept=8),)
    memory = memory_with(PrefillPlan(LAYERS, 1, steps, retention), prompt, length)
    chosen = np.array([1, 2, 5, 7, 11, 13, 18, 19])
    memory.choose(0, 2, chosen)
    assert positions_of(memory.places(0, 0), 20) == list(range(20))
    assert positions_of(memory.places_kept(0, 0), 7) == [15, 16, 17, 18, 19, 20, 21]
    assert positions_of(memory.places_kept(0, 3), 7) == [7, 11, 13, 18, 19, 20, 21]
    memory.settle(0)
    assert positions_of(memory.places(0, 1), 7) == [15, 16, 17, 18, 19, 20, 21]
    assert positions_of(memory.places(0, 2), 7) == [7, 11, 13, 18, 19, 20, 21]
