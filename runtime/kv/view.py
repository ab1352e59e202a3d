"""What the layers of one span read and write in one engine step: built once, read by each of its layers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from fathom.runtime.kv.memory import KvMemory
from fathom.runtime.kv.places import EVERY_POSITION, Places
from fathom.runtime.kv.prefix import UNBACKED
from fathom.runtime.plan import FIXED


@dataclass(frozen=True)
class Batch:
    """The requests of one engine step.

    Attributes:
        rows: [requests] the engine's request rows.
        lengths: [requests] tokens of each request, the new ones included.
        slots: of each request [tokens] its virtual slots, in the order of positions; perhaps a part of the engine's
            own table.
        new: [requests] query rows per request, an anchor that is computed again not counted.
        again: [requests] whether token 0 is computed again as an additional first row. Its KV below the first
            narrowing is there already; it is needed above.
        ghost: [requests] whether the request's one row is kept for its place in the batch only: it reads and writes
            the dummy page above the first narrowing.
        beyond: tokens behind each request's ``lengths`` for which its private tables have room already.
    """

    rows: np.ndarray
    lengths: np.ndarray
    slots: Sequence[np.ndarray]
    new: np.ndarray
    again: np.ndarray
    ghost: np.ndarray
    beyond: int = 0

    @classmethod
    def plain(
        cls,
        rows: np.ndarray,
        lengths: np.ndarray,
        slots: Sequence[np.ndarray],
        new: np.ndarray,
        beyond: int = 0,
    ) -> "Batch":
        """A batch in which every request computes its last ``new`` tokens and nothing else."""
        none = np.zeros(len(rows), bool)
        return cls(rows, lengths, slots, new, none, none, beyond)

    @cached_property
    def entry(self) -> np.ndarray:
        """[requests + 1] where each request's virtual slots begin."""
        return np.concatenate([[0], np.cumsum(self.lengths)])

    @cached_property
    def virtual(self) -> np.ndarray:
        """[sum of lengths] virtual slots, request after request."""
        return np.concatenate(self.slots)

    @cached_property
    def query(self) -> np.ndarray:
        """[requests + 1] where each request's query rows begin."""
        return np.concatenate([[0], np.cumsum(self.new)])

    @cached_property
    def written(self) -> np.ndarray:
        """[query rows] virtual slots that take the rows' keys and values."""
        new = zip(self.slots, self.new.tolist(), strict=True)
        return np.concatenate([own[len(own) - rows :] for own, rows in new])


@dataclass
class SpanView:
    """Segments of query rows, each with the entries it reads; the form of FlashInfer's and Triton's index lists.

    The query rows of a segment are the last entries it reads, in order: attention is causal "extend with prefix".

    Attributes:
        look_up: the int32 physical slots of all entries, or of a run of one segment's; see :attr:`slots`.
        entry: [segments + 1] int64: where each segment's entries begin in ``slots``.
        query: [segments + 1] int64: where each segment's rows begin in the packed query.
        write: [query rows] int64 physical slots that take the rows' keys and values.
        places: [segments] where the entries are; None where each segment's are at the positions from 0 on.
        cache: what a backend derives from this view, by its own keys.
    """

    look_up: Callable[[slice], np.ndarray]
    entry: np.ndarray
    query: np.ndarray
    write: np.ndarray
    places: Sequence[Places] | None = None
    cache: dict = field(default_factory=dict)

    def reach(self, window: int) -> np.ndarray | None:
        """[query rows] int64: how many entries before its own each row sees; None where all see everything.

        Args:
            window: earlier positions that a row sees; -1 for all of them.
        """
        if window < 0:
            return None
        key = ("reach", window)
        if key not in self.cache:
            new = np.diff(self.query)
            own = np.arange(self.query[-1]) + np.repeat(np.diff(self.entry) - self.query[1:], new)
            if not self.places:
                found = np.minimum(own, window)
            elif (new == 1).all():
                pairs = zip(self.places, own.tolist(), strict=True)
                found = np.array([places.reach_of(row, window) for places, row in pairs], np.int64)
            else:
                parts = np.split(own, self.query[1:-1])
                pairs = zip(self.places, parts, strict=True)
                found = np.concatenate([places.reach(part, window) for places, part in pairs])
            self.cache[key] = found
        return self.cache[key]

    @property
    def begin(self) -> np.ndarray:
        """[segments] int64: where each segment's entries begin where they lie on a device."""
        return self.entry[:-1]

    @cached_property
    def slots(self) -> np.ndarray:
        """[entries] int32 physical slots, segment after segment, in the order of positions.

        They are looked up when they are first asked for: a fast step of a long context reads a small part.
        """
        return self.look_up(slice(None))

    def part(self, segment: int, begin: int, end: int) -> np.ndarray:
        """[end - begin] int32 physical slots of the entries ``begin .. end - 1`` of a segment."""
        first = int(self.entry[segment])
        run = slice(first + begin, first + end)
        return self.slots[run] if "slots" in self.__dict__ else self.look_up(run)


class TableView(SpanView):
    """Each request is one segment: its private table of the span, or what the shared map says.

    Slots are looked up when they are asked for; a device that mirrors the tables never asks.
    """

    def __init__(self, memory: KvMemory, batch: Batch, span: int, all_shared: bool) -> None:
        """
        Args:
            all_shared: whether no request has a private table of this span.
        """
        self.memory, self.batch, self.span = memory, batch, span
        self.query, self.cache = batch.query, {}
        self.private: list[bool] | None = None
        if all_shared:
            self.entry, self.look_up = batch.entry, self._shared_part
            return
        rows, tables = batch.rows.tolist(), memory.tables
        self.private = [tables.first_private(row) <= span for row in rows]
        counts = [
            tables.length(row, span) - batch.beyond if private else length
            for row, private, length in zip(rows, self.private, batch.lengths.tolist(), strict=True)
        ]
        self.entry = np.concatenate([[0], np.cumsum(counts)])
        self.look_up = lambda run: self._all[run]

    @property
    def begin(self) -> np.ndarray:
        """Behind each request's entries there is room for those of the tokens beyond it."""
        return self.entry[:-1] + self.batch.beyond * np.arange(len(self.entry) - 1)

    @cached_property
    def places(self) -> Sequence[Places] | None:  # type: ignore[override]
        if self.private is None:
            return None
        return [
            self.memory.places(row, self.span) if own else EVERY_POSITION
            for row, own in zip(self.batch.rows.tolist(), self.private, strict=True)
        ]

    @property
    def room(self) -> int:
        """Entries of all requests, and those of the tokens beyond them."""
        return int(self.entry[-1]) + self.batch.beyond * (len(self.entry) - 1)

    @property
    def sources(self) -> np.ndarray:
        """[requests] row of each request, or -1 - row where its private table is read."""
        rows = self.batch.rows
        return rows if self.private is None else np.where(self.private, -1 - rows, rows)

    @cached_property
    def write(self) -> np.ndarray:  # type: ignore[override]
        if self.private is None:
            return self.memory.shared.slots(self.span, self.batch.written).astype(np.int64)
        new, query = self.batch.new, self.query
        last = np.repeat(self.entry[1:] - query[1:], new) + np.arange(query[-1])
        return self._all[last].astype(np.int64)

    @cached_property
    def _all(self) -> np.ndarray:
        """[entries] int32 physical slots."""
        memory, batch = self.memory, self.batch
        counts = np.diff(self.entry).tolist()
        private = self.private or [False] * len(batch.rows)
        return np.concatenate(
            [
                memory.tables.slots(row, self.span)[:count] if own else memory.shared.run(self.span, virtual)
                for row, own, virtual, count in zip(
                    batch.rows.tolist(), private, batch.slots, counts, strict=True
                )
            ]
        )

    def _shared_part(self, run: slice) -> np.ndarray:
        if run == slice(None):
            return self._all
        batch = self.batch
        request = int(np.searchsorted(batch.entry[1:-1], run.start, "right"))
        first = int(batch.entry[request])
        return self.memory.shared.slots(self.span, batch.slots[request][run.start - first : run.stop - first])


class Views(dict[int, SpanView]):
    """The view of each span in one engine step, made when it is first asked for."""

    def __init__(self, memory: KvMemory, batch: Batch) -> None:
        super().__init__()
        self.memory, self.batch = memory, batch
        rows = batch.rows.tolist()
        self._shared_spans = 0 if batch.again.any() else memory.shared_spans(rows)
        whole = not (batch.again.any() or batch.ghost.any() or memory.any_pending(rows))
        self._plain = whole and len(rows) > 0 and bool(batch.new.all())

    def __missing__(self, span: int) -> SpanView:
        if span < self._shared_spans or self._plain:
            found: SpanView = TableView(self.memory, self.batch, span, span < self._shared_spans)
        else:
            found = _mixed(self.memory, self.batch, span)
        self[span] = found
        return found


def _mixed(memory: KvMemory, batch: Batch, span: int) -> SpanView:
    private = [memory.tables.first_private(row) <= span for row in batch.rows.tolist()]
    # A request that starts again after it was taken back brings generated tokens in one step with the end of its
    # prompt. They see what is kept of it, as they did before.
    after = [memory.after(row, span) for row in batch.rows.tolist()]
    dummy = np.full(1, UNBACKED, np.int32)
    parts: list[np.ndarray] = []
    writes: list[np.ndarray] = []
    counts: list[int] = []
    places: list[Places] = []

    def segment(
        slots: np.ndarray, rows: int, where: Places = EVERY_POSITION, write: np.ndarray | None = None
    ) -> None:
        if rows:
            parts.append(slots)
            counts.append(rows)
            places.append(where)
            writes.append(slots[len(slots) - rows :] if write is None else write)

    for i, row in enumerate(batch.rows.tolist()):
        later, again = after[i], bool(batch.again[i])
        new = int(batch.new[i]) - later
        if private[i] and batch.ghost[i]:
            segment(dummy, 1)
            continue
        where = memory.places(row, span) if private[i] else EVERY_POSITION
        if private[i]:
            slots = memory.tables.slots(row, span)
        else:
            slots = memory.shared.run(span, batch.slots[i][: batch.lengths[i] - later])
        if private[i] and _anchored(memory, row, span):
            segment(slots, new + again, where)
        else:
            if again:
                segment(slots[:1], 1, write=dummy)
            segment(slots, new, where)
        if later:
            segment(memory.retained.slots(row, span), later, memory.places_kept(row, span))
    empty = np.zeros(0, np.int32)
    return SpanView(
        np.concatenate(parts or [empty]).__getitem__,
        np.concatenate([[0], np.cumsum([len(part) for part in parts])]).astype(np.int64),
        np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        np.concatenate(writes or [empty]).astype(np.int64),
        places,
    )


def _anchored(memory: KvMemory, row: int, span: int) -> bool:
    """Whether the anchor stands right before the decode-side tokens in this span's table."""
    step = memory.owners[row].plan.step_of_span(span)
    return step is not None and step.kind == FIXED
