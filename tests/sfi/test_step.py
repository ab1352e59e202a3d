"""A step as data: who reads what, whose selection is renewed, and where it goes."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fathom.runtime.sfi.config import SfiConfig
from fathom.runtime.sfi.step import plan_step

CONFIG = SfiConfig(sink=3, recent=10, selected=6)

requests = st.lists(
    st.tuples(
        st.integers(1, 50),  # length
        st.booleans(),  # slow
        st.sampled_from([-1, 0, 1]),  # a run of its own, or none
        st.integers(0, 6),  # selected entries it holds
    ),
    min_size=1,
    max_size=6,
)


@settings(deadline=None)
@given(batch=requests, capacity=st.integers(0, 6), order=st.randoms())
def test_plan_step(batch, capacity, order):
    rows = list(range(10, 10 + len(batch)))
    order.shuffle(rows)
    lengths, slow, has_run, chosen = map(np.array, zip(*batch, strict=True))
    start = np.where(has_run < 0, -1, np.arange(len(batch)) * CONFIG.compact_tokens)
    fresh = (lengths < CONFIG.sink) | (start < 0)
    slow = slow | fresh & (start >= 0)  # a request that never had a selection is slow
    held = np.where(fresh, 0, CONFIG.sink + chosen)
    step = plan_step(np.array(rows), lengths, slow, start, held, capacity, 2, CONFIG)

    renewed = []
    for i, (row, begin, end, run, count, evidence) in enumerate(step.plan.packed.tolist()):
        n = int(lengths[i])
        assert (row, end) == (rows[i], n)
        if bool(slow[i]) or int(start[i]) < 0:
            assert (begin, count) == (0, 0)
        else:
            # Sink and selection from the compact buffer, the recent tokens in place, nothing twice.
            assert (run, count) == (int(start[i]), int(held[i]))
            assert begin == max(n - CONFIG.recent, CONFIG.sink)
        can = bool(slow[i]) and int(start[i]) >= 0 and n >= CONFIG.sink and len(renewed) < capacity
        assert bool(step.refreshed[i]) == can == (evidence >= 0)
        if can:
            assert evidence == len(renewed)
            low, high = CONFIG.sink, max(n - CONFIG.recent, 0)
            wanted = max(high - low, 0)
            assert int(step.held[i]) == CONFIG.sink + min(wanted, CONFIG.selected)
            renewed.append((row, wanted, int(start[i]), high))
        else:
            assert int(step.held[i]) == int(held[i])
    taken = step.refresh.rows.tolist()
    assert taken == [row for row, *_ in renewed] + [-1] * (capacity - len(renewed))
    for entry in range(capacity):
        low, high = int(step.refresh.begin[entry]), int(step.refresh.end[entry])
        if entry < len(renewed):
            _, wanted, run, last = renewed[entry]
            assert high - low == wanted and high == last and int(step.refresh.start[entry]) == run
        else:
            assert low == high


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"refresh_budget": 3, "minimum_gap": 4}, "minimum_gap must be at most refresh_budget = 3"),
        ({"selected": 0}, "selected must be >= 1"),
        ({"sink": -1}, "sink must be >= 0"),
    ],
)
def test_illegal_numbers_are_refused(values, message):
    with pytest.raises(ValueError, match=message):
        SfiConfig(**values)
