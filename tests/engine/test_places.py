"""What the CPU backend reads for a segment, and which segments go to the kernel for few queries."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fathom.runtime.config import SPECS
from fathom.runtime.kv.view import SpanView
from fathom.runtime.sglang_host.attention.cpu_attention import (
    FEW_QUERIES,
    SHORT_RUN,
    _few_queries,
    _place,
    _read,
)

POOL = torch.randn(4000, 3, 2, 4)[:, 1]  # one layer's view of a pool that holds three


@given(
    runs=st.lists(
        st.tuples(st.integers(0, 3000), st.sampled_from([1, 2, SHORT_RUN - 1, SHORT_RUN, 900])), max_size=6
    )
)
@settings(max_examples=80, deadline=None)
def test_what_is_read_is_what_the_slots_name(runs):
    slots = np.concatenate([np.zeros(0, np.int32), *(np.arange(a, a + n, dtype=np.int32) for a, n in runs)])
    got = _read(POOL, _place(slots), torch.float32)
    assert torch.equal(got, POOL[torch.from_numpy(slots).long()])


def test_one_run_is_read_in_place():
    for slots in (np.arange(5, 2000), np.array([7])):
        assert (
            _read(POOL, _place(slots.astype(np.int32)), torch.float32).data_ptr() == POOL[slots[0]].data_ptr()
        )


def test_only_short_runs_need_an_index():
    long, short = np.arange(100, 2100), np.arange(0, 200, 2)
    assert _place(np.concatenate([long, [3000]])) == [slice(100, 2100), slice(3000, 3001)]
    assert isinstance(_place(short), torch.Tensor)


@given(
    segments=st.lists(
        st.tuples(st.integers(0, 90), st.integers(1, 40), st.booleans()), min_size=1, max_size=7
    ),
    most=st.integers(1, 40),
    skips=st.booleans(),
)
@settings(max_examples=80, deadline=None)
def test_segments_of_few_queries_keep_their_rows_and_entries(segments, most, skips):
    before, queries, skipped = (np.array(column) for column in zip(*segments, strict=True))
    entry, query = (np.concatenate([[0], np.cumsum(counts)]) for counts in (before + queries, queries))
    slots = np.random.default_rng(0).permutation(entry[-1]).astype(np.int32)
    view = SpanView(slots.__getitem__, entry, query, np.zeros(0, np.int64))
    few = _few_queries(view, 2, most, -1, skipped if skips else None)
    taken = [i for i, count in enumerate(queries) if count <= most and not (skips and skipped[i])]
    assert np.flatnonzero(few.segments).tolist() == taken
    rows = [row for i in taken for row in range(query[i], query[i + 1])]
    assert (list(range(query[-1])) if few.rows is None else few.rows.tolist()) == rows
    assert np.diff(few.tasks.queries).tolist() == queries[taken].tolist()
    own = [slots[entry[i] : entry[i + 1]].tolist() for i in taken]
    assert few.slots[0].tolist() == [slot for part in own for slot in part]
    assert few.tasks.end.tolist() == np.cumsum([len(part) for part in own]).tolist()


def test_whatever_is_drafted_is_judged_by_the_kernel_that_decodes():
    assert 1 + SPECS["draft_tokens"].high <= FEW_QUERIES
