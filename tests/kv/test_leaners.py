"""Virtual pages on which drafts lean, against sets of pages."""

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from fathom.runtime.kv.leaners import Leaners

PAGES = 12


class LeaningMachine(RuleBasedStateMachine):
    """A prefix cache that takes pages and lets them go, and requests that lean on what it has."""

    def __init__(self):
        super().__init__()
        self.leaners = Leaners(PAGES)
        self.begin()

    def begin(self):
        self.free, self.cached, self.rows = set(range(1, PAGES + 1)), set(), {}

    @property
    def leaned(self):
        return set().union(*self.rows.values())

    @precondition(lambda self: self.free)
    @rule(data=st.data())
    def cache(self, data):
        pages = data.draw(st.sets(st.sampled_from(sorted(self.free))))
        self.free -= pages
        self.cached |= pages

    @precondition(lambda self: self.cached)
    @rule(data=st.data(), row=st.integers(0, 5))
    def lean(self, data, row):
        if row not in self.rows:
            self.rows[row] = data.draw(st.sets(st.sampled_from(sorted(self.cached)), min_size=1))
            self.leaners.add(row, np.array(sorted(self.rows[row])))

    @precondition(lambda self: self.cached)
    @rule(data=st.data())
    def evict(self, data):
        pages = data.draw(st.sets(st.sampled_from(sorted(self.cached)), min_size=1))
        told = set(self.leaners.keep(np.array(sorted(pages))).tolist())
        assert told == pages - self.leaned
        self.cached -= pages
        self.free |= told

    @rule(row=st.integers(0, 5))
    def end(self, row):
        leaned = self.rows.pop(row, set())
        told = self.leaners.remove(row).tolist()
        assert len(told) == len(set(told))
        assert set(told) == leaned - self.leaned - self.cached
        self.free |= set(told)

    @rule(rows=st.sets(st.integers(0, 5)))
    def would_end(self, rows):
        others = set().union(*(pages for row, pages in self.rows.items() if row not in rows))
        left = self.leaned - others
        assert self.leaners.left_by(sorted(rows)) == (len(left - self.cached), len(left & self.cached))

    @rule()
    def forget(self):
        self.leaners.clear()
        self.begin()

    @invariant()
    def nobody_gets_a_page_that_is_read(self):
        assert not self.free & (self.leaned | self.cached)
        assert self.free | self.leaned | self.cached == set(range(1, PAGES + 1))

    @invariant()
    def the_counts_are_true(self):
        assert bool(self.leaners) == bool(self.rows)
        assert self.leaners.cached == len(self.leaned & self.cached)
        assert self.leaners.alone == len(self.leaned - self.cached)


LeaningMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
test_leaning_machine = LeaningMachine.TestCase
