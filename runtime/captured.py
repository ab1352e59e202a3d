"""Slow-fast steps that are captured once per batch size: what their launches read, in places that stay.

A step that renews no selection is one launch per layer for rows in any phase, given the plan of each span. The
launches of a captured step read these plans in fixed memory, into which the plans of each later step are written.
"""

from collections.abc import Sequence

import torch

from fathom.kernels.kv_pair import KvPair
from fathom.kernels.two_segment_attention import FIELDS, SegmentPlan, two_segment_attention
from fathom.runtime.decode import Step
from fathom.runtime.kv.device_view import DUMMY, DeviceView
from fathom.runtime.kv.view import SpanView
from fathom.runtime.staging import staged

DUMMY_ROW = (DUMMY, 0, 1, 0, 0, -1)
"""Columns of ``FIELDS``: reads the dummy slot."""


class CapturedStep:
    """What stands for a ``Step`` while its launches are captured, and is filled with those it is replayed for.

    Attributes:
        packed: [spans, rows, 6] int32, the plan of each span.
        size: requests of the step that is captured or replayed.
    """

    def __init__(self, compact: Sequence[KvPair], span: int, rows: int, device: torch.device | str) -> None:
        """
        Args:
            compact: the compact buffers of each layer; span: layers that share a plan.
            rows: most requests of a step.
        """
        self.compact, self.span = compact, span
        self.packed = torch.zeros(len(compact) // span, rows, len(FIELDS), dtype=torch.int32, device=device)
        self.size = 0

    def fill(
        self, size: int, step: Step | None, views: Sequence[SpanView], there: Sequence[DeviceView]
    ) -> None:
        """Write the plans of a step, filled up to ``size`` requests with such as read the dummy slot.

        Args:
            step: renews nothing; None for dummies alone.
            views, there: of each span.
        """
        assert step is None or step.renews_nothing
        self.size = size
        staging = staged((len(self.packed), size, len(FIELDS)), torch.int32, self.packed.device)
        staging[:] = torch.tensor(DUMMY_ROW, dtype=torch.int32)
        if step is not None:
            for span, (view, device_view) in enumerate(zip(views, there, strict=True)):
                staging[span, : len(step)] = step.plan(span, view, device_view).step.plan.packed
        self.packed[:, :size].copy_(staging, non_blocking=True)

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        pool: tuple[torch.Tensor, torch.Tensor],
        there: DeviceView,
        scale: float,
    ) -> torch.Tensor:
        """Attention at one layer of the step that is captured.

        Args:
            query: [requests, heads, head_dim]; pool: as for ``Step.attend``; there: the view of the layer's span.

        Returns:
            [requests, heads, value_dim] float32.
        """
        packed = self.packed[layer // self.span, : self.size]
        plan = SegmentPlan(packed, self.compact[layer][0].shape[1])
        output, _ = two_segment_attention(
            query.contiguous().unsqueeze(1), pool, self.compact[layer], there.table, plan, scale
        )
        return output.squeeze(1)
