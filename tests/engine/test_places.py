"""Where the CPU backend finds a segment's KV: what is read is what the slots name, copied only where it must be."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fathom.runtime.sglang_host.cpu_attention import SHORT_RUN, _place, _read

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
