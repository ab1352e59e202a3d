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
    """The free list, and how many owners each page has.

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
        self._owners = np.zeros(self.total + 1, np.int32)
        self._asked_of = np.zeros(self.total + 1, np.int16)
        self.in_use = np.zeros(self.arenas, np.int64)

    @property
    def free(self) -> int:
        """Pages in the free list."""
        return sum(self._free)

    def free_pages(self) -> np.ndarray:
        """[free] int32, for audits."""
        return np.concatenate([stack[:free] for stack, free in zip(self._stacks, self._free, strict=True)])

    def owners(self, pages: np.ndarray) -> np.ndarray:
        """How many owners each of ``pages`` has."""
        return self._owners[pages]

    def take(self, count: int, arena: int = 0) -> np.ndarray:
        """[count] int32 pages, each with one owner, from this arena as far as it goes.

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
        self._owners[pages] = 1
        self._asked_of[pages] = arena
        self.in_use[arena] += count
        return pages

    def _pop(self, count: int, arena: int) -> np.ndarray:
        free = self._free[arena]
        self._free[arena] = free - count
        return self._stacks[arena][free - count : free][::-1].copy()

    def share(self, pages: np.ndarray) -> None:
        """Add one owner to each page."""
        assert (self._owners[pages] > 0).all(), "a free page cannot be shared"
        self._owners[pages] += 1

    def give_back(self, pages: np.ndarray) -> None:
        """Remove one owner from each page (no page twice in one call); a page without owners is free."""
        if len(pages) == 0:
            return
        self._owners[pages] -= 1
        left = self._owners[pages]
        assert (left >= 0).all() and pages.min() > 0, "a page was given back more often than it was taken"
        gone = pages[left == 0]
        self.in_use -= np.bincount(self._asked_of[gone], minlength=self.arenas)
        arena_of = self._arena_of(gone)
        for arena in range(self.arenas):
            # Reversed, so that they are handed out again in the order in which they stand in a table.
            mine = gone[arena_of == arena][::-1] if self.arenas > 1 else gone[::-1]
            free = self._free[arena]
            self._stacks[arena][free : free + len(mine)] = mine
            self._free[arena] = free + len(mine)

    def _arena_of(self, pages: np.ndarray) -> np.ndarray:
        return (pages.astype(np.int64) - 1) * self.arenas // max(self.total, 1)
