"""Private page tables: what a request holds above the first narrowing of its plan, one table per span.

Each table has a length of its own and keeps its entries in the order of their positions. Private KV depends on
the whole prompt, not only on the tokens before it, so it never reaches the prefix cache; it lives and dies
with its row.
"""

from collections.abc import Sequence

import numpy as np

from fathom.runtime.kv.pages import PagePool, pages_of, slots_of

ROOM = 64
"""Pages that a table has room for at least when it grows, and one more for each so many that it has."""


class Table:
    """Entries of one span.

    Attributes:
        length: entries in use.
        mirrored: the first pages, so many of them, are on the device too (``mirror.py``).
    """

    def __init__(self) -> None:
        self.pages = np.zeros(0, np.int32)
        self.length = 0

    @property
    def pages(self) -> np.ndarray:
        """[pages] int32; what is read of it stays as it is."""
        return self._room[: self._count]

    @pages.setter
    def pages(self, pages: np.ndarray) -> None:
        self._room, self._count = pages, len(pages)
        self._slots: np.ndarray | None = None
        self.mirrored = 0

    def add(self, fresh: np.ndarray) -> None:
        """More pages, behind those that there are."""
        first, self._count = self._count, self._count + len(fresh)
        if self._count > len(self._room):
            # Room for as many as some decode steps take, so that not each of them copies a long table.
            grown = np.empty(self._count + ROOM + self._count // ROOM, np.int32)
            grown[:first] = self._room[:first]
            self._room = grown
        self._room[first : self._count] = fresh
        self._slots = None

    def cut(self, keep: int) -> None:
        """Drop all but the first ``keep`` pages."""
        mirrored = min(self.mirrored, keep)
        self.pages = self.pages[:keep].copy()
        self.mirrored = mirrored

    def slots(self, page_size: int) -> np.ndarray:
        """[length] int32; worked out when there are other pages than the last time."""
        if self._slots is None:
            self._slots = slots_of(self.pages, page_size, 0, self._count * page_size)
        return self._slots[: self.length]


class Tables:
    """All private tables of a model, by (row, span).

    A row is the engine's request row. Spans below a row's ``first`` span are not here: they are read through
    the shared map.
    """

    def __init__(self, pool: PagePool, spans: int) -> None:
        self.pool = pool
        self.spans = spans
        self._rows: dict[int, dict[int, Table]] = {}
        self._first: dict[int, int] = {}

    def clear(self) -> None:
        """Forget all rows; the pool is cleared by its owner."""
        self._rows.clear()
        self._first.clear()

    def __contains__(self, row: int) -> bool:
        return row in self._rows

    def __len__(self) -> int:
        """Open rows."""
        return len(self._rows)

    def open(self, row: int, first: int, stop: int | None = None) -> None:
        """Start a row whose spans ``first .. stop - 1`` are private (``first == spans`` for a dense request)."""
        assert row not in self._rows, f"row {row} is already open"
        self._rows[row] = {span: Table() for span in range(first, self.spans if stop is None else stop)}
        self._first[row] = first

    def first_private(self, row: int) -> int:
        """The first private span of a row; ``spans`` where there is none, as for a row that was never opened."""
        return self._first.get(row, self.spans)

    def firsts(self, rows: Sequence[int]) -> list[int]:
        """:meth:`first_private` of each row."""
        return [self._first.get(row, self.spans) for row in rows]

    def of(self, row: int) -> dict[int, Table]:
        """The tables of a row by span; none for one that is not open."""
        return self._rows.get(row, {})

    def length(self, row: int, span: int) -> int:
        """Entries of a table."""
        return self._rows[row][span].length

    def lengths(self, row: int) -> dict[int, int]:
        """Entries per private span."""
        return {span: table.length for span, table in self._rows.get(row, {}).items()}

    def need(self, row: int, span: int, count: int) -> int:
        """Pages that :meth:`append` would take for ``count`` more entries."""
        table = self._rows[row][span]
        return pages_of(table.length + count, self.pool.page_size) - len(table.pages)

    def need_all(self, row: int, count: int) -> int:
        """Pages that ``count`` more entries in each table of a row would take."""
        if self.pool.page_size == 1:
            return count * len(self._rows.get(row, ()))
        return sum(self.need(row, span, count) for span in self._rows.get(row, ()))

    def append(self, span: int, counts: Sequence[tuple[int, int]]) -> None:
        """Make room for more entries in tables of a span: ``counts`` are rows, none of them twice, and how many.

        Raises:
            OutOfPages: nothing is changed then.
        """
        needs = [self.need(row, span, count) for row, count in counts]
        fresh, first = self.pool.take(sum(needs), span), 0
        for (row, count), needed in zip(counts, needs, strict=True):
            table = self._rows[row][span]
            if needed:
                table.add(fresh[first : first + needed])
                first += needed
            table.length += count
            assert len(table.pages) == pages_of(table.length, self.pool.page_size)

    def truncate(self, row: int, span: int, length: int) -> None:
        """Drop the entries from ``length`` on, and the pages that no entry needs any more."""
        table = self._rows[row][span]
        assert 0 <= length <= table.length, "a table can only be cut shorter"
        keep = pages_of(length, self.pool.page_size)
        if keep < len(table.pages):
            self.pool.give_back(table.pages[keep:])
            table.cut(keep)
        table.length = length

    def adopt(self, row: int, other: "Tables") -> None:
        """Move the tables that another object of the same pool holds for a row in place of the row's own.

        Spans that were shared so far become private; the other object's row is closed.
        """
        taken = other._rows.pop(row)
        other._first.pop(row)
        for span, table in taken.items():
            self.pool.give_back(self._rows[row].get(span, Table()).pages)
            self._rows[row][span] = table
        self._first[row] = min(self._rows[row])
        assert set(range(self._first[row], self.spans)) == set(self._rows[row]), (
            "spans go private from the top"
        )

    def release(self, row: int) -> None:
        """Close a row and give back all its pages; a row that is not open is left alone."""
        for table in self._rows.pop(row, {}).values():
            self.pool.give_back(table.pages)
        self._first.pop(row, None)

    def slots(self, row: int, span: int, begin: int = 0, end: int | None = None) -> np.ndarray:
        """Physical slots of the entries ``begin .. end - 1``, [entries] int32; not to be written to."""
        table = self._rows[row][span]
        stop = table.length if end is None else end
        assert 0 <= begin <= stop <= table.length
        return table.slots(self.pool.page_size)[begin:stop]

    def pages(self, row: int, span: int | None = None) -> np.ndarray:
        """Pages of one table, or of all tables of a row."""
        tables = self._rows.get(row, {})
        if span is not None:
            return tables[span].pages
        return np.concatenate([table.pages for table in tables.values()] or [np.zeros(0, np.int32)])

    def page_count(self, row: int) -> int:
        """How many pages all tables of a row have."""
        tables = self._rows.get(row)
        return sum(len(table.pages) for table in tables.values()) if tables else 0

    def pages_per_span(self) -> np.ndarray:
        """[spans] int64 pages of all rows."""
        counts = np.zeros(self.spans, np.int64)
        for tables in self._rows.values():
            for span, table in tables.items():
                counts[span] += len(table.pages)
        return counts

    def all_pages(self) -> np.ndarray:
        """Pages of all rows; for audits."""
        return np.concatenate([self.pages(row) for row in self._rows] or [np.zeros(0, np.int32)])
