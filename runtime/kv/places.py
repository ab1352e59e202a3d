"""At which positions of a request the entries of a page table are, for layers that look back over a window."""

from typing import NamedTuple

import numpy as np


class Places(NamedTuple):
    """Positions of a segment's entries.

    Attributes:
        early: [entries] int64, ascending, of the first ones.
        onward: position of the entry behind those. Each further one is at the next position.
    """

    early: np.ndarray
    onward: int

    def reach(self, own: np.ndarray, window: int) -> np.ndarray:
        """[rows] int64: how many entries before its own each row has in a window of so many earlier positions.

        Args:
            own: [rows] int64, which entries are the rows'.
        """
        count = len(self.early)
        known = self.early[np.minimum(own, count - 1)] if count else own
        first = np.where(own < count, known, self.onward + own - count) - window
        before = np.searchsorted(self.early, first)
        return own - np.where(first > self.onward, count + first - self.onward, before)

    def reach_of(self, own: int, window: int) -> int:
        """:meth:`reach` of one row, which a decode step asks of each request: NumPy would take longer to begin."""
        count = len(self.early)
        first = (int(self.early[own]) if own < count else self.onward + own - count) - window
        if first > self.onward:
            return own - count - first + self.onward
        return own - (int(self.early.searchsorted(first)) if count else 0)

    def last(self, kept: int, end: int) -> "Places":
        """Those of the last ``kept`` entries before the position ``end``, and of what comes behind them."""
        dropped = len(self.early) + end - self.onward - kept
        return Places(self.early[dropped:], self.onward + max(dropped - len(self.early), 0))


NO_ENTRY = np.zeros(0, np.int64)
ANCHOR = np.zeros(1, np.int64)
EVERY_POSITION = Places(NO_ENTRY, 0)
