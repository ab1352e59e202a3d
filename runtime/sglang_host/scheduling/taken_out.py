"""What running requests leave when they are taken out for somebody more urgent."""

from typing import Any

from sglang.srt.managers.schedule_batch import Req

from fathom.runtime.kv.pages import pages_of
from fathom.runtime.sglang_host.memory.kv_allocator import DepthAllocator
from fathom.runtime.sglang_host.memory.kv_tree import DepthRadixCache


class TakenOut:
    """Requests that are thought of as taken out, one after the other; nothing is changed by it.

    Attributes:
        tokens: at all depths, that fit in the pages they leave.
    """

    def __init__(self, allocator: DepthAllocator, tree: DepthRadixCache | None) -> None:
        self._allocator, self._tree = allocator, tree
        self._locks: dict[Any, int] = {}  # of nodes of the cache, less those of these requests
        self._rows: list[int] = []
        self._own = self._unlocked = 0  # virtual slots
        self.tokens = 0

    def add(self, request: Req) -> None:
        """One more, after all that were added before it."""
        allocator, node, shared = self._allocator, request.last_node, 0
        while node is not None and node.parent is not None:
            left = self._locks[node] = self._locks.get(node, node.lock_ref) - 1
            shared += len(node.key) if left else 0
            self._unlocked += 0 if left else len(node.key)
            node = node.parent
        size, kv = allocator.page_size, request.kv
        others = allocator.plan_of(request).shared_spans * (shared // size)
        self.tokens += allocator.dense_size(allocator.held_pages([request])[0] - others)
        self._own += pages_of(kv.kv_allocated_len, size) * size - kv.cache_protected_len
        self._rows.append(kv.req_pool_idx)

    @property
    def slots(self) -> int:
        """Virtual slots that could be had besides."""
        if self._tree is None:
            return self._own
        alone, cached = self._allocator.memory.leaners.left_by(self._rows)
        found = self._tree.slots_to_evict(self._unlocked, cached) - self._tree.slots_to_evict()
        return self._own + alone * self._allocator.page_size + found
