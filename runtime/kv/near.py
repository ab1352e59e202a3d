"""What layers with a sliding window read of a span's view, on the device: the last entries that each row sees."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from fathom.runtime.kv.device_view import DUMMY
from fathom.runtime.kv.view import SpanView
from fathom.runtime.staging import staged


class Near(NamedTuple):
    """The entries that rows see, in the span's list.

    Attributes:
        first, lengths: [query rows] int32, where those of each row begin, and how many they are.
        begin, prefixes: [segments] int32, where those of a segment's rows begin, and how many are before its own.
        reach: [query rows] int32, how many entries before its own each row sees.
        most_prefix: most entries before a segment's own, as far as the host knows.
    """

    first: torch.Tensor
    lengths: torch.Tensor
    begin: torch.Tensor
    prefixes: torch.Tensor
    reach: torch.Tensor
    most_prefix: int


class NearBuffers:
    """Room for the views of all spans, in one place for as long as it exists: captured launches read it."""

    def __init__(
        self, windows: Sequence[Sequence[int]], segments: int, rows: int, device: torch.device
    ) -> None:
        """
        Args:
            windows: by span, the earlier positions that a row sees, of each kind of its layers.
            segments, rows: of a view at most.
        """
        # As in ``DeviceTables``, each list begins at a multiple of 16 bytes.
        segments, rows = (-(-size // 4) * 4 for size in (segments, rows))
        pairs = [(span, window) for span, own in enumerate(windows) for window in own]
        self._places, self.device = {pair: place for place, pair in enumerate(pairs)}, device
        self._segments = torch.zeros(len(pairs), 2, segments, dtype=torch.int32, device=device)
        self._rows = torch.zeros(len(pairs), 3, rows, dtype=torch.int32, device=device)

    def fill(self, views: Sequence[SpanView], padded_to: int = 0) -> int:
        """Bring the views of all spans to the device, filled up as ``DeviceTables.fill`` does.

        Returns:
            the most entries before a segment's own.
        """
        segments = max(padded_to, *(len(view.query) - 1 for view in views))
        rows = max(padded_to, *(int(view.query[-1]) for view in views))
        count = len(self._places)
        of_segments = staged((count, 2, segments), torch.int32, self.device).zero_()
        of_rows = staged((count, 3, rows), torch.int32, self.device).zero_()
        numbers, numbers_of_rows = of_segments.numpy(), of_rows.numpy()
        known: dict[tuple[int, int, int], int] = {}
        for (span, window), place in self._places.items():
            view = views[span]
            # Views that are read through the shared map alone are the same in all spans.
            alike = (
                place if view.places else known.setdefault((id(view.entry), id(view.query), window), place)
            )
            if alike != place:
                numbers[place], numbers_of_rows[place] = numbers[alike], numbers_of_rows[alike]
            else:
                _describe(view, window, numbers[place], numbers_of_rows[place])
        self._segments[:, :, :segments].copy_(of_segments, non_blocking=True)
        self._rows[:, :, :rows].copy_(of_rows, non_blocking=True)
        return int(numbers[:, 1].max(initial=0))

    def near(self, span: int, window: int, segments: int, rows: int, most_prefix: int) -> Near:
        """What launches over so many segments and rows are given."""
        place = self._places[span, window]
        first, lengths, reach = self._rows[place, :, :rows]
        begin, prefixes = self._segments[place, :, :segments]
        return Near(first, lengths, begin, prefixes, reach, most_prefix)


def near(view: SpanView, window: int, device: torch.device, padded_to: int = 0) -> Near:
    """The same of one view, in memory of its own."""
    segments, rows = (max(padded_to, size) for size in (len(view.query) - 1, int(view.query[-1])))
    buffers = NearBuffers([[window]], segments, rows, device)
    return buffers.near(0, window, segments, rows, buffers.fill([view], padded_to))


def _describe(view: SpanView, window: int, of_segments: np.ndarray, of_rows: np.ndarray) -> None:
    """Write the numbers of a view's segments [2, segments] and rows [3, rows], and of what it is filled up with."""
    reach = view.reach(window)
    assert reach is not None
    segments, rows, new = len(view.query) - 1, len(reach), np.diff(view.query)
    begin, prefixes = view.begin + DUMMY + 1, np.diff(view.entry) - new
    own = np.repeat(begin + prefixes - view.query[:-1], new) + np.arange(rows)
    of_rows[:, :rows] = own - reach, reach + 1, reach
    of_rows[:2, rows:] = [[DUMMY], [1]]
    # Of a segment's rows the first sees furthest back.
    seen = np.minimum(reach[np.minimum(view.query[:-1], rows - 1)] if rows else 0, prefixes)
    of_segments[:, :segments] = begin + prefixes - seen, seen
    of_segments[0, segments : segments + of_rows.shape[1] - rows] = DUMMY
