"""The idle check over depth pages: every page is looked at when something has moved, and not otherwise."""

from types import SimpleNamespace

from fathom.runtime.kv.memory import KvMemory
from fathom.runtime.sglang_host.memory import kv_check
from fathom.runtime.sglang_host.memory.kv_allocator import DepthAllocator
from fathom.runtime.sglang_host.memory.kv_check import DepthInvariantChecker

TOKENS, SPANS = 40, 2


class Allocator(DepthAllocator):
    """Only what the check asks; no virtual slot is taken."""

    page_size, virtual_pages = 1, TOKENS

    def __init__(self):
        self.memory, self.audits = KvMemory(TOKENS, 1, SPANS, TOKENS), 0

    def virtual_size(self):
        return TOKENS

    def audit(self, cached_slots):
        self.audits += 1
        return super().audit(cached_slots)


def a_checker():
    checker = object.__new__(DepthInvariantChecker)
    allocator = checker.token_to_kv_pool_allocator = Allocator()
    checker.tree_cache = SimpleNamespace()
    checker.req_to_token_pool = SimpleNamespace(free_slots=[0, 1], size=2)
    checker.pool_stats_observer = SimpleNamespace(session_held_tokens=lambda: 0)
    return checker, allocator


def test_pages_are_looked_at_again_once_something_has_moved(monkeypatch):
    monkeypatch.setattr(kv_check, "SLOW_SECONDS", float("inf"))  # however busy this machine is
    checker, allocator = a_checker()
    for _ in range(3):
        leak, message = checker._check_full_pool(None)
        assert not leak and "[virtual]" in message
    assert allocator.audits == 1
    pages = allocator.memory.pool.take(3)  # nobody's table names them
    for audits in (2, 3):
        assert checker._check_full_pool(None)[0] and allocator.audits == audits
    allocator.memory.pool.give_back(pages)
    for _ in range(2):
        assert not checker._check_full_pool(None)[0] and allocator.audits == 4


def test_slow_audits_take_a_small_share_of_the_time(monkeypatch):
    """What was lost meanwhile is found by the next one."""
    checker, allocator = a_checker()
    now, took = [100.0], 0.1
    monkeypatch.setattr(kv_check.time, "monotonic", lambda: now[0])
    audit = allocator.audit

    def slow(cached_slots):
        now[0] += took
        return audit(cached_slots)

    allocator.audit = slow
    pool, began = allocator.memory.pool, now[0]
    for _ in range(1000):
        now[0] += 0.02
        pool.give_back(pool.take(1, 0))
        pool.in_use[0] += 1  # something moves with each answer
        pool.in_use[1] -= 1
        assert not checker._check_full_pool(None)[0]
    assert 3 <= allocator.audits <= 1 + (now[0] - began) / (took * 25)
    pool.take(3)
    before, since = allocator.audits, now[0]
    while not checker._check_full_pool(None)[0]:
        now[0] += 0.02
    assert allocator.audits == before + 1 and now[0] - since < 60 * took
