"""Virtual pages that requests lean on: KV of theirs is there that the pool does not have.

A draft model has its KV in the same virtual slots as the target. Where retention has given a request copies of its
own of what is left of its prompt, the prefix cache has the prompt's shared KV, and may evict it; the draft goes on
reading. What is free then are the physical pages: the virtual ones stay until nobody leans on them.
"""

from collections.abc import Sequence

import numpy as np


class Leaners:
    """Who leans on which virtual pages.

    Attributes:
        cached: pages leaned on that the prefix cache holds.
        alone: pages leaned on that nobody holds any more.
    """

    def __init__(self, virtual_pages: int) -> None:
        self._count = np.zeros(virtual_pages + 1, np.int32)
        self._alone = np.zeros(virtual_pages + 1, bool)
        self.clear()

    def __bool__(self) -> bool:
        return bool(self._pages)

    def clear(self) -> None:
        """Forget everybody."""
        self._pages: dict[int, np.ndarray] = {}
        self._count[:] = 0
        self._alone[:] = False
        self.cached = self.alone = 0

    def add(self, row: int, pages: np.ndarray) -> None:
        """A request leans on these pages [pages] of the prefix cache, none of them twice."""
        assert row not in self._pages, "a request leans on one prompt"
        self._pages[row] = pages
        self.cached += int(np.count_nonzero(self._count[pages] == 0))
        self._count[pages] += 1

    def keep(self, pages: np.ndarray) -> np.ndarray:
        """Of pages [pages] that are let go, those that may be given to others."""
        leaned = self._count[pages] > 0
        found = int(np.count_nonzero(leaned))
        self._alone[pages[leaned]] = True
        self.cached -= found
        self.alone += found
        return pages[~leaned]

    def remove(self, row: int) -> np.ndarray:
        """A request has ended: the pages [pages] that nobody holds from now on."""
        if (pages := self._pages.pop(row, None)) is None:
            return np.zeros(0, np.int64)
        self._count[pages] -= 1
        left = pages[self._count[pages] == 0]
        alone = left[self._alone[left]]
        self._alone[alone] = False
        self.alone -= len(alone)
        self.cached -= len(left) - len(alone)
        return alone

    def left_by(self, rows: Sequence[int]) -> tuple[int, int]:
        """Pages on which nobody would lean without these rows: those that nobody holds, and cached ones."""
        leaned = [self._pages[row] for row in rows if row in self._pages]
        if not leaned:
            return 0, 0
        pages, counts = np.unique(np.concatenate(leaned), return_counts=True)
        left = self._alone[pages[counts == self._count[pages]]]
        alone = int(np.count_nonzero(left))
        return alone, len(left) - alone
