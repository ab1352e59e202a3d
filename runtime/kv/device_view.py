"""A span's view on the device: one list of slots and a few numbers per segment, in buffers that never move.

Kernels take the flat list for a page table whose rows begin at every entry: row number ``begin[i]``, column c is
entry c of segment i. What a decode launch is given (addresses, shapes, numbers) follows from the number of segments
alone, so that it could be captured in a CUDA graph and replayed after the buffers were filled again.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from fathom.kernels.span_tables import span_tables
from fathom.runtime.kv.mirror import PageMirror
from fathom.runtime.kv.prefix import UNBACKED
from fathom.runtime.kv.view import SpanView, TableView
from fathom.runtime.staging import staged

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
        most_new, most_prefix: most query rows, and entries before them, of a segment; known to the host.
    """

    table: torch.Tensor
    begin: torch.Tensor
    lengths: torch.Tensor
    prefixes: torch.Tensor
    bounds: torch.Tensor
    write: torch.Tensor
    most_new: int
    most_prefix: int


class DeviceTables:
    """Buffers for the views of all spans.

    Attributes:
        grown: how often a step did not fit and the buffers were made anew; captured launches would have to be
            captured again.
        looked_up: how many steps' lists the device has written itself.
    """

    def __init__(
        self, spans: int, segments: int, entries: int, rows: int, device: torch.device | str
    ) -> None:
        """
        Args:
            segments, entries, rows: what a span's buffers hold at first, per step.
        """
        self.device = torch.device(device)
        self.grown = self.looked_up = 0
        self.spans = spans
        self._make(segments, entries, rows)

    def _make(self, segments: int, entries: int, rows: int) -> None:
        # Each list begins at a multiple of 16 bytes, whatever the sizes, or Triton would compile other kernels for
        # other addresses. Entry 0 is the dummy slot.
        self._segments, self._entries, self._rows = (-(-size // 4) * 4 for size in (segments, entries, rows))
        there = {"device": self.device}
        self._head = torch.zeros(self.spans, 5, self._segments + 4, dtype=torch.int32, **there)
        self._slots = torch.zeros(self.spans, self._entries + 4, dtype=torch.int32, **there)
        self._write = torch.zeros(self.spans, self._rows, dtype=torch.int64, **there)
        self._filled: list[tuple[SpanView, int, DeviceView] | None] = [None] * self.spans

    def _fit(self, segments: int, entries: int, rows: int) -> None:
        """At least twice as large in what is too small."""
        has, wants = (self._segments, self._entries, self._rows), (segments, entries, rows)
        if any(map(int.__lt__, has, wants)):
            self._make(*(h if w <= h else max(w, 2 * h) for h, w in zip(has, wants, strict=True)))
            self.grown += 1

    def holds(self, span: int, view: SpanView) -> bool:
        """Whether the span's buffers hold this view."""
        held = self._filled[span]
        return held is not None and held[0] is view

    def fill(self, span: int, view: SpanView, padded_to: int = 0) -> DeviceView:
        """Bring a view to the device, unless it is what the span's buffers hold already.

        Args:
            padded_to: segments, each of one row, that the batch is filled up to: the others read and write the
                dummy slot.
        """
        held = self._filled[span]
        if held is None or held[0] is not view or held[1] != padded_to:
            there = self._fill(span, view, padded_to)
            held = self._filled[span] = (view, padded_to, there)
        return held[2]

    def _fill(self, span: int, view: SpanView, padded_to: int) -> DeviceView:
        given, entries, rows = len(view.query) - 1, len(view.slots), len(view.write)
        padding = max(padded_to - given, 0)
        segments, rows = given + padding, rows + padding
        self._fit(segments, entries, rows)
        staging = staged((5, segments + 1), torch.int32, self.device)
        numbers = staging.numpy()
        self._describe(numbers, view)
        numbers[:3, given:segments] = [[DUMMY], [1], [0]]
        numbers[4, given + 1 :] = view.query[-1] + np.arange(1, padding + 1)
        self._head[span, :, : segments + 1].copy_(staging, non_blocking=True)
        staging = staged(entries, torch.int32, self.device)
        staging.numpy()[:] = view.slots
        self._slots[span, DUMMY + 1 : DUMMY + 1 + entries].copy_(staging, non_blocking=True)
        staging = staged(rows, torch.int64, self.device)
        staging[: len(view.write)] = torch.from_numpy(view.write)
        staging[len(view.write) :] = UNBACKED
        self._write[span, :rows].copy_(staging, non_blocking=True)
        return self._view(span, view, padding)

    @staticmethod
    def _describe(numbers: np.ndarray, view: SpanView) -> None:
        """The numbers of each segment, as ``_head`` has them of a span: [5, at least segments + 1] int32."""
        given = len(view.query) - 1
        numbers[:] = 0
        numbers[0, :given] = view.entry[:-1] + DUMMY + 1
        numbers[1, :given] = lengths = np.diff(view.entry)
        numbers[2, :given] = lengths - np.diff(view.query)
        numbers[4, : given + 1] = view.query

    def _view(self, span: int, view: SpanView, padding: int = 0) -> DeviceView:
        segments, new = len(view.query) - 1 + padding, np.diff(view.query)
        begin, lengths, prefixes, _, bounds = self._head[span]
        return DeviceView(
            self._slots[span].unsqueeze(1),
            begin[:segments],
            lengths[:segments],
            prefixes[:segments],
            bounds[: segments + 1],
            self._write[span, : int(view.query[-1]) + padding],
            int(new.max(initial=min(padding, 1))),
            int((np.diff(view.entry) - new).max(initial=0)),
        )

    def look_up(self, views: Sequence[TableView], mirror: PageMirror, request_table: torch.Tensor) -> None:
        """Let the device write the lists of a step's first spans from the tables that it has.

        Args:
            views: of the spans ``0 .. len(views) - 1``; mirror: which has the tables of their requests.
            request_table: [rows, positions] int32 virtual slots, on the device.
        """
        requests, rows = len(views[0].query) - 1, int(views[0].query[-1])
        self._fit(requests, max(int(view.entry[-1]) for view in views), rows)
        staging = staged((len(views), 5, requests + 1), torch.int32, self.device)
        for numbers, view in zip(staging.numpy(), views, strict=True):
            self._describe(numbers, view)
            numbers[3, :requests] = view.sources
        self._head[: len(views), :, : requests + 1].copy_(staging, non_blocking=True)
        span_tables(
            self._head[: len(views)],
            self._slots,
            self._write,
            requests,
            max(int(np.diff(view.entry).max()) for view in views),
            request_table,
            mirror.backing,
            mirror.directory,
            mirror.blocks,
            views[0].memory.page_size,
        )
        for span, view in enumerate(views):
            self._filled[span] = (view, 0, self._view(span, view))
        self.looked_up += 1
