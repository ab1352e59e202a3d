"""A random life of requests whose prompts are propagated and cut down: pages are counted before they are taken,
nothing is lost, and what a request holds afterwards is what its plan says."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fathom.runtime.fastkv.config import FastKVConfig
from fathom.runtime.fastkv.step import propagation_step, retention
from fathom.runtime.kv.audit import check
from fathom.runtime.kv.device_view import DeviceTables
from fathom.runtime.kv.memory import Growth, KvMemory, pages_taken
from fathom.runtime.kv.mirror import PageMirror
from fathom.runtime.kv.pages import OutOfPages, pages_of
from fathom.runtime.kv.prefix import UNBACKED
from fathom.runtime.kv.view import Batch, Views
from fathom.runtime.plan import SCORED, PrefillPlan, Step

LAYERS = 4
WINDOW = 2
ROWS, LONGEST = 40, 4000


class Unknown:
    """Slots that nobody may ask for."""


def plan(prompt, tsp, kept, cutoff, entered):
    """Any combination of the four steps, over spans of one layer; ``entered`` below 1 is SpecPrefill's share."""
    most = max(-(-prompt * entered // 10), 1)
    steps = [Step(0, "SpecPrefill", SCORED, anchor=False, kept=most)] if most < prompt else []
    config = FastKVConfig(2, tsp, kept, window=WINDOW, pool=1)
    step = propagation_step(config, most, cutoff is not None)
    steps += [step] if step else []
    steps += [Step(cutoff, "SPEED")] if cutoff is not None else []
    return PrefillPlan(LAYERS, 1, tuple(steps), retention(config, most))


def slots_of(pages, size, entries):
    return [int(pages[i // size]) * size + i % size for i in range(entries)]


class Request:
    def __init__(self, row, plan, policy, prompt, prefix, size):
        self.row, self.plan, self.policy, self.prompt = row, plan, policy, prompt
        self.virtual, self.locked = list(prefix), len(prefix)
        self.length, self.opened = len(prefix) * size, False


class RetentionMachine(RuleBasedStateMachine):
    @initialize(page_size=st.sampled_from([1, 4]), pages=st.integers(60, 300))
    def start(self, page_size, pages):
        self.size, self.pages = page_size, pages
        self.memory = KvMemory(pages, page_size, LAYERS, virtual_pages=pages)
        self.free_virtual = list(range(pages, 0, -1))
        self.requests: dict[int, Request] = {}
        self.cache: list[tuple[tuple, list[int]]] = []
        self.rows = list(range(1, ROWS))
        self.mirror = PageMirror(self.memory, ROWS, LONGEST, "cpu", block=2)
        self.request_table = torch.zeros(ROWS, LONGEST, dtype=torch.int32)
        self.device = DeviceTables(LAYERS, segments=1, entries=3, rows=1, device="cpu")

    @precondition(lambda self: self.rows)
    @rule(
        policy=st.tuples(
            st.sampled_from([1.0, 0.3]),
            st.sampled_from([1.0, 0.2, 0.6]),
            st.sampled_from([None, 3]),
            st.sampled_from([10, 10, 6]),
        ),
        prompt=st.integers(1, 40),
        hit=st.booleans(),
        data=st.data(),
    )
    def admit(self, policy, prompt, hit, data):
        made, prefix = plan(prompt, *policy), []
        chains = [chain for owner, chain in self.cache if owner == policy]
        if hit and chains and made.shared_spans:
            prefix = data.draw(st.sampled_from(chains))[: made.reusable_tokens(prompt) // self.size]
            if prefix and self.memory.shared.depth(prefix[0]) != made.shared_spans:
                prefix = []
        row = self.rows.pop()
        self.memory.open(row, made, prompt)
        self.requests[row] = Request(row, made, policy, prompt, prefix, self.size)

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), tokens=st.integers(1, 20))
    def extend(self, data, tokens):
        """A chunk of the prompt, which may end with tokens that were generated before, or one more token."""
        request = self.requests[data.draw(st.sampled_from(sorted(self.requests)))]
        end = request.length + (tokens if request.length < request.prompt else 1)
        if not self.grow(request, end):
            return
        if request.length >= request.prompt and self.memory.pending(request.row):
            self.memory.settle(request.row)
            self.hand_over(request)

    def grow(self, request, end):
        new = pages_of(end, self.size) - len(request.virtual)
        if new > len(self.free_virtual):
            return False
        virtual = self.free_virtual[len(self.free_virtual) - new :]
        growth = [Growth(request.row, request.length, end, np.array(virtual, np.int64))]
        need, free = self.memory.need(growth), self.memory.pool.free
        counted = (request.plan, request.length, end, request.prompt, self.size)
        assert need == pages_taken(*counted, request.opened)
        try:
            self.memory.grow(growth)
        except OutOfPages:
            assert need > free == self.memory.pool.free
            return False
        assert free - self.memory.pool.free == need
        del self.free_virtual[len(self.free_virtual) - new :]
        request.virtual += virtual
        request.length, request.opened = end, True
        shared = self.memory.shared.backing[: self.memory.tables.first_private(request.row), request.virtual]
        own = sum(tables.page_count(request.row) for tables in (self.memory.tables, self.memory.retained))
        assert self.memory.held(request.row, end) == np.count_nonzero(shared) + own
        return True

    def hand_over(self, request):
        """The whole pages of the prompt are the cache's; nothing stands behind the others."""
        if request.plan.shared_spans == 0:
            return
        whole = request.prompt // self.size
        if whole > request.locked:
            self.cache.append((request.policy, request.virtual[:whole]))
        self.memory.shared.release(np.array(request.virtual[whole:], np.int64))
        request.locked = max(whole, request.locked)

    @precondition(lambda self: self.requests)
    @rule()
    def decode(self):
        """One more token of each request whose prompt is complete, in one step."""
        growth, ready = [], self.decoding()
        for request in ready:
            new = pages_of(request.length + 1, self.size) - len(request.virtual)
            if new > len(self.free_virtual):
                return
            virtual = [self.free_virtual.pop() for _ in range(new)]
            growth.append(
                Growth(request.row, request.length, request.length + 1, np.array(virtual, np.int64))
            )
            request.virtual += virtual
        need, free = self.memory.need(growth), self.memory.pool.free
        try:
            self.memory.grow(growth)
        except OutOfPages:
            assert need > free == self.memory.pool.free
            for step, request in zip(growth, ready, strict=True):
                del request.virtual[len(request.virtual) - len(step.virtual) :]
                self.free_virtual += step.virtual.tolist()
            return
        assert free - self.memory.pool.free == need
        for request in ready:
            request.length += 1

    def decoding(self):
        return [
            request
            for request in self.requests.values()
            if request.opened and request.length >= request.prompt and not self.memory.pending(request.row)
        ]

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), count=st.integers(1, 6))
    def draft_and_reject(self, data, count):
        """Room for drafted tokens, all of which are rejected."""
        request = self.requests[data.draw(st.sampled_from(sorted(self.requests)))]
        if request.length < request.prompt or not request.opened:
            return
        before, held = request.length, len(request.virtual)
        free = self.memory.pool.free
        if not self.grow(request, before + count):
            return
        self.mirror.refresh([request.row])  # for the step that judges them
        self.memory.shrink(request.row, count)
        self.release(request.virtual[held:])
        del request.virtual[held:]
        request.length = before
        assert self.memory.pool.free == free

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def let_go(self, data):
        """Finished, aborted or taken back, at any point."""
        request = self.requests.pop(data.draw(st.sampled_from(sorted(self.requests))))
        self.memory.close(request.row)
        self.rows.append(request.row)
        self.release(request.virtual[request.locked :])

    @precondition(lambda self: self.cache)
    @rule()
    def evict(self):
        """Whatever no unfinished prompt stands on; finished ones have let go of it."""
        policy, chain = self.cache.pop()
        used = {page for r in self.requests.values() if not self.memory.settled(r.row) for page in r.virtual}
        used |= {page for _, other in self.cache for page in other}
        if used & set(chain):
            self.cache.append((policy, chain))
        else:
            self.release(chain)
            # The rows that left them behind know nothing of it, and must not mind.
            for request in self.requests.values():
                assert (
                    not self.memory.settled(request.row) or self.memory.tables.first_private(request.row) == 0
                )

    @invariant()
    def a_step_reads_the_tables_and_writes_their_ends(self):
        ready = self.decoding() if hasattr(self, "memory") else []
        if not ready:
            return

        tables = self.memory.tables
        new = []  # rows that every span's table has
        for request in ready:
            spans = range(tables.first_private(request.row), LAYERS)
            shortest = min(tables.length(request.row, span) for span in spans) if spans else request.length
            new.append(min(1 + request.length % 3, shortest))
        batch = Batch.plain(
            np.array([request.row for request in ready]),
            np.array([request.length for request in ready]),
            [np.array(slots_of(request.virtual, self.size, request.length)) for request in ready],
            np.array(new),
        )
        views = Views(self.memory, batch)
        padded_to = sum(new) + int(batch.lengths.sum()) % 3
        device_views, device = self.on_a_device(batch, padded_to)
        for span in range(LAYERS):
            wanted = [self.reads(request, span) for request in ready]
            view = views[span]
            assert view.slots.tolist() == [slot for own in wanted for slot in own]
            written = [
                slot for own, count in zip(wanted, new, strict=True) for slot in own[len(own) - count :]
            ]
            assert view.write.tolist() == written
            assert np.diff(view.query).tolist() == new
            there = device.fill(span, device_views[span], padded_to)
            dummies = padded_to - sum(new)
            without_rows = padded_to - len(ready) - dummies
            bounds = [there.begin, there.begin + there.lengths]
            begins_and_ends = zip(*(bound.tolist() for bound in bounds), strict=True)
            found = [there.table[begin:end, 0].tolist() for begin, end in begins_and_ends]
            assert found == wanted + [[UNBACKED]] * dummies + [[]] * without_rows
            assert there.write.tolist() == written + [UNBACKED] * dummies
            for i, own in enumerate(wanted):
                for begin in (len(own) // 2, len(own)):
                    assert Views(self.memory, batch)[span].part(i, begin, len(own)).tolist() == own[begin:]

    @rule(beyond=st.integers(1, 9), padding=st.integers(0, 2))
    def decode_on(self, beyond, padding):
        """Decode steps that follow each other, with room for all their tokens taken before the first."""
        decoding = [request for request in self.decoding() if self.grow(request, request.length + beyond)]
        if not decoding:
            return
        rows = np.array([request.row for request in decoding])
        ends = np.array([request.length for request in decoding])
        slots = [np.array(slots_of(request.virtual, self.size, request.length)) for request in decoding]
        ones, padded_to = np.ones(len(rows), np.int64), len(rows) + padding
        for left in reversed(range(beyond)):
            own = [every[: len(every) - left] for every in slots]
            batch = Batch.plain(rows, ends - left, own, ones, left)
            if left == beyond - 1:
                views, device = self.on_a_device(batch, padded_to, slots)
            else:
                assert device.moves_on()
                views = Views(self.memory, batch)
                device.move_on([views[span] for span in range(LAYERS)])
            for span in range(LAYERS):
                there = device.fill(span, views[span], padded_to)
                read = [self.reads(request, span, left) for request in decoding]
                for line, begin, length in zip(read, there.first, there.lengths, strict=False):
                    assert there.table[begin : begin + length, 0].tolist() == line
                dummies = [UNBACKED] * padding
                assert there.lengths.tolist() == [*map(len, read), *(1 for _ in dummies)]
                assert there.prefixes.tolist() == [*(len(line) - 1 for line in read), *(0 for _ in dummies)]
                assert there.write.tolist() == [*(line[-1] for line in read), *dummies]
                assert there.most_prefix == max(map(len, read)) - 1
        assert not device.moves_on()

    def reads(self, request, span, without=0):
        """The slots that a request's step reads at a span, but for the last ones."""
        tables = self.memory.tables
        if span >= tables.first_private(request.row):
            pages, length = tables.pages(request.row, span), tables.length(request.row, span)
        else:
            pages, length = self.memory.shared.backing[span, request.virtual], request.length
        return slots_of(pages, self.size, length - without)

    def on_a_device(self, batch, padded_to, known=None):
        """What a device that mirrors the tables writes by itself; never the host's own lists.

        Args:
            known: slots in the engine's table, those of ``batch`` if no others.
        """
        for row, slots in zip(batch.rows.tolist(), batch.slots if known is None else known, strict=True):
            self.request_table[row, : len(slots)] = torch.from_numpy(slots)
        unknown = replace(batch, slots=Unknown())
        views = Views(self.memory, unknown)
        self.mirror.refresh(batch.rows.tolist())
        self.device.first.write.fill_(99)
        given = [views[span] for span in range(LAYERS)]
        self.device.look_up(given, self.mirror, self.request_table, padded_to)
        return views, self.device

    @invariant()
    def the_ledger_balances(self):
        if hasattr(self, "memory"):
            memory = self.memory
            cached = np.array(sorted({page for _, chain in self.cache for page in chain}), np.int64)
            found = check(memory.pool, memory.shared, memory.tables, cached, memory.retained)
            assert found.free + found.cached + found.held == found.total

    @invariant()
    def settled_requests_hold_what_their_plans_say(self):
        for request in getattr(self, "requests", {}).values():
            if self.memory.settled(request.row) and request.length > request.prompt:
                after = request.length - request.prompt
                kept = [request.plan.retained_tokens(span, request.prompt) + after for span in range(LAYERS)]
                assert self.memory.tables.lengths(request.row) == dict(enumerate(kept))
                assert self.memory.held(request.row, request.length) == sum(
                    pages_of(n, self.size) for n in kept
                )

    @invariant()
    def all_together_hold_what_each_does(self):
        requests = getattr(self, "requests", {}).values()
        rows, lengths = [r.row for r in requests], [r.length for r in requests]
        if rows:
            assert self.memory.all_held(rows, lengths) == list(map(self.memory.held, rows, lengths))

    def release(self, virtual):
        self.memory.shared.release(np.array(virtual, np.int64))
        self.free_virtual += virtual


RetentionMachine.TestCase.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
test_retention_machine = pytest.mark.timeout(120)(RetentionMachine.TestCase)


def test_a_settled_row_holds_its_copies_alone():
    """The prompt's shared KV is the cache's; the row's next owner has none of all this."""
    memory = KvMemory(100, 4, LAYERS, virtual_pages=20)
    memory.open(3, plan(20, 1.0, 0.2, None, 10), 20)
    memory.grow([Growth(3, 0, 20, np.arange(1, 6))])
    assert memory.held(3, 20) == LAYERS * (5 + 1)  # the whole prompt, and room for 4 entries of it
    memory.settle(3)
    assert memory.held(3, 20) == LAYERS and memory.settled(3)
    assert memory.shared_spans([3]) == 0
    memory.close(3)
    assert not memory.settled(3) and memory.shared_spans([3]) == LAYERS
    memory.open(3, PrefillPlan(LAYERS, 1), 4)
    memory.grow([Growth(3, 0, 4, np.arange(6, 7))])
    assert memory.held(3, 4) == LAYERS


def test_nothing_is_left_when_all_is_forgotten():
    memory = KvMemory(100, 4, LAYERS, virtual_pages=20)
    memory.open(3, plan(20, 0.3, 0.2, 3, 10), 20)
    memory.grow([Growth(3, 0, 20, np.arange(1, 6))])
    memory.leaners.add(3, np.arange(1, 6))
    memory.clear()
    nothing = np.zeros(0, np.int64)
    found = check(memory.pool, memory.shared, memory.tables, nothing, memory.retained)
    assert found.free == found.total == 100 and sum(found.per_span) == 0
    assert not memory.leaners and memory.leaners.cached == memory.leaners.alone == 0
    assert not memory.owners and len(memory.tables) == len(memory.retained) == 0
    memory.open(3, PrefillPlan(LAYERS, 1), 4)
    assert memory.pending(3) == {} and memory.held(3, 0) == 0


@pytest.mark.parametrize("size", [1, 4])
def test_a_device_learns_of_pages_that_took_the_place_of_others(size):
    """What was rejected is given back and may be another row's by the time that its own row grows again."""
    memory = KvMemory(100, size, 2, virtual_pages=20)
    mirror = PageMirror(memory, ROWS, LONGEST, "cpu", block=2)
    tables = memory.tables
    for row in (1, 2):
        memory.open(row, PrefillPlan(2, 1, (Step(1, "SPEED"),)), 1)
    tables.append(1, [(1, 7 * size)])
    mirror.refresh([1])
    tables.truncate(1, 1, 2 * size)
    tables.append(1, [(2, 3 * size)])
    tables.append(1, [(1, 4 * size)])
    mirror.refresh([1, 2])
    for row in (1, 2):
        pages = tables.pages(row, 1).tolist()
        blocks = mirror.blocks[mirror.directory[1, row].long()].flatten()
        assert blocks[: len(pages)].tolist() == pages


def test_a_device_keeps_nothing_of_rows_that_are_gone():
    """However many requests have come and gone: no more room for tables, and nothing that is sent again."""
    memory = KvMemory(60, 1, 2, virtual_pages=20)
    memory.shared.back(np.arange(1, 4), 2)
    mirror = PageMirror(memory, ROWS, LONGEST, "cpu", block=2)
    room = len(mirror.blocks)
    for row in range(1, ROWS):
        memory.open(row, PrefillPlan(2, 1, (Step(1, "SPEED"),)), 1)
        memory.tables.append(1, [(row, 5 + row)])
        mirror.refresh([row])
        assert memory.shared.backed_since == []
        assert (mirror.backing.numpy() == memory.shared.backing).all()
        memory.close(row)
    assert len(mirror.blocks) == room
