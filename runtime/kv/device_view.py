"""A span's view on the device: one list of slots and a few numbers per segment, in buffers that never move.

Kernels take the flat list for a page table whose rows begin at every entry: row number ``begin[i]``, column c is
entry c of segment i. What a decode launch is given (addresses, shapes, numbers) follows from the number of segments
alone, so that it could be captured in a CUDA graph and replayed after the buffers were filled again.
"""

from dataclasses import dataclass

import numpy as np
import torch

from fathom.runtime.kv.prefix import UNBACKED
from fathom.runtime.kv.view import SpanView
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


class _Buffers:
    """The buffers of one span."""

    def __init__(self, segments: int, entries: int, rows: int, device: torch.device) -> None:
        # begin, lengths, prefixes, bounds, then the slots: one copy fills them all. Each begins at a multiple of 16
        # bytes, whatever the sizes, or Triton would compile other kernels for other addresses.
        self.segments = -(-segments // 4) * 4
        self.head = 4 * self.segments + 4
        self.numbers = torch.zeros(self.head + 1 + entries, dtype=torch.int32, device=device)
        self.write = torch.zeros(rows, dtype=torch.int64, device=device)

    def hold(self, segments: int, entries: int, rows: int) -> bool:
        return (
            segments <= self.segments
            and self.head + 1 + entries <= len(self.numbers)
            and rows <= len(self.write)
        )


class DeviceTables:
    """Buffers for the views of all spans.

    Attributes:
        grown: how often a step did not fit and the buffers of a span were made anew; a captured launch of that span
            would have to be captured again.
    """

    def __init__(
        self, spans: int, segments: int, entries: int, rows: int, device: torch.device | str
    ) -> None:
        """
        Args:
            segments, entries, rows: what a span's buffers hold at first, per step.
        """
        self.device = torch.device(device)
        self.grown = 0
        self._buffers = [_Buffers(segments, entries, rows, self.device) for _ in range(spans)]
        self._filled: list[tuple[SpanView, int, DeviceView] | None] = [None] * spans

    def fill(self, span: int, view: SpanView, padded_to: int = 0) -> DeviceView:
        """Bring a view to the device, unless it is what the span's buffers hold already.

        Args:
            padded_to: segments, each of one row, that the batch is filled up to: the others read and write the
                dummy slot.
        """
        held = self._filled[span]
        if held is None or held[0] is not view or held[1] != padded_to:
            held = self._filled[span] = (view, padded_to, self._fill(span, view, padded_to))
        return held[2]

    def _fill(self, span: int, view: SpanView, padded_to: int) -> DeviceView:
        given, entries, rows = len(view.query) - 1, len(view.slots), len(view.write)
        padding = max(padded_to - given, 0)
        segments, rows = given + padding, rows + padding
        buffers = self._buffers[span]
        if not buffers.hold(segments, entries, rows):
            buffers = self._buffers[span] = self._larger(buffers, segments, entries, rows)
            self.grown += 1
        width, head = buffers.segments, buffers.head
        staging = staged(head + 1 + entries, torch.int32, self.device)
        numbers = staging.numpy()
        numbers[:head] = 0
        begin, lengths, prefixes = (numbers[i * width : i * width + segments] for i in range(3))
        bounds = numbers[3 * width : 3 * width + segments + 1]
        new = np.diff(view.query)
        begin[:given] = view.entry[:-1] + DUMMY + 1
        lengths[:given] = np.diff(view.entry)
        prefixes[:given] = lengths[:given] - new
        bounds[: given + 1] = view.query
        begin[given:], lengths[given:], prefixes[given:] = DUMMY, 1, 0
        bounds[given + 1 :] = view.query[-1] + np.arange(1, padding + 1)
        numbers[head] = UNBACKED
        numbers[head + 1 :] = view.slots
        buffers.numbers[: len(numbers)].copy_(staging, non_blocking=True)
        staging = staged(rows, torch.int64, self.device)
        staging[: len(view.write)] = torch.from_numpy(view.write)
        staging[len(view.write) :] = UNBACKED
        buffers.write[:rows].copy_(staging, non_blocking=True)
        return DeviceView(
            buffers.numbers[head:].unsqueeze(1),
            buffers.numbers[:segments],
            buffers.numbers[width : width + segments],
            buffers.numbers[2 * width : 2 * width + segments],
            buffers.numbers[3 * width : 3 * width + segments + 1],
            buffers.write[:rows],
            int(new.max(initial=min(padding, 1))),
            int(prefixes.max(initial=0)),
        )

    def _larger(self, old: _Buffers, segments: int, entries: int, rows: int) -> _Buffers:
        """At least twice as large in what was too small."""

        def grow(has: int, wants: int) -> int:
            return has if wants <= has else max(wants, 2 * has)

        return _Buffers(
            grow(old.segments, segments),
            grow(len(old.numbers) - old.head - 1, entries),
            grow(len(old.write), rows),
            self.device,
        )
