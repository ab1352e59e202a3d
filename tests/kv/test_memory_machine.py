"""A random life of the KV memory: whatever happens in whatever order, the ledger balances and nobody shares a page
that somebody writes to."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fathom.runtime.kv.audit import check
from fathom.runtime.kv.memory import Growth, KvMemory, pages_held
from fathom.runtime.kv.pages import OutOfPages
from fathom.runtime.plan import PrefillPlan, Step

LAYERS, SPAN = 4, 1
PLANS = [
    PrefillPlan(LAYERS, SPAN),
    *(PrefillPlan(LAYERS, SPAN, (Step(k, "SPEED", anchor=anchor),)) for k in (1, 2, 3) for anchor in (0, 1)),
]


class Request:
    """What an engine knows of a request: its row, its virtual pages, and how far it has come."""

    def __init__(self, row, plan, prompt, prefix):
        self.row, self.plan, self.prompt = row, plan, prompt
        self.virtual = list(prefix)  # pages, the cached ones first
        self.locked = len(prefix)
        self.length = 0
        self.prefix = prefix


class MemoryMachine(RuleBasedStateMachine):
    """The engine's moves, with an engine small enough to be checked by eye."""

    @initialize(page_size=st.sampled_from([1, 4]), pages=st.integers(20, 120))
    def start(self, page_size, pages):
        self.size = page_size
        self.memory = KvMemory(pages, page_size, LAYERS // SPAN, virtual_pages=pages)
        self.free_virtual = list(range(pages, 0, -1))
        self.requests: dict[int, Request] = {}
        self.cache: list[tuple[PrefillPlan, list[int]]] = []  # chains of whole pages
        self.rows = list(range(1, 200))

    # --- moves ---

    @rule(plan=st.sampled_from(PLANS), prompt=st.integers(1, 30), hit=st.booleans(), data=st.data())
    def admit(self, plan, prompt, hit, data):
        """A new request, on a cached prefix of the same plan if there is one."""
        prefix: list[int] = []
        chains = [chain for owner, chain in self.cache if owner == plan]
        if hit and chains:
            chain = data.draw(st.sampled_from(chains))
            prefix = chain[: (prompt - 1) // self.size]
        row = self.rows.pop()
        self.memory.open(row, plan, prompt)
        request = self.requests[row] = Request(row, plan, prompt, prefix)
        request.length = len(prefix) * self.size

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), tokens=st.integers(1, 12))
    def extend(self, data, tokens):
        """A chunk of the prompt, or (past its end) decode steps."""
        request = self.requests[data.draw(st.sampled_from(sorted(self.requests)))]
        end = request.length + tokens
        end = min(end, request.prompt) if request.length < request.prompt else request.length + 1
        missing = -(-end // self.size) - len(request.virtual)
        if missing > len(self.free_virtual):
            return
        new = self.free_virtual[len(self.free_virtual) - missing :]
        growth = [Growth(request.row, request.length, end, np.array(new, np.int64))]
        need, free = self.memory.need(growth), self.memory.pool.free
        try:
            self.memory.grow(growth)
        except OutOfPages:
            assert need > free
            assert self.memory.pool.free == free
            return
        assert free - self.memory.pool.free == need
        del self.free_virtual[len(self.free_virtual) - missing :]
        request.virtual += new
        request.length = end

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), insert=st.booleans())
    def finish(self, data, insert):
        """Finished (its whole pages go to the cache), aborted or retracted (they are freed)."""
        request = self.requests.pop(data.draw(st.sampled_from(sorted(self.requests))))
        whole = request.virtual[: request.length // self.size]
        own = request.virtual[request.locked :]
        if insert and len(whole) > request.locked:
            self.cache.append((request.plan, whole))
            own = request.virtual[len(whole) :]
        self.memory.close(request.row)
        self.release(own)

    @precondition(lambda self: self.cache)
    @rule()
    def evict(self):
        """Drop the chains that no request stands on, last pages first."""
        plan, chain = self.cache.pop()
        used = {page for r in self.requests.values() for page in r.virtual}
        used |= {page for _, other in self.cache for page in other}
        gone = [page for page in chain if page not in used]
        if not gone and used & set(chain):
            self.cache.append((plan, chain))
        self.release(gone)

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), by=st.integers(0, 5))
    def roll_back(self, data, by):
        """Drop the last entries of every private table and append them again."""
        row = data.draw(st.sampled_from(sorted(self.requests)))
        for span, length in self.memory.tables.lengths(row).items():
            before = self.memory.tables.slots(row, span)
            keep = max(length - by, 0)
            self.memory.tables.truncate(row, span, keep)
            assert (self.memory.tables.slots(row, span) == before[:keep]).all()
            self.memory.tables.append(span, [(row, length - keep)])

    # --- what must hold after every move ---

    @invariant()
    def the_ledger_balances(self):
        if not hasattr(self, "memory"):
            return
        found = check(self.memory.pool, self.memory.shared, self.memory.tables, self.cached())
        assert found.free + found.cached + found.held == found.total

    @invariant()
    def nobody_writes_where_somebody_reads(self):
        if not hasattr(self, "memory"):
            return
        writable: list[int] = []
        for request in self.requests.values():
            own = np.array(request.virtual[request.locked :], np.int64)
            backing = self.memory.shared.backing[: request.plan.shared_spans, own]
            assert (backing > 0).all()
            writable += backing.ravel().tolist() + self.memory.tables.pages(request.row).tolist()
        assert len(writable) == len(set(writable))
        cached = self.memory.shared.backing[:, self.cached()].ravel()
        assert not set(writable) & set(cached[cached > 0].tolist())

    @invariant()
    def slots_are_those_of_the_pages(self):
        def plainly(pages, tokens):
            entry = np.arange(tokens)
            return (pages[entry // self.size].astype(np.int64) * self.size + entry % self.size).tolist()

        for request in getattr(self, "requests", {}).values():
            for span, length in self.memory.tables.lengths(request.row).items():
                found = self.memory.tables.slots(request.row, span)
                assert found.tolist() == plainly(self.memory.tables.pages(request.row, span), length)
            virtual = np.array(plainly(np.array(request.virtual), request.length), np.int64)
            for span in range(request.plan.shared_spans):
                physical = self.memory.shared.backing[span, request.virtual]
                wanted = plainly(physical, request.length)
                assert self.memory.shared.run(span, virtual).tolist() == wanted
                assert self.memory.shared.slots(span, virtual).tolist() == wanted

    @invariant()
    def requests_hold_what_the_formula_says(self):
        for request in getattr(self, "requests", {}).values():
            if request.length > len(request.prefix) * self.size:
                backing = self.memory.shared.backing[:, request.virtual]
                held = np.count_nonzero(backing) + len(self.memory.tables.pages(request.row))
                assert held == pages_held(request.plan, request.length, request.prompt, self.size)

    def cached(self):
        running = {page for r in self.requests.values() for page in r.virtual[r.locked :]}
        return np.array(sorted({p for _, chain in self.cache for p in chain} - running), np.int64)

    def release(self, virtual):
        self.memory.shared.release(np.array(virtual, np.int64))
        self.free_virtual += virtual


MemoryMachine.TestCase.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
test_memory_machine = pytest.mark.timeout(120)(MemoryMachine.TestCase)
