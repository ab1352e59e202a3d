"""The KV memory of one model: the page pool, the shared map and the private tables, moved together.

Everything here happens while the scheduler composes a batch, never inside a forward: the forward only reads
tables.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fathom.runtime.kv.pages import OutOfPages, PagePool, pages_of
from fathom.runtime.kv.prefix import SharedPages
from fathom.runtime.kv.tables import Tables
from fathom.runtime.plan import FIXED, SCORED, PrefillPlan, deep_tokens, tokens_per_span


@dataclass(frozen=True)
class Growth:
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
    """Physical pages of a request whose first ``length`` tokens (generated ones included) have been computed.

    This is what admission counts: with ``length`` the longest the request can get, what it needs to fit at all.
    """
    shared = plan.shared_spans * pages_of(length, page_size)
    private = range(plan.shared_spans, plan.spans)
    return shared + sum(
        pages_of(private_tokens(plan, span, length, prompt_tokens), page_size) for span in private
    )


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
        owners: by row, for the rows that are open.
    """

    def __init__(self, pages: int, page_size: int, spans: int, virtual_pages: int) -> None:
        self.page_size = page_size
        self.spans = spans
        self.pool = PagePool(pages, page_size, arenas=spans)
        self.shared = SharedPages(self.pool, spans, virtual_pages)
        self.tables = Tables(self.pool, spans)
        self.owners: dict[int, Owner] = {}

    def clear(self) -> None:
        """Forget everything."""
        self.pool.clear()
        self.shared.clear()
        self.tables.clear()
        self.owners.clear()

    def open(self, row: int, plan: PrefillPlan, prompt_tokens: int) -> None:
        """Take a request in."""
        assert plan.spans == self.spans, "the plan is for another layout of pages"
        self.tables.open(row, plan.shared_spans)
        self.owners[row] = Owner(plan, prompt_tokens)

    def close(self, row: int) -> None:
        """Let a request go: its private pages are free, its virtual pages are the engine's to free
        or to cache.
        """
        self.tables.release(row)
        self.owners.pop(row, None)

    def need(self, growth: Sequence[Growth]) -> int:
        """Physical pages that :meth:`grow` would take."""
        total = 0
        for step in growth:
            total += self.tables.first_private(step.row) * len(step.virtual)
            total += sum(self.tables.need(step.row, span, count) for span, count in self._private(step))
        return total

    def grow(self, growth: Sequence[Growth]) -> None:
        """Back the new virtual pages and append to the private tables.

        Raises:
            OutOfPages: nothing is changed then.
        """
        needed = self.need(growth)
        if needed > self.pool.free:
            raise OutOfPages(f"{needed} KV pages needed, {self.pool.free} of {self.pool.total} free")
        by_depth: dict[int, list[np.ndarray]] = {}
        for step in growth:
            by_depth.setdefault(self.tables.first_private(step.row), []).append(step.virtual)
        for depth, virtual in by_depth.items():
            self.shared.back(np.concatenate(virtual), depth)
        for step in growth:
            for span, count in self._private(step):
                self.tables.append(step.row, span, count)

    def _private(self, step: Growth) -> list[tuple[int, int]]:
        """(span, new entries) of each private span that grows."""
        found = []
        for span in self.tables.lengths(step.row):
            owner = self.owners[step.row]
            decided = owner.plan.step_of_span(span)
            if decided is None or (decided.kind == SCORED and not decided.kept):
                continue  # by retention or by scores: the mechanism itself knows how many entries there are
            before = private_tokens(owner.plan, span, step.begin, owner.prompt_tokens)
            if self.tables.length(step.row, span) == 0:
                before = 0
            count = private_tokens(owner.plan, span, step.end, owner.prompt_tokens) - before
            if count:
                found.append((span, count))
        return found
