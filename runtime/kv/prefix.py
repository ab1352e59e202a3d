"""The part of KV that requests may share: virtual pages, backed at the spans below a plan's first narrowing.

The engine's own allocator, prefix cache and request table deal in virtual slots. A virtual page is backed by
one physical page per span, from span 0 up to its owner's first narrowing: the KV of a token there depends on
the tokens before it and on nothing else, so whoever has the same tokens under the same policy may read it.
Nothing above that is ever reachable from a virtual slot.
"""

import numpy as np

from fathom.runtime.kv.pages import OutOfPages, PagePool, slots_of

UNBACKED = 0  # the dummy page


class SharedPages:
    """Map from virtual pages to physical pages, one row per span.

    Attributes:
        backing: [spans, virtual pages + 1] int32 physical page, or UNBACKED.
        backed_since: virtual pages that were backed since they were last sent to a device (``mirror.py``), if there
            is one. What backs no page any more is not sent: nobody looks there.
    """

    backed_since: list[np.ndarray] | None = None

    def __init__(self, pool: PagePool, spans: int, virtual_pages: int) -> None:
        self.pool = pool
        self.spans = spans
        self.backing = np.zeros((spans, virtual_pages + 1), np.int32)

    def clear(self) -> None:
        """Forget the map; the pool is cleared by its owner."""
        self.backing[:] = UNBACKED

    def back(self, virtual: np.ndarray, spans: int) -> None:
        """Give each of these virtual pages a physical page at the spans ``0 .. spans - 1``.

        Args:
            virtual: [pages] ids, unbacked so far.

        Raises:
            OutOfPages: nothing is changed then.
        """
        if spans == 0 or len(virtual) == 0:
            return
        assert not self.backing[0, virtual].any(), "a virtual page is backed twice"
        if spans * len(virtual) > self.pool.free:
            needed = f"{spans * len(virtual)} KV pages needed"
            raise OutOfPages(f"{needed}, {self.pool.free} of {self.pool.total} free")
        for span in range(spans):
            self.backing[span, virtual] = self.pool.take(len(virtual), span)
        if self.backed_since is not None:
            self.backed_since.append(virtual)

    def release(self, virtual: np.ndarray) -> int:
        """Give back whatever backs these virtual pages; the number of physical pages that were let go."""
        held = self.backing[:, virtual]
        pages = held[held != UNBACKED]
        self.pool.give_back(pages)
        self.backing[:, virtual] = UNBACKED
        return len(pages)

    def backed(self, virtual: np.ndarray) -> int:
        """Physical pages behind these virtual pages."""
        return int(np.count_nonzero(self.backing[:, virtual]))

    def depth(self, virtual_page: int) -> int:
        """Spans at which one virtual page is backed."""
        return int(np.count_nonzero(self.backing[:, virtual_page]))

    def slots(self, span: int, virtual_slots: np.ndarray) -> np.ndarray:
        """Physical slots of virtual slots at one span; slots of the dummy page where nothing is behind them.

        Args:
            virtual_slots: [tokens] integers.

        Returns:
            [tokens] int32.
        """
        size = self.pool.page_size
        if size == 1:
            return self.backing[span].take(virtual_slots)
        page, offset = np.divmod(virtual_slots, size)
        return self.backing[span].take(page) * np.int32(size) + offset.astype(np.int32)

    def run(self, span: int, virtual_slots: np.ndarray) -> np.ndarray:
        """:meth:`slots` of a request's first tokens, whose slots are those of whole pages: page by page."""
        size = self.pool.page_size
        if size == 1:
            return self.backing[span].take(virtual_slots)
        return slots_of(self.backing[span].take(virtual_slots[::size] // size), size, 0, len(virtual_slots))
