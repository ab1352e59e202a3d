"""The KV memory of one model: the page pool, the shared map and the private tables, moved together.

Everything here happens while the scheduler composes a batch, never inside a forward: the forward only reads
tables.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np

from fathom.runtime.kv.leaners import Leaners
from fathom.runtime.kv.pages import OutOfPages, PagePool, pages_of
from fathom.runtime.kv.places import ANCHOR, EVERY_POSITION, NO_ENTRY, Places
from fathom.runtime.kv.prefix import SharedPages
from fathom.runtime.kv.tables import Tables
from fathom.runtime.plan import FIXED, PrefillPlan, deep_tokens, tokens_per_span

Private: TypeAlias = list[tuple[Tables, int, int]]
"""Of a request's private spans that grow: the tables, the span, its new entries."""


class Growth(NamedTuple):
    """What one engine step adds to one request.

    Attributes:
        row: the engine's request row. One that is not open is dense (SGLang's beams have rows of their own).
        begin, end: positions of the new tokens.
        virtual: [pages] ids of the virtual pages that are new for these tokens.
    """

    row: int
    begin: int
    end: int
    virtual: np.ndarray


@dataclass(frozen=True)
class Owner:
    """A request as far as memory is concerned."""

    plan: PrefillPlan
    prompt_tokens: int


def private_tokens(plan: PrefillPlan, span: int, length: int, prompt_tokens: int) -> int:
    """Entries that a private span has room for once ``length`` tokens have been computed.

    Above a SCORED step it is the most that they can be. Where the step itself says how many prompt tokens it keeps,
    the room for them is taken with the first tokens, so that it is there when the whole prompt has been seen.
    """
    step = plan.step_of_span(span)
    assert step is not None, "a shared span has no private entries"
    if step.kind == FIXED:
        return deep_tokens(step, length, prompt_tokens)
    if step.kept:
        return step.kept + max(length - prompt_tokens, 0) if length else 0
    if length < prompt_tokens:
        return 0
    return tokens_per_span(plan, prompt_tokens)[span] + length - prompt_tokens


def pages_held(plan: PrefillPlan, length: int, prompt_tokens: int, page_size: int) -> int:
    """Physical pages of a request while the step runs that brings it to ``length`` tokens (with generated ones).

    This is what admission counts: with ``length`` the longest the request can get, what it needs to fit at all.
    Where retention drops entries, the whole prompt and what is kept of it are there at once, and the room for the
    latter is taken with the first tokens.
    """
    compacted, pages = plan.compacted_spans(prompt_tokens), 0
    for span in range(plan.spans):
        until = min(length, prompt_tokens) if span in compacted else length
        shared = span < plan.shared_spans
        pages += pages_of(until if shared else private_tokens(plan, span, until, prompt_tokens), page_size)
        if span in compacted and length:
            kept = plan.retained_tokens(span, prompt_tokens) + max(length - prompt_tokens, 0)
            pages += pages_of(kept, page_size)
    return pages


def pages_taken(
    plan: PrefillPlan, begin: int, end: int, prompt_tokens: int, page_size: int, opened: bool
) -> int:
    """Physical pages that computing the tokens ``begin .. end - 1`` takes.

    Args:
        opened: whether the request has computed tokens before; otherwise what lies before ``begin`` is a hit in the
            prefix cache, which holds shared spans only.
    """
    held = pages_held(plan, begin, prompt_tokens, page_size) if opened else 0
    if not opened:
        held = plan.shared_spans * pages_of(begin, page_size)
    return pages_held(plan, end, prompt_tokens, page_size) - held


class KvMemory:
    """Pool, shared map and tables of one model.

    Attributes:
        pool, shared, tables: see their modules.
        retained: the tables that take the place of a row's own when retention has filled them: prompt entries that
            stay, then generated tokens. A row is here from its first token until its prompt is complete.
        leaners: who reads on in virtual pages of the prefix cache.
        owners: by row, for the rows that are open.
        on_close: called with each row that is let go.
    """

    def __init__(self, pages: int, page_size: int, spans: int, virtual_pages: int) -> None:
        self.page_size = page_size
        self.spans = spans
        self.pool = PagePool(pages, page_size, arenas=spans)
        self.shared = SharedPages(self.pool, spans, virtual_pages)
        self.tables = Tables(self.pool, spans)
        self.retained = Tables(self.pool, spans)
        self.leaners = Leaners(virtual_pages)
        self.owners: dict[int, Owner] = {}
        self.on_close: list[Callable[[int], None]] = []
        self._kept: dict[int, dict[int, int]] = {}  # row -> span -> prompt entries that retention keeps
        self._settled: dict[int, dict[int, int]] = {}  # the same, once nothing else is held
        # row -> span of a SCORED step -> positions of the prompt that go on there
        self._chosen: dict[int, dict[int, np.ndarray]] = {}

    def clear(self) -> None:
        """Forget everything."""
        self.pool.clear()
        self.shared.clear()
        self.tables.clear()
        self.retained.clear()
        for by_row in (self._kept, self._settled, self._chosen):
            by_row.clear()
        self.leaners.clear()
        self.owners.clear()

    def open(self, row: int, plan: PrefillPlan, prompt_tokens: int) -> None:
        """Take a request in."""
        assert plan.spans == self.spans, "the plan is for another layout of pages"
        self.tables.open(row, plan.shared_spans)
        self.owners[row] = Owner(plan, prompt_tokens)
        if compacted := plan.compacted_spans(prompt_tokens):
            self.retained.open(row, compacted.start, compacted.stop)
            self._kept[row] = {span: plan.retained_tokens(span, prompt_tokens) for span in compacted}

    def close(self, row: int) -> None:
        """Let a request go: its private pages are free, its virtual pages are the engine's to free
        or to cache.
        """
        self.tables.release(row)
        self.retained.release(row)
        for by_row in (self._kept, self._settled, self._chosen):
            by_row.pop(row, None)
        self.owners.pop(row, None)
        for told in self.on_close:
            told(row)

    def pending(self, row: int) -> dict[int, int]:
        """By span the prompt entries that retention is going to keep, until the row is settled."""
        return self._kept.get(row, {})

    def fit(self, row: int, span: int, kept: int) -> None:
        """Fewer prompt entries of a pending span are kept than there is room for."""
        spare = self._kept[row][span] - kept
        self.retained.truncate(row, span, self.retained.length(row, span) - spare)
        self._kept[row][span] = kept

    def choose(self, row: int, span: int, positions: np.ndarray) -> None:
        """Take note of a SCORED step's decision.

        Args:
            span: the first above the step; positions: [kept] int64 of the prompt, ascending, that go on there.
        """
        self._chosen.setdefault(row, {})[span] = positions

    def places(self, row: int, span: int) -> Places:
        """Where the entries of a private table are. Where retention has dropped some, for a layer that kept the
        last ones.
        """
        kept = self._settled.get(row, {}).get(span)
        return self._present(row, span) if kept is None else self._last(row, span, kept)

    def places_kept(self, row: int, span: int) -> Places:
        """The same of a pending span's table of what is kept."""
        return self._last(row, span, self._kept[row][span])

    def _last(self, row: int, span: int, kept: int) -> Places:
        return self._present(row, span).last(kept, self.owners[row].prompt_tokens)

    def _present(self, row: int, span: int) -> Places:
        plan, prompt = self.owners[row].plan, self.owners[row].prompt_tokens
        step = plan.step_of_span(span)
        if step is None:
            return EVERY_POSITION
        if step.kind == FIXED:
            return Places(ANCHOR if step.anchor and prompt > 1 else NO_ENTRY, prompt - 1)
        return Places(self._chosen[row][step.layer // plan.span], prompt)

    def shared_spans(self, rows: Sequence[int]) -> int:
        """Up to which span all of these rows are read through the shared map alone."""
        if self.any_pending(rows):
            return min(min([self.tables.first_private(row), *self.pending(row)]) for row in rows)
        return min(self.tables.firsts(rows), default=0)

    def any_pending(self, rows: Sequence[int]) -> bool:
        """Whether some of these rows have a pending span."""
        return bool(self._kept) and any(row in self._kept for row in rows)

    def after(self, row: int, span: int) -> int:
        """Generated tokens that a pending span has room for; 0 in any other span."""
        kept = self.pending(row).get(span)
        return 0 if kept is None else max(self.retained.length(row, span) - kept, 0)

    def shrink(self, row: int, count: int) -> None:
        """Drop the last ``count`` tokens, which are generated ones, from every table of a row."""
        for tables in (self.tables, self.retained):
            for span, length in tables.lengths(row).items() if row in tables else ():
                if tables is self.retained or span not in self.pending(row):
                    tables.truncate(row, span, length - count)

    def settle(self, row: int) -> None:
        """The kept entries of a complete prompt are in their places: the request holds nothing else from now on."""
        self.tables.adopt(row, self.retained)
        self._settled[row] = self._kept.pop(row)

    def settled(self, row: int) -> bool:
        """Whether entries of the row's prompt were dropped."""
        owner = self.owners.get(row)
        return (
            owner is not None
            and row not in self.retained
            and len(owner.plan.compacted_spans(owner.prompt_tokens)) > 0
        )

    def all_held(self, rows: Sequence[int], lengths: Sequence[int]) -> list[int]:
        """:meth:`held` of each row."""
        size, spans = self.page_size, self.spans
        return [
            spans * pages_of(length, size)
            if depth == spans and row not in self._kept
            else self.held(row, length)
            for row, length, depth in zip(rows, lengths, self.tables.firsts(rows), strict=True)
        ]

    def held(self, row: int, length: int) -> int:
        """Physical pages of a row with ``length`` tokens, its part of the prefix cache included."""
        pages = self.tables.page_count(row)
        if row in self.retained:
            pages += self.retained.page_count(row)
            length = min(length, self.owners[row].prompt_tokens)
        return pages + self.tables.first_private(row) * pages_of(length, self.page_size)

    def need(self, growth: Sequence[Growth]) -> int:
        """Physical pages that :meth:`grow` would take."""
        depths, shared = self.tables.firsts([step.row for step in growth]), map(self._shared, growth)
        return self._need(growth, depths, list(shared), [self._private(step) for step in growth])

    @staticmethod
    def _need(
        growth: Sequence[Growth],
        depths: Sequence[int],
        shared: Sequence[np.ndarray],
        private: Sequence[Private],
    ) -> int:
        total = 0
        for step, depth, virtual, grows in zip(growth, depths, shared, private, strict=True):
            total += depth * len(virtual)
            for tables, span, count in grows:
                total += tables.need(step.row, span, count)
        return total

    def grow(self, growth: Sequence[Growth]) -> None:
        """Back the new virtual pages and append to the private tables.

        Raises:
            OutOfPages: nothing is changed then.
        """
        depths, shared = self.tables.firsts([step.row for step in growth]), list(map(self._shared, growth))
        private = [self._private(step) for step in growth]
        needed = self._need(growth, depths, shared, private)
        if needed > self.pool.free:
            raise OutOfPages(f"{needed} KV pages needed, {self.pool.free} of {self.pool.total} free")
        by_depth: dict[int, list[np.ndarray]] = {}
        for depth, virtual in zip(depths, shared, strict=True):
            by_depth.setdefault(depth, []).append(virtual)
        for depth, together in by_depth.items():
            self.shared.back(np.concatenate(together), depth)
        by_span: dict[tuple[Tables, int], list[tuple[int, int]]] = {}
        for step, grows in zip(growth, private, strict=True):
            for tables, span, count in grows:
                by_span.setdefault((tables, span), []).append((step.row, count))
        for (tables, span), counts in by_span.items():
            tables.append(span, counts)

    def _shared(self, step: Growth) -> np.ndarray:
        """The virtual pages that are to be backed; none for tokens after a prompt of which entries are dropped."""
        if step.row not in self.retained:
            return step.virtual
        prompt, size = self.owners[step.row].prompt_tokens, self.page_size
        return step.virtual[: max(pages_of(min(step.end, prompt), size) - pages_of(step.begin, size), 0)]

    def _private(self, step: Growth) -> Private:
        row = step.row
        if not self.tables.of(row) and row not in self.retained:
            return []
        owner = self.owners[row]
        pending = self.retained.lengths(row) if row in self.retained else {}
        found = []
        for span, length in self.tables.lengths(row).items():
            if owner.plan.step_of_span(span) is None:  # shared until retention dropped entries
                found.append((self.tables, span, step.end - step.begin))
                continue
            begin, end = step.begin, step.end
            if span in pending:
                begin, end = min(begin, owner.prompt_tokens), min(end, owner.prompt_tokens)
            before = private_tokens(owner.plan, span, begin, owner.prompt_tokens) if length else 0
            found.append(
                (self.tables, span, private_tokens(owner.plan, span, end, owner.prompt_tokens) - before)
            )
        for span, length in pending.items():
            room = 0 if length else self._kept[row][span]
            after = step.end - max(step.begin, owner.prompt_tokens)
            found.append((self.retained, span, room + max(after, 0)))
        return [(tables, span, count) for tables, span, count in found if count]
