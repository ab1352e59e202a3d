"""A span's view on the device: one list of slots and a few numbers per segment, in buffers that never move.

Kernels take the flat list for a page table whose rows begin at every entry: row number ``begin[i]``, column c is
entry c of segment i. What a decode launch is given (addresses, shapes, numbers) follows from the number of segments
alone, so that it can be captured in a CUDA graph and replayed after the buffers were filled again.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch

from fathom.kernels.span_tables import span_tables
from fathom.runtime.kv.lists import ListView, SlotLists
from fathom.runtime.kv.mirror import PageMirror
from fathom.runtime.kv.prefix import UNBACKED
from fathom.runtime.kv.view import SpanView, TableView
from fathom.runtime.staging import send, staged

DUMMY = 0  # entry of the flat list that names the dummy slot; rows that only fill up a batch read it


@dataclass(frozen=True)
class DeviceView:
    """What kernels read of a :class:`SpanView`; parts of the span's buffers, valid until they are filled again.

    Attributes:
        table: [entries, 1] int32, the slots of all segments one after the other; its rows overlap (stride 1).
        begin: [segments] int32, first entry of each segment: its row of ``table``.
        lengths: [segments] int32, entries.
        prefixes: [segments] int32, entries before the segment's own query rows.
        bounds: [segments + 1] int32, where each segment's rows begin in the packed query, and their total.
        write: [query rows] int64, slots that take the rows' keys and values.
        first: what ``begin`` says of the view's own segments, on the host; not of those that fill up a batch.
        most_new, most_prefix: most query rows, and entries before them, of a segment; known to the host.
        packed: whether each segment's entries begin where those of the one before it end.
    """

    table: torch.Tensor
    begin: torch.Tensor
    lengths: torch.Tensor
    prefixes: torch.Tensor
    bounds: torch.Tensor
    write: torch.Tensor
    first: np.ndarray
    most_new: int
    most_prefix: int
    packed: bool


class Buffers:
    """Room for the views of all spans, in one place for as long as it exists.

    Attributes:
        head: [spans, 5, segments + 4] int32, the numbers of each segment (see ``kernels/span_tables.py``).
        slots: [spans, entries + 4] int32; entry 0 is the dummy slot. write: [spans, rows] int64.
    """

    def __init__(
        self, spans: int, segments: int, entries: int, rows: int, device: torch.device | str
    ) -> None:
        # Each list begins at a multiple of 16 bytes, whatever the sizes, or Triton would compile other kernels for
        # other addresses.
        segments, entries, rows = (-(-size // 4) * 4 for size in (segments, entries, rows))
        self.sizes = segments, entries, rows
        there = {"device": device}
        self.head = torch.zeros(spans, 5, segments + 4, dtype=torch.int32, **there)
        self.slots = torch.zeros(spans, entries + 4, dtype=torch.int32, **there)
        self.write = torch.zeros(spans, rows, dtype=torch.int64, **there)
        self._steps: dict[tuple[int, int], tuple[torch.Tensor, ...]] = {}

    def parts(self, span: int, segments: int, rows: int) -> tuple[torch.Tensor, ...]:
        """What launches over so many segments and rows are given: the tensors of a :class:`DeviceView`, in order.

        Kept for decode steps, whose sizes come again and again.
        """
        found = self._steps.get((span, rows)) if rows == segments else None
        if found is None:
            begin, lengths, prefixes, _, bounds = self.head[span]
            each = begin[:segments], lengths[:segments], prefixes[:segments], bounds[: segments + 1]
            found = self.slots[span].unsqueeze(1), *each, self.write[span, :rows]
            if rows == segments:
                self._steps[span, rows] = found
        return found

    def hold(self, *sizes: int) -> bool:
        """Whether a step of so many segments, entries and rows has room."""
        return all(map(int.__le__, sizes, self.sizes))


class Filled(NamedTuple):
    """What a span's buffers hold."""

    view: SpanView
    padded_to: int
    room: Buffers
    there: DeviceView


class DeviceTables:
    """Buffers for the views of all spans.

    Steps use the first buffers wherever they are large enough, since captured launches know no others; larger ones
    are made beside them for the steps that they do not hold.

    Attributes:
        grown: how often a step did not fit and larger buffers were made.
        looked_up: how many steps' lists the device has written itself; moved: how many steps were taken up by
            :meth:`move_on`.
        placed: how often the lists of a :class:`ListView` were written, for it and those that followed.
    """

    def __init__(
        self, spans: int, segments: int, entries: int, rows: int, device: torch.device | str
    ) -> None:
        """
        Args:
            segments, entries, rows: what a span's first buffers hold, per step.
        """
        self.device = torch.device(device)
        self.grown = self.looked_up = self.moved = self.placed = 0
        self.spans = spans
        self.first = Buffers(spans, segments, entries, rows, device)
        self._larger: Buffers | None = None
        self._filled: list[Filled | None] = [None] * spans

    def widen(self, segments: int, rows: int) -> None:
        """First buffers for at least so many segments and rows; only before anything knows where they are."""
        has_segments, entries, has_rows = self.first.sizes
        if segments > has_segments or rows > has_rows:
            sizes = max(segments, has_segments), entries, max(rows, has_rows)
            self.first = Buffers(self.spans, *sizes, self.device)
            self._filled = [None] * self.spans

    def _room(self, *sizes: int) -> Buffers:
        """Buffers that hold a step of so many segments, entries and rows."""
        largest = self.first if self._larger is None else self._larger
        for buffers in (self.first, largest):
            if buffers.hold(*sizes):
                return buffers
        # At least twice as large in what is too small.
        has = zip(largest.sizes, sizes, strict=True)
        segments, entries, rows = (h if w <= h else max(w, 2 * h) for h, w in has)
        self._larger = Buffers(self.spans, segments, entries, rows, self.device)
        self.grown += 1
        return self._larger

    def holds(self, span: int, view: SpanView, padded_to: int = 0) -> bool:
        """Whether the span's buffers hold this view, filled up to so many segments."""
        held = self._filled[span]
        return held is not None and held.view is view and held.padded_to == padded_to

    def fill(self, span: int, view: SpanView, padded_to: int = 0) -> DeviceView:
        """Bring a view to the device, unless it is what the span's buffers hold already.

        Args:
            padded_to: rows that the batch is filled up to: the others are segments of one row each, which read and
                write the dummy slot. What a launch is given is then the same for any segments with so many rows.
        """
        if not self.holds(span, view, padded_to):
            self._filled[span] = self._fill(span, view, padded_to)
        return self._filled[span].there  # type: ignore[union-attr]

    def _fill(self, span: int, view: SpanView, padded_to: int) -> Filled:
        entries = view.lists.total if isinstance(view, ListView) else len(view.slots)
        new = int(view.query[-1])
        segments, rows = self._sizes(view, padded_to)
        room = self._room(segments, entries, rows)
        staging = staged((5, segments + 1), torch.int32, self.device)
        self._describe(staging.numpy(), view, rows - new)
        room.head[span, :, : segments + 1].copy_(staging, non_blocking=True)
        write = room.write[span, :rows]
        if isinstance(view, ListView):
            self._place(span, view.lists, room)
            where = np.full(rows, DUMMY)
            where[:new] = view.written + DUMMY + 1
            write.copy_(room.slots[span, send(where, self.device)])
        else:
            assert (view.begin == view.entry[:-1]).all(), "only `look_up` leaves room between segments"
            staging = staged(entries, torch.int32, self.device)
            staging.numpy()[:] = view.slots
            room.slots[span, DUMMY + 1 : DUMMY + 1 + entries].copy_(staging, non_blocking=True)
            staging = staged(rows, torch.int64, self.device)
            staging[:new] = torch.from_numpy(view.write)
            staging[new:] = UNBACKED
            write.copy_(staging, non_blocking=True)
        return Filled(view, padded_to, room, self._view(room, span, view, segments, rows))

    @staticmethod
    def _sizes(view: SpanView, padded_to: int) -> tuple[int, int]:
        """Segments and rows of a view that is filled up to so many rows.

        Filled up, it has room for a segment per row; behind those that are there, some without a row.
        """
        segments, rows = len(view.query) - 1, int(view.query[-1])
        return (padded_to, padded_to) if padded_to >= max(rows, 1) else (segments, rows)

    def _place(self, span: int, lists: SlotLists, room: Buffers) -> None:
        """Write the lists one after the other, unless the span's buffers hold a view of them."""
        held = self._filled[span]
        if (
            held is not None
            and held.room is room
            and isinstance(held.view, ListView)
            and held.view.lists is lists
        ):
            return
        for first, part in zip((lists.first + DUMMY + 1).tolist(), lists.parts, strict=True):
            room.slots[span, first : first + len(part)].copy_(part)
        self.placed += 1

    @staticmethod
    def _describe(numbers: np.ndarray, view: SpanView, padding: int) -> None:
        """The numbers of each segment, as ``Buffers.head`` has them of a span.

        Args:
            numbers: [5, segments and one more] int32, written.
            padding: segments behind the view's own that read the dummy slot; those behind these have no rows.
        """
        given = len(view.query) - 1
        numbers[:] = 0
        numbers[0, :given] = view.begin + DUMMY + 1
        numbers[1, :given] = lengths = np.diff(view.entry)
        numbers[2, :given] = lengths - np.diff(view.query)
        numbers[4, : given + 1] = view.query
        numbers[:3, given : given + padding] = [[DUMMY], [1], [0]]
        numbers[4, given + 1 :] = view.query[-1] + padding
        numbers[4, given + 1 : given + 1 + padding] = view.query[-1] + np.arange(1, padding + 1)

    def _view(self, room: Buffers, span: int, view: SpanView, segments: int, rows: int) -> DeviceView:
        new = np.diff(view.query)
        table, begin, lengths, prefixes, bounds, write = room.parts(span, segments, rows)
        return DeviceView(
            table,
            begin,
            lengths,
            prefixes,
            bounds,
            write,
            view.begin + DUMMY + 1,
            int(new.max(initial=min(rows, 1))),
            int((np.diff(view.entry) - new).max(initial=0)),
            bool((view.begin == view.entry[:-1]).all()),
        )

    def look_up(
        self,
        views: Sequence[TableView],
        mirror: PageMirror,
        request_table: torch.Tensor,
        padded_to: int = 0,
    ) -> None:
        """Let the device write the lists of a step's first spans from the tables that it has.

        Args:
            views: of the spans ``0 .. len(views) - 1``; the slots of tokens beyond their requests are written
                too. mirror: which has the tables of the requests.
            request_table: [rows, positions] int32 virtual slots, on the device.
            padded_to: as :meth:`fill`.
        """
        requests, new = len(views[0].query) - 1, int(views[0].query[-1])
        segments, rows = self._sizes(views[0], padded_to)
        room = self._room(segments, max(view.room for view in views), rows)
        staging = staged((len(views), 5, segments + 1), torch.int32, self.device)
        for numbers, view in zip(staging.numpy(), views, strict=True):
            self._describe(numbers, view, rows - new)
            numbers[3, :requests] = view.sources
        room.head[: len(views), :, : segments + 1].copy_(staging, non_blocking=True)
        if rows > new:
            room.write[: len(views), new:rows] = UNBACKED
        span_tables(
            room.head[: len(views)],
            room.slots,
            room.write,
            requests,
            max(int(np.diff(view.entry).max()) for view in views),
            views[0].batch.beyond,
            request_table,
            mirror.backing,
            mirror.directory,
            mirror.blocks,
            views[0].memory.page_size,
        )
        for span, view in enumerate(views):
            self._filled[span] = Filled(view, padded_to, room, self._view(room, span, view, segments, rows))
        self.looked_up += 1

    def moves_on(self) -> bool:
        """Whether :meth:`move_on` may follow: the device has written the lists of all spans, with room behind."""
        return all(
            held is not None and isinstance(held.view, TableView) and held.view.batch.beyond > 0
            for held in self._filled
        )

    def move_on(self, views: Sequence[TableView]) -> None:
        """Take up the step behind the one that the buffers hold: of the same requests, each a token longer.

        The slots of these tokens are in the lists already.

        Args:
            views: of all spans.
        """
        assert len(views) == self.spans
        requests, room = len(views[0].entry) - 1, self._filled[0].room  # type: ignore[union-attr]
        head = room.head[: len(views), :, :requests]
        head[:, 1:3] += 1
        # The new token's entry is the one behind the prefix.
        last = (head[:, 0] + head[:, 2]).long()
        room.write[: len(views), :requests] = room.slots[: len(views)].gather(1, last)
        for span, view in enumerate(views):
            held = self._filled[span]
            assert held is not None and held.room is room
            there = replace(held.there, most_prefix=held.there.most_prefix + 1)
            self._filled[span] = held._replace(view=view, there=there)
        self.moved += 1
