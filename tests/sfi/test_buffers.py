"""Compact buffers as bookkeeping: runs are disjoint, bounded, accounted for, and come back."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from fathom.runtime.sfi.buffers import CompactRuns, RunShape
from fathom.runtime.sfi.config import SfiConfig

SHAPE = RunShape.of(SfiConfig(), layers=32, kv_heads=8, head_dim=128, value_dim=128, itemsize=2)


def test_size_of_a_run():
    assert SHAPE.tokens == 4 + 2048
    assert SHAPE.bytes == 2052 * 32 * 8 * (128 + 128) * 2
    narrow_values = RunShape.of(SfiConfig(), layers=3, kv_heads=2, head_dim=192, value_dim=128, itemsize=2)
    assert narrow_values.bytes_per_token == 3 * 2 * (192 + 128) * 2


def test_too_small_a_budget_is_refused_with_the_numbers():
    with pytest.raises(
        ValueError, match=f"{SHAPE.bytes - 1} bytes do not hold one compact buffer of {SHAPE.bytes}"
    ):
        CompactRuns(SHAPE, SHAPE.bytes - 1)


class Runs(RuleBasedStateMachine):
    """Any order of acquire and release."""

    def __init__(self):
        super().__init__()
        self.runs, self.model = CompactRuns(SHAPE, 3 * SHAPE.bytes + 5), {}

    @rule(request=st.integers(0, 5))
    def acquire(self, request):
        if request in self.model:
            with pytest.raises(ValueError, match="already owns"):
                self.runs.acquire(request)
            return
        start = self.runs.acquire(request)
        if len(self.model) == 3:
            assert start is None
        else:
            self.model[request] = start

    @rule(request=st.integers(0, 5))
    def release(self, request):
        self.runs.release(request)
        self.model.pop(request, None)

    @invariant()
    def runs_are_disjoint_and_counted(self):
        assert self.runs.count == 3 and self.runs.tokens == 3 * SHAPE.tokens
        assert set(self.model.values()) <= {0, SHAPE.tokens, 2 * SHAPE.tokens}
        assert len(set(self.model.values())) == len(self.model) == len(self.runs)
        assert len(self.model) * SHAPE.bytes <= self.runs.total_bytes


Runs.TestCase.settings = settings(max_examples=25, stateful_step_count=20, deadline=None)
TestRuns = Runs.TestCase
