"""The staircase: which rows run at which layer, and what the layers of a span read and write for them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fathom.runtime.kv.memory import Growth, KvMemory
from fathom.runtime.kv.view import Batch, Views
from fathom.runtime.plan import SCORED, PlanError, PrefillPlan, Step
from fathom.runtime.staircase import Choice, Work, climb, first_rows, left_of

LAYERS = 4


class Recorder:
    """Stands for the engine: remembers which positions of which request ran at which layer."""

    def __init__(self, works, early=False):
        self.rows = first_rows(works)
        self.early = early
        self.ran, self.stored = {}, {}
        self.hidden = list(zip(self.rows.request.tolist(), self.rows.position.tolist(), strict=True))

    def run(self, rows, low, high):
        assert self.hidden == list(zip(rows.request.tolist(), rows.position.tolist(), strict=True))
        for layer in range(low, high):
            self.ran[layer] = (list(self.hidden), rows)

    def pays(self, rows, stay):
        return self.early and stay < rows

    def end(self, rows, low, high, stay):
        if low < high - 1:
            self.run(rows, low, high - 1)
        assert self.hidden == list(zip(rows.request.tolist(), rows.position.tolist(), strict=True))
        self.stored[high - 1] = [
            row for row, gone in zip(self.hidden, ~np.isin(np.arange(len(rows)), stay), strict=True) if gone
        ]
        self.hidden = [self.hidden[i] for i in stay]
        if len(stay):
            self.ran[high - 1] = (list(self.hidden), left_of(rows, stay))

    def keep(self, rows, index):
        assert len(rows) == len(self.hidden)
        self.hidden = [self.hidden[i] for i in index]

    def recall(self, earlier, order):
        recalled = [(request, position) for request, own in earlier.items() for position in own.tolist()]
        self.hidden = [(self.hidden + recalled)[i] for i in order]


def run(works, selectors=None, early=False, wanted=None):
    host = Recorder(works, early)
    return host, climb(host, works, host.rows, selectors, wanted)


def speed(cutoff, anchor=True):
    return PrefillPlan(LAYERS, 1, (Step(cutoff, "SPEED", anchor=anchor),))


DENSE = PrefillPlan(LAYERS, 1)


def positions(host, layer, request, ghosts=False):
    ran, rows = host.ran[layer]
    return [
        p for (r, p), ghost in zip(ran, rows.ghost, strict=True) if r == request and (ghosts or not ghost)
    ]


def test_dense_and_narrowed_requests_climb_together():
    works = [Work(DENSE, 0, 5, 5), Work(speed(3), 0, 6, 6), Work(speed(2, anchor=False), 4, 7, 7)]
    host, last = run(works)
    assert last is not None
    assert [positions(host, layer, 0) for layer in range(LAYERS)] == [[0, 1, 2, 3, 4]] * 4
    assert [positions(host, layer, 1) for layer in range(LAYERS)] == [[0, 1, 2, 3, 4, 5]] * 3 + [[0, 5]]
    assert [positions(host, layer, 2) for layer in range(LAYERS)] == [[4, 5, 6]] * 2 + [[6]] * 2


def test_middle_chunks_stop_at_the_cutoff():
    host, last = run([Work(speed(2), 0, 4, 9), Work(speed(1), 4, 8, 9)])
    assert last is None
    assert set(host.ran) == {0, 1}
    assert positions(host, 1, 1) == []
    assert positions(host, 1, 1, ghosts=True) == [7]
    host, last = run([Work(speed(2), 0, 4, 9), Work(DENSE, 0, 2, 2)])
    assert last is not None
    assert last.ghost.tolist() == [True, False, False]


def test_the_anchor_is_computed_again_beside_the_last_prompt_token():
    host, last = run([Work(speed(3), 4, 9, 9), Work(speed(3), 8, 12, 9), Work(speed(3), 9, 10, 9)])
    assert positions(host, 0, 0) == [0, 4, 5, 6, 7, 8]
    assert host.rows.again.tolist() == [True] + [False] * 5 + [True] + [False] * 4 + [False]
    assert [positions(host, 3, i) for i in range(3)] == [[0, 8], [0, 8, 9, 10, 11], [9]]
    assert last is not None and not last.ghost.any()


def test_rows_leave_a_layer_earlier_where_only_their_keys_are_read():
    """Of the last layer, and of that below a cutoff, the rows that go no further have keys and values alone."""
    works = [Work(DENSE, 0, 5, 5), Work(speed(3), 0, 6, 6), Work(speed(2), 4, 7, 9), Work(DENSE, 2, 4, 9)]
    host, last = run(works, early=True)
    assert [positions(host, layer, 0) for layer in range(LAYERS)] == [[0, 1, 2, 3, 4]] * 3 + [[4]]
    assert [positions(host, layer, 1) for layer in range(LAYERS)] == [[0, 1, 2, 3, 4, 5]] * 2 + [[0, 5], [5]]
    assert [positions(host, layer, 2) for layer in range(LAYERS)] == [[4, 5, 6], [6], [], []]
    assert [positions(host, layer, 3) for layer in range(LAYERS)] == [[2, 3]] * 3 + [[3]]
    assert host.stored == {
        1: [(2, 4), (2, 5)],
        2: [(1, 1), (1, 2), (1, 3), (1, 4)],
        3: [*((0, i) for i in range(4)), (1, 0), (3, 2)],
    }
    assert last.position.tolist() == [4, 5, 6, 3] and last.ghost.tolist() == [False, False, True, False]


def test_a_chunk_of_which_nothing_goes_on_ends_with_its_keys():
    host, last = run([Work(speed(2), 0, 4, 9), Work(speed(2), 2, 6, 9)], early=True)
    assert last is None and set(host.ran) == {0}
    assert host.stored == {1: [*((0, i) for i in range(4)), *((1, i) for i in range(2, 6))]}


def test_logits_that_are_wanted_keep_their_rows():
    works = [Work(DENSE, 0, 5, 5), Work(DENSE, 3, 9, 7), Work(speed(2), 2, 6, 6)]
    host, last = run(works, early=True, wanted=np.array([2, 6, 5]))
    assert [positions(host, 3, i) for i in range(3)] == [[2, 3, 4], [6, 7, 8], [5]]
    assert last.position.tolist() == [2, 3, 4, 6, 7, 8, 5]


def test_where_it_does_not_pay_all_rows_stay():
    host, last = run([Work(DENSE, 0, 5, 5), Work(speed(3), 0, 6, 6)])
    assert host.stored == {} and len(last) == 5 + 2


def test_scored_steps_ask_their_selector_at_their_layer():
    plan = PrefillPlan(
        LAYERS, 1, (Step(0, "SpecPrefill", SCORED, rate=0.5), Step(2, "FastKV", SCORED, rate=0.5))
    )
    asked = []

    def every_second(index, step, position):
        asked.append((index, step.mechanism, position.tolist()))
        return Choice(np.arange(len(position)) % 2 == (len(position) - 1) % 2, position[:0])

    host, _ = run([Work(plan, 0, 9, 9)], {"SpecPrefill": every_second, "FastKV": every_second})
    assert positions(host, 0, 0) == [0, 2, 4, 6, 8]
    assert positions(host, 3, 0) == [0, 4, 8]
    assert asked == [(0, "SpecPrefill", list(range(9))), (0, "FastKV", [0, 2, 4, 6, 8])]
    with pytest.raises(PlanError, match="nobody decides which tokens FastKV keeps"):
        run([Work(plan, 0, 9, 9)], {"SpecPrefill": every_second})


def test_tokens_of_earlier_chunks_join_their_own_request():
    """Prompts that end in one step: of each some tokens of an earlier chunk go on, in the order of positions."""
    plan = PrefillPlan(LAYERS, 1, (Step(2, "FastKV", SCORED, anchor=False, kept=4), Step(3, "SPEED")))
    earlier = [[0, 2], [], [0, 3]]

    def choose(index, step, position):
        return Choice(position >= position[-1] - 1, np.array(earlier[index], np.int64))

    works = [Work(plan, 4, 9, 9), Work(DENSE, 0, 3, 3), Work(plan, 6, 8, 8)]
    host, last = run(works, {"FastKV": choose})
    assert [positions(host, 1, i) for i in range(3)] == [[4, 5, 6, 7, 8], [0, 1, 2], [6, 7]]
    assert [positions(host, 2, i) for i in range(3)] == [[0, 2, 7, 8], [0, 1, 2], [0, 3, 6, 7]]
    assert [positions(host, 3, i) for i in range(3)] == [[0, 8], [0, 1, 2], [0, 7]]
    assert last is not None and not last.again.any() and not last.ghost.any()


@given(st.data())
def test_the_view_reads_what_the_rows_may_see(data):
    """Random chunks of random requests: each row reads, at each span, exactly the positions that exist there."""
    size = data.draw(st.sampled_from([1, 4]))
    memory = KvMemory(4 * 400, size, LAYERS, 1200)
    works, virtual, free = [], [], iter(range(1, 1200))
    for row in range(1, data.draw(st.integers(1, 4)) + 1):
        plan = data.draw(st.sampled_from([DENSE, *(speed(k, a) for k in (1, 2, 3) for a in (True, False))]))
        prompt, generated = data.draw(st.integers(1, 20)), data.draw(st.integers(0, 3))
        prefix = data.draw(st.integers(0, prompt - 1)) // size * size
        begin = data.draw(st.integers(prefix, prompt + generated - 1))
        end = data.draw(st.integers(begin + 1, prompt + generated))
        pages = [next(free) for _ in range(-(-end // size))]
        memory.open(row, plan, prompt)
        held = -(-begin // size)
        if begin:
            memory.grow([Growth(row, prefix, begin, np.array(pages[:held], np.int64))])
        memory.grow([Growth(row, begin, end, np.array(pages[held:], np.int64))])
        works.append(Work(plan, begin, end, prompt))
        virtual.append((np.array(pages)[:, None] * size + np.arange(size)).ravel()[:end])
    host, _last = run(works, early=data.draw(st.booleans()))
    lengths = np.array([work.end for work in works])
    for layer, (_, rows) in host.ran.items():
        count = np.bincount(rows.request, minlength=len(works))
        again = np.bincount(rows.request[rows.again], minlength=len(works)).astype(bool)
        ghost = np.bincount(rows.request[rows.ghost], minlength=len(works)).astype(bool)
        batch = Batch(np.arange(1, len(works) + 1), lengths, virtual, count - again, again, ghost)
        check_view(memory, works, virtual, rows, Views(memory, batch)[layer], layer)


def check_view(memory, works, virtual, rows, found, layer):
    """Each query row against the slots of the positions it may see, in order."""
    assert found.query[-1] == len(rows) == len(found.write)
    segment = np.repeat(np.arange(len(found.query) - 1), np.diff(found.query))
    for i, (request, position) in enumerate(zip(rows.request, rows.position, strict=True)):
        work, part = works[request], segment[i]
        behind = found.query[part + 1] - i - 1  # rows of this segment after this one
        reads = found.slots[found.entry[part] : found.entry[part + 1] - behind].tolist()
        private = layer >= work.plan.shared_spans
        if private and rows.ghost[i]:
            assert reads == [0] and found.write[i] == 0
            continue
        if private:
            table = memory.tables.slots(int(request) + 1, layer)
            step = work.plan.steps[0]
            exists = ([0] if step.anchor and work.prompt_tokens > 1 else []) + list(
                range(work.prompt_tokens - 1, work.end)
            )
            assert reads == table[: exists.index(position) + 1].tolist()
            assert found.write[i] == table[exists.index(position)]
        else:
            slots = memory.shared.slots(layer, virtual[request]).tolist()
            assert reads == slots[: position + 1]
            assert found.write[i] == (0 if rows.again[i] else slots[position])
