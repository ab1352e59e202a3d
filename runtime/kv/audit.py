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
    per_span = np.count_nonzero(shared.backing, axis=1) + tables.pages_per_span()
    if retained is not None:
        per_span += retained.pages_per_span()
    behind_cache = shared.backed(cached)
    return Audit(
        total=pool.total,
        free=pool.free,
        cached=behind_cache,
        held=int(per_span.sum()) - behind_cache,
        per_span=tuple(per_span.tolist()),
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
    free, in_use = pool.free_pages(), [shared.backing[shared.backing != UNBACKED], tables.all_pages()]
    if retained is not None:
        in_use.append(retained.all_pages())
    everything = np.concatenate([free, *in_use])
    if len(np.unique(everything)) != len(everything):
        raise AuditError("a page is in two places at once")
    if len(everything) and (everything.min() < 1 or everything.max() > pool.total):
        raise AuditError("a page outside the pool is in use")
    if pool.owned(free).any():
        raise AuditError("a free page has an owner")
    if not pool.owned(np.concatenate(in_use)).all():
        raise AuditError("a page in use has no owner")
    if tuple(pool.in_use.tolist()) != found.per_span:
        raise AuditError(f"the pool counts {pool.in_use.tolist()} pages per span: {found}")
    return found
