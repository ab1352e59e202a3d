"""Pages, the shared map and private tables, as plain data structures."""

import numpy as np
import pytest

from fathom.runtime.kv.audit import AuditError, audit, check
from fathom.runtime.kv.memory import Growth, KvMemory, pages_held
from fathom.runtime.kv.pages import OutOfPages, PagePool, slots_of
from fathom.runtime.plan import PrefillPlan, Step

NONE = np.zeros(0, np.int64)


def test_a_fresh_pool_hands_out_one_ascending_run():
    pool = PagePool(10, 4)
    assert pool.take(3).tolist() == [1, 2, 3]
    pages = pool.take(2)
    pool.give_back(pages)
    assert pool.take(4).tolist() == [4, 5, 6, 7]
    with pytest.raises(OutOfPages, match="4 KV pages needed, 3 of 10 free"):
        pool.take(4)
    assert pool.free == 3


def test_each_span_grows_in_its_own_arena_until_it_is_empty():
    pool = PagePool(12, 4, arenas=3)
    assert pool.take(2, 1).tolist() == [5, 6]
    assert pool.take(1, 0).tolist() == [1]
    assert pool.take(2, 1).tolist() == [7, 8]
    assert pool.take(2, 1).tolist() == [9, 10], "the fullest of the others"
    pool.give_back(np.array([5, 9, 1], np.int32))
    assert pool.take(1, 1).tolist() == [5]
    assert pool.take(6, 2).tolist() == [9, 11, 12, 1, 2, 3]
    assert pool.free == 1


def test_what_nobody_owns_cannot_be_given_back():
    pool = PagePool(8, 1, arenas=2)
    pages = pool.take(3)
    pool.give_back(pages[:1])
    assert pool.owned(pages).tolist() == [False, True, True] and pool.free == 6
    with pytest.raises(AssertionError, match="more often than it was taken"):
        pool.give_back(pages[:1])
    with pytest.raises(AssertionError, match="more often than it was taken"):
        pool.give_back(np.zeros(1, np.int32))  # the dummy


def test_slots_follow_the_pages():
    assert slots_of(np.array([5, 2], np.int32), 4, 0, 6).tolist() == [20, 21, 22, 23, 8, 9]
    assert slots_of(np.array([5, 2], np.int32), 4, 3, 5).tolist() == [23, 8]
    assert slots_of(np.array([7, 3, 9], np.int32), 1, 1, 3).tolist() == [3, 9]


def test_a_token_takes_pages_only_as_deep_as_it_goes():
    memory = KvMemory(pages=64, page_size=4, spans=4, virtual_pages=64)
    memory.open(1, PrefillPlan(16, 4, (Step(12, "SPEED"),)), prompt_tokens=10)
    memory.open(2, PrefillPlan(16, 4), prompt_tokens=10)
    memory.grow([Growth(1, 0, 10, np.array([1, 2, 3])), Growth(2, 0, 10, np.array([4, 5, 6]))])
    assert memory.pool.total - memory.pool.free == (3 * 3 + 1) + 4 * 3
    assert (memory.shared.depth(2), memory.shared.depth(5)) == (3, 4)
    assert memory.tables.lengths(1) == {3: 2}
    assert memory.tables.lengths(2) == {}
    found = check(memory.pool, memory.shared, memory.tables, NONE)
    assert found.per_span == (6, 6, 6, 4)
    memory.close(1)
    assert memory.shared.release(np.array([1, 2, 3])) == 9
    memory.close(2)
    assert memory.shared.release(np.array([4, 5, 6])) == 12
    assert memory.pool.free == 64


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("cutoff", [8, 12, 16])
@pytest.mark.parametrize("tokens", [1024, 4096, 32768])
def test_pages_held_are_what_the_pool_gives(page_size, cutoff, tokens):
    steps = (Step(cutoff, "SPEED"),) if cutoff < 16 else ()
    plan = PrefillPlan(16, 4, steps)
    virtual = np.arange(1, -(-(tokens + 9) // page_size) + 1)
    memory = KvMemory(4 * len(virtual), page_size, 4, len(virtual))
    memory.open(3, plan, tokens)
    used = 0
    for begin, end in [(0, 700), (700, tokens), *((t, t + 1) for t in range(tokens, tokens + 9))]:
        new = virtual[used : -(-end // page_size)]
        memory.grow([Growth(3, begin, end, new)])
        used += len(new)
        held = memory.pool.total - memory.pool.free
        assert held == pages_held(plan, end, tokens, page_size)
    lower, upper = cutoff // 4, 4 - cutoff // 4
    assert held == lower * -(-(tokens + 9) // page_size) + upper * -(-11 // page_size)


def test_a_full_pool_changes_nothing():
    memory = KvMemory(pages=7, page_size=4, spans=4, virtual_pages=20)
    memory.open(1, PrefillPlan(4, 1, (Step(3, "SPEED"),)), 8)
    with pytest.raises(OutOfPages):
        memory.grow([Growth(1, 0, 8, np.array([1, 2])), Growth(1, 8, 9, np.array([3]))])
    assert memory.pool.free == 7
    assert memory.tables.lengths(1) == {3: 0}
    memory.grow([Growth(1, 0, 8, np.array([1, 2]))])
    assert memory.pool.free == 0


def test_virtual_pages_are_backed_once_and_all_or_none():
    memory = KvMemory(pages=9, page_size=4, spans=2, virtual_pages=10)
    shared, pool = memory.shared, memory.pool
    shared.back(np.array([1, 2]), 2)
    before = shared.backing.copy()
    with pytest.raises(OutOfPages, match="6 KV pages needed, 5 of 9 free"):
        shared.back(np.array([3, 4, 5]), 2)
    with pytest.raises(AssertionError, match="backed twice"):
        shared.back(np.array([2, 3]), 1)
    assert (shared.backing == before).all() and pool.free == 5 and pool.in_use.tolist() == [2, 2]


def test_roll_back():
    memory = KvMemory(pages=20, page_size=4, spans=2, virtual_pages=10)
    memory.open(1, PrefillPlan(2, 1, (Step(1, "SPEED"),)), 1)
    tables = memory.tables
    tables.append(1, [(1, 9)])
    before = tables.slots(1, 1).tolist()
    tables.truncate(1, 1, 5)
    assert tables.slots(1, 1).tolist() == before[:5]
    assert memory.pool.free == 18
    memory.close(1)
    assert memory.pool.free == 20


def test_the_audit_sees_a_lost_page_and_a_page_in_two_places():
    memory = KvMemory(pages=9, page_size=4, spans=2, virtual_pages=4)
    memory.shared.back(np.array([1, 2]), 2)
    found = audit(memory.pool, memory.shared, memory.tables, np.array([2]))
    assert (found.free, found.cached, found.held) == (5, 2, 2)
    memory.pool.take(1)
    with pytest.raises(AuditError, match="not total"):
        check(memory.pool, memory.shared, memory.tables, NONE)
    memory.shared.backing[0, 3] = memory.shared.backing[0, 1]
    with pytest.raises(AuditError, match="two places"):
        check(memory.pool, memory.shared, memory.tables, NONE)


def _owner_of(pages, known):
    def corrupt(memory):
        memory.pool._owned[pages(memory)[0]] = known

    return corrupt


@pytest.mark.parametrize(
    ("corrupt", "said"),
    [
        (_owner_of(lambda memory: memory.pool.free_pages(), True), "a free page has an owner"),
        (_owner_of(lambda memory: memory.shared.backing[0, 1:], False), "a page in use has no owner"),
        (_owner_of(lambda memory: memory.tables.pages(1), False), "a page in use has no owner"),
        (lambda memory: memory.pool.in_use.__setitem__(1, 4), "pages per span"),
        (lambda memory: setattr(memory.tables.of(1)[1], "pages", np.array([10])), "outside the pool"),
        (lambda memory: setattr(memory.tables.of(1)[1], "pages", np.array([0])), "outside the pool"),
    ],
)
def test_the_audit_sees_accounts_that_do_not_add_up(corrupt, said):
    memory = KvMemory(pages=9, page_size=4, spans=2, virtual_pages=4)
    memory.shared.back(np.array([1, 2]), 1)
    memory.open(1, PrefillPlan(2, 1, (Step(1, "SPEED"),)), 1)
    memory.tables.append(1, [(1, 1)])
    assert check(memory.pool, memory.shared, memory.tables, NONE).per_span == (2, 1)
    corrupt(memory)
    with pytest.raises(AuditError, match=said):
        check(memory.pool, memory.shared, memory.tables, NONE)
