"""SGLang's idle leak check, in the units that depth pages are counted in."""

import time
from typing import Any

from sglang.srt.managers.scheduler_components.invariant_checker import SchedulerInvariantChecker

from fathom.runtime.sglang_host.memory.kv_allocator import DepthAllocator
from fathom.runtime.sglang_host.memory.kv_tree import tree_of

SLOW_SECONDS = 0.005
"""An audit that takes longer is not made with every answer."""

RESTS = 50
"""Of its own length, from the begin of a slow audit to the next."""


class DepthInvariantChecker(SchedulerInvariantChecker):
    """SGLang's checker; its sum over tokens is taken over virtual tokens, and physical pages are summed besides.

    What it finds is reported, and ends the process, the way SGLang does it. An idle engine asks all the time, and
    an audit looks at every page (30 to 150 ms with 3.7 million, one core of an AMD EPYC): it is made again only
    when something has moved since one that found nothing. After each answer something has: a client that asks one
    question after the other would wait for a slow one before each answer, so that the next is put off until audits
    take a small share of the time.
    """

    _sound: tuple[Any, ...] | None = None  # what was counted when the last audit found nothing
    _due = 0.0  # time.monotonic() in seconds before which there is no other after one that was slow

    def _check_full_pool(self, ps: Any, uncached: int = 0) -> tuple[bool, str]:
        allocator, tree = self.token_to_kv_pool_allocator, tree_of(self.tree_cache)
        if not isinstance(allocator, DepthAllocator):
            return SchedulerInvariantChecker._check_full_pool(self, ps, uncached)
        held_by_sessions = self.pool_stats_observer.session_held_tokens()
        leak, message = self._check_pool_invariant(
            "virtual",
            allocator.virtual_size(),
            tree.evictable_size_ if tree else 0,
            tree.protected_size_ if tree else 0,
            held_by_sessions,
            allocator.virtual_tokens,
            uncached + allocator.memory.leaners.alone * allocator.page_size,
        )
        pool = allocator.memory.pool
        counted = (
            *(message, uncached, held_by_sessions, pool.free, *pool.in_use.tolist()),
            *(len(self.req_to_token_pool.free_slots), len(allocator.memory.tables)),
            *(tree.evictable_per_span.tolist() if tree else ()),
        )
        if not leak and counted == self._sound:
            return False, f"{message}; [pages] as before"
        began = time.monotonic()
        if not leak and began < self._due:
            return False, f"{message}; [pages] later"
        found = allocator.audit(tree.cached_slots() if tree else None)
        took = time.monotonic() - began
        self._due = began + RESTS * took if took > SLOW_SECONDS else 0.0
        # Pages stay with nobody but the cache once nothing runs.
        idle = (
            uncached == 0
            and held_by_sessions == 0
            and len(self.req_to_token_pool.free_slots) == (self.req_to_token_pool.size)
        )
        leak |= not found.balanced or (idle and found.held > 0)
        if tree:
            leak |= idle and tree.evictable_pages != found.cached
            in_use, evictable = pool.in_use.tolist(), tree.evictable_per_span.tolist()
            leak |= idle and in_use != evictable
            message += f", pages per span={in_use}, evictable={evictable}"
        self._sound = None if leak else counted
        return leak, f"{message}; [pages] {found}"
