"""One decode step under SFI as data: what each request reads, and whose selection is renewed.

A step is planned on the host, from the host's numbers, and sent to the device as a whole: nothing waits for a GPU.
"""

from dataclasses import dataclass

import numpy as np
import torch

from fathom.kernels.pack_segment import pack_segment
from fathom.kernels.two_segment_attention import FIELDS, Evidence, SegmentPlan
from fathom.runtime.sfi.config import SelectorConfig, SfiConfig
from fathom.runtime.sfi.selector import Selection, candidates, random_scores, select
from fathom.runtime.staging import send

NOBODY = (-1, 0, 0, 0, 0, -1, 0)
"""A column of :class:`RefreshBatch` that no request takes."""


class RefreshBatch:
    """The requests whose selection is renewed; entry e owns row e of the step's evidence. All [capacity] int64.

    Attributes:
        packed: [7, capacity], the others one after the other.
        rows: page-table row, or -1 where the entry is not taken.
        begin, end: candidate range in the request's table; empty where the entry is not taken.
        start: first token of the request's run in every layer's compact buffer.
        selected: entries that are chosen per KV head at most.
        seed: of a choice at random, -1 for the Selector's.
        length: tokens of the request, for the choice at random.
    """

    def __init__(self, packed: torch.Tensor) -> None:
        self.packed = packed
        self.rows, self.begin, self.end, self.start, self.selected, self.seed, self.length = packed.unbind()

    @classmethod
    def nobody(cls, capacity: int) -> "RefreshBatch":
        """Entries that no request takes."""
        return cls(torch.tensor(NOBODY).unsqueeze(1).repeat(1, capacity))


@dataclass(frozen=True)
class Reads:
    """What the rows' own requests say of the server's numbers. All [batch] int64.

    Attributes:
        recent: last tokens that a fast step reads; selected: entries chosen per KV head at most.
        seed: of a choice at random, -1 for the Selector's.
        length: tokens of the request.
    """

    recent: np.ndarray
    selected: np.ndarray
    seed: np.ndarray
    length: np.ndarray

    @classmethod
    def same(cls, lengths: np.ndarray, config: SfiConfig) -> "Reads":
        """The server's numbers for all rows."""
        recent, selected, seed = (
            np.full_like(lengths, value) for value in (config.recent, config.selected, -1)
        )
        return cls(recent, selected, seed, lengths)


@dataclass(frozen=True)
class SfiStep:
    """What every layer of a span reads in one decode step.

    Attributes:
        plan: the packed descriptor of the attention.
        refreshed: [batch] bool, whose selection is renewed; for :meth:`PhaseState.advance`.
        held: [batch] int64, entries in each request's run after this step; -1 where nothing is packed.
        refresh: the requests to renew, in the order of the evidence.
    """

    plan: SegmentPlan
    refreshed: np.ndarray
    held: np.ndarray
    refresh: RefreshBatch

    def on(self, device: torch.device | str) -> "SfiStep":
        """The same step with its tensors on a device, for kernels; itself where they are there already."""
        if self.plan.packed.device == torch.device(device):
            return self
        plan = SegmentPlan(send(self.plan.packed, device), self.plan.kv_heads)
        refresh = self.refresh
        if refresh.packed.numel():
            refresh = RefreshBatch(send(refresh.packed, device))
        return SfiStep(plan, self.refreshed, self.held, refresh)


def grant_evidence(
    slow: np.ndarray, start: np.ndarray, lengths: np.ndarray, capacity: int, config: SfiConfig
) -> np.ndarray:
    """Whose selection a step renews: [batch] int64 row of the evidence, -1 for the others.

    The first ``capacity`` slow rows that have a compact buffer and all their sink tokens; the others stay slow
    until their turn.

    Args:
        slow, start: as in :func:`plan_step`; lengths: [batch] tokens of each request, the current one included.
    """
    wanted = slow & (start >= 0) & (lengths >= config.sink)
    place = wanted.cumsum() - 1
    return np.where(wanted & (place < capacity), place, -1)


def plan_step(
    rows: np.ndarray,
    lengths: np.ndarray,
    slow: np.ndarray,
    start: np.ndarray,
    held: np.ndarray,
    capacity: int,
    kv_heads: int,
    config: SfiConfig,
) -> SfiStep:
    """Plan one decode step for a model whose layers all share one page table.

    A slow row reads its whole table, and so does a row without a compact buffer.

    Args:
        rows: [batch] page-table rows; lengths: [batch] entries in them, the current token included.
        slow: [batch] bool, from :meth:`PhaseState.slow`.
        start: [batch] first token of the request's run in the compact buffers, or -1 where it has none.
        held: [batch] entries in the run; what the last step's :attr:`SfiStep.held` says.
        capacity: rows of the evidence.
    """
    evidence = grant_evidence(slow, start, lengths, capacity, config)
    reads = Reads.same(lengths, config)
    return plan_span(rows, lengths, slow, start, held, evidence, capacity, kv_heads, config, reads)


def plan_span(
    rows: np.ndarray,
    lengths: np.ndarray,
    slow: np.ndarray,
    start: np.ndarray,
    held: np.ndarray,
    evidence: np.ndarray,
    capacity: int,
    kv_heads: int,
    config: SfiConfig,
    reads: Reads,
) -> SfiStep:
    """Plan one decode step for the layers of one span, whose page table has a length of its own.

    A table that has no whole sink yet when its request is refreshed is not packed, and is read whole until the next
    refresh.

    Args:
        evidence: [batch] of :func:`grant_evidence`, the same for all spans. The rest as in :func:`plan_step`, of
            this span; ``held`` is -1 for a table that is not packed. Several rows may be of one request, each
            with the length of the table up to its own token.
    """
    dense = slow | (start < 0) | (held < 0)
    refreshed = evidence >= 0
    complete = lengths >= config.sink
    packed = refreshed & complete

    descriptor = np.empty((len(rows), len(FIELDS)), np.int32)
    recent = np.maximum(lengths - reads.recent, config.sink)
    descriptor[:, 0] = rows
    descriptor[:, 1] = np.minimum(np.where(dense, 0, recent), lengths)
    descriptor[:, 2] = lengths
    descriptor[:, 3] = np.maximum(start, 0)
    descriptor[:, 4] = np.where(dense, 0, held)
    descriptor[:, 5] = np.where(packed, evidence, -1)
    plan = SegmentPlan(torch.from_numpy(descriptor), kv_heads)
    if capacity == 0:
        return SfiStep(plan, refreshed, held, RefreshBatch.nobody(0))

    # Entry `capacity` collects the rows that are not packed and is cut off.
    first, last = candidates(lengths, config.sink, reads.recent)
    slot = np.where(packed, evidence, capacity)
    gathered = np.tile(np.array(NOBODY)[:, None], capacity + 1)
    gathered[:, slot] = rows, first, last, start, reads.selected, reads.seed, reads.length
    batch = RefreshBatch(torch.from_numpy(gathered[:, :capacity].copy()))
    renewed = np.where(complete, config.sink + np.minimum(last - first, reads.selected), -1)
    return SfiStep(plan, refreshed, np.where(refreshed, renewed, held), batch)


def refresh_layer(
    evidence: Evidence,
    pool: tuple[torch.Tensor, torch.Tensor],
    compact: tuple[torch.Tensor, torch.Tensor],
    page_table: torch.Tensor,
    batch: RefreshBatch,
    config: SfiConfig,
    selector: SelectorConfig,
    layer: int = 0,
    at_random: bool = False,
) -> Selection:
    """Selector and reorganisation of one layer (sections 3.2, 3.3 and 4.1).

    Args:
        layer: its number; at_random: whether some request of the batch chooses at random.
        evidence: logits [capacity, heads, width] and key norms [capacity, kv_heads, width]; with a
            ``pitch`` no launch depends on the lengths, and nobody may choose at random.
        pool, compact, page_table: as in :func:`fathom.kernels.pack_segment.pack_segment`.
    """
    capacity, kv_heads, width = evidence.key_norms.shape
    logits = evidence.logits.view(capacity, kv_heads, -1, width)
    drawn = None
    if at_random:
        drawn = random_scores(batch.seed.clamp(min=0), batch.length, layer, kv_heads, width), batch.seed >= 0
    selection = select(
        logits,
        evidence.key_norms,
        batch.begin,
        batch.end,
        config.selected,
        selector,
        batch.selected,
        drawn,
        evidence.pitch,
    )
    pack_segment(pool, compact, page_table, batch.rows, batch.start, selection.indices, config.sink)
    return selection
