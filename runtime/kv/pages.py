"""Physical KV pages: one free list for all depths of a model.

A page holds ``page_size`` tokens x one span of consecutive layers. All spans draw from the same list, so what a
shallow token does not take above its last layer is at once free for any other token at any depth. Page 0 is a
dummy: padded rows and rows whose KV nobody will read write there.
"""

import numpy as np


class OutOfPages(RuntimeError):
    """Fewer pages are free than were asked for."""


def pages_of(tokens: int, page_size: int) -> int:
    """Pages that hold ``tokens`` tokens of one span."""
    return -(-tokens // page_size)


def slots_of(pages: np.ndarray, page_size: int, begin: int, end: int) -> np.ndarray:
    """Slots of the entries ``begin .. end - 1`` of a table.

    Args:
        pages: [pages] page ids of the table.

    Returns:
        [end - begin] of the pages' dtype; slot = page * page_size + offset.
    """
    if page_size == 1:
        return pages[begin:end]
    first = begin // page_size
    firsts = pages[first : pages_of(end, page_size), None] * pages.dtype.type(page_size)
    slots = (firsts + np.arange(page_size, dtype=pages.dtype)).reshape(-1)
    return slots[begin - first * page_size : end - first * page_size]


class PagePool:
    """The free list, and which pages have an owner: each has one at the most.

    The list is kept in arenas, one per span: ranges of neighbouring pages from which a span is served first, so
    that the tokens of a request lie together at each span. Any arena serves any span when the span's own is empty.

    Attributes:
        total: pages that can be handed out (the dummy page not counted).
        page_size: tokens per page.
        arenas: number of arenas.
        in_use: [arenas] int64 pages with an owner, by the arena that they were asked of.
    """

    def __init__(self, total: int, page_size: int, arenas: int = 1) -> None:
        self.total = total
        self.page_size = page_size
        self.arenas = arenas
        self.clear()

    def clear(self) -> None:
        """Forget all owners."""
        pages = np.arange(1, self.total + 1, dtype=np.int32)
        # Stacks whose top is their end. Lowest first, so that a fresh pool hands out ascending runs.
        self._stacks = [pages[self._arena_of(pages) == arena][::-1].copy() for arena in range(self.arenas)]
        self._free = [len(stack) for stack in self._stacks]
        self._owned = np.zeros(self.total + 1, bool)
        self._asked_of = np.zeros(self.total + 1, np.int16)
        self.in_use = np.zeros(self.arenas, np.int64)

    @property
    def free(self) -> int:
        """Pages in the free list."""
        return sum(self._free)

    def free_pages(self) -> np.ndarray:
        """[free] int32, for audits."""
        return np.concatenate([stack[:free] for stack, free in zip(self._stacks, self._free, strict=True)])

    def owned(self, pages: np.ndarray) -> np.ndarray:
        """Which of ``pages`` have an owner, for audits."""
        return self._owned[pages]

    def take(self, count: int, arena: int = 0) -> np.ndarray:
        """[count] int32 pages, the caller's from now on, from this arena as far as it goes.

        Raises:
            OutOfPages: when there are too few; nothing is taken then.
        """
        if count > self.free:
            raise OutOfPages(f"{count} KV pages needed, {self.free} of {self.total} free")
        if count <= self._free[arena]:
            pages = self._pop(count, arena)
        else:
            others = sorted(set(range(self.arenas)) - {arena}, key=lambda other: -self._free[other])
            parts, missing = [], count
            for source in (arena, *others):
                parts.append(self._pop(min(missing, self._free[source]), source))
                missing -= len(parts[-1])
            pages = np.concatenate(parts)
        self._owned[pages] = True
        self._asked_of[pages] = arena
        self.in_use[arena] += count
        return pages

    def _pop(self, count: int, arena: int) -> np.ndarray:
        free = self._free[arena]
        self._free[arena] = free - count
        return self._stacks[arena][free - count : free][::-1].copy()

    def give_back(self, pages: np.ndarray) -> None:
        """Free these pages, no page twice in one call."""
        if len(pages) == 0:
            return
        assert self._owned[pages].all(), "a page was given back more often than it was taken"
        self._owned[pages] = False
        self.in_use -= np.bincount(self._asked_of[pages], minlength=self.arenas)
        arena_of = self._arena_of(pages)
        for arena in range(self.arenas):
            # Reversed, so that they are handed out again in the order in which they stand in a table.
            mine = pages[arena_of == arena][::-1] if self.arenas > 1 else pages[::-1]
            free = self._free[arena]
            self._stacks[arena][free : free + len(mine)] = mine
            self._free[arena] = free + len(mine)

    def _arena_of(self, pages: np.ndarray) -> np.ndarray:
        return (pages.astype(np.int64) - 1) * self.arenas // max(self.total, 1)
