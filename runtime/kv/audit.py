"""The ledger of pages: every page is free, cached or held, and never two of these."""

from dataclasses import dataclass

import numpy as np

from fathom.runtime.kv.pages import PagePool
from fathom.runtime.kv.prefix import UNBACKED, SharedPages
from fathom.runtime.kv.tables import Tables


class AuditError(RuntimeError):
    """Pages were lost, or have an owner that does not know of the other one."""


@dataclass(frozen=True)
class Audit:
    """Pages of one pool.

    Attributes:
        total: all pages, the dummy not counted.
        free: in the free list.
        cached: behind virtual pages that only the prefix cache holds.
        held: behind virtual pages of running requests, and in private tables.
        per_span: pages in use per span.
    """

    total: int
    free: int
    cached: int
    held: int
    per_span: tuple[int, ...]

    @property
    def balanced(self) -> bool:
        """Whether nothing was lost and nothing counted twice."""
        return self.free + self.cached + self.held == self.total


def audit(
    pool: PagePool, shared: SharedPages, tables: Tables, cached: np.ndarray, retained: Tables | None = None
) -> Audit:
    """Count every page, each from the place that owns it.

    Args:
        cached: [pages] ids of the virtual pages that nobody but the prefix cache holds.
        retained: tables that retention fills, of the same pool.
    """
    behind_cache = shared.backed(cached)
    both = [tables] if retained is None else [tables, retained]
    private = np.unique(np.concatenate([item.all_pages() for item in both]))
    per_span = np.count_nonzero(shared.backing, axis=1)
    shared_total = int(per_span.sum())
    for item in both:
        for row in list(item._rows):
            for span in item.lengths(row):
                per_span[span] += len(item.pages(row, span))
    return Audit(
        total=pool.total,
        free=pool.free,
        cached=behind_cache,
        held=shared_total - behind_cache + len(private),
        per_span=tuple(int(count) for count in per_span),
    )


def check(
    pool: PagePool, shared: SharedPages, tables: Tables, cached: np.ndarray, retained: Tables | None = None
) -> Audit:
    """The audit, after proving from the pages themselves that no page is in two places.

    Raises:
        AuditError: with what does not balance.
    """
    found = audit(pool, shared, tables, cached, retained)
    if not found.balanced:
        raise AuditError(f"free + cached + held is not total: {found}")
    free, behind = pool.free_pages(), shared.backing[shared.backing != UNBACKED]
    both = [tables] if retained is None else [tables, retained]
    private, owners = np.unique(np.concatenate([item.all_pages() for item in both]), return_counts=True)
    everything = np.concatenate([free, behind, private])
    if len(np.unique(everything)) != len(everything):
        raise AuditError("a page is in two places at once")
    if len(everything) and (everything.min() < 1 or everything.max() > pool.total):
        raise AuditError("a page outside the pool is in use")
    if (pool.owners(free) != 0).any() or (pool.owners(behind) != 1).any():
        raise AuditError("a free page has an owner, or a cached page several")
    if pool.in_use.tolist() != _distinct_per_span(shared, both):
        raise AuditError(f"the pool counts {pool.in_use.tolist()} pages per span: {found}")
    if (pool.owners(private) != owners).any():
        raise AuditError("a private page has other owners than the tables that hold it")
    return found


def _distinct_per_span(shared: SharedPages, tables: list[Tables]) -> list[int]:
    """Pages in use per span, each once."""
    counts = np.count_nonzero(shared.backing, axis=1).tolist()
    for span in range(shared.spans):
        own = [t.pages(row, span) for t in tables for row in list(t._rows) if span in t.lengths(row)]
        counts[span] += len(np.unique(np.concatenate(own))) if own else 0
    return counts
