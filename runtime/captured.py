"""Slow-fast steps that are captured once per batch size: what their launches read, in places that stay.

Given the plan of each span, a step is the same launches for rows in any phase: the attention, and where selections
are renewed, beside it on the auxiliary lane, the Selector and the packing. The launches of a captured step read
plans, and who is renewed, in fixed memory into which those of each later step are written.
"""

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch

from fathom.kernels.two_segment_attention import FIELDS, SegmentPlan, two_segment_attention
from fathom.runtime.decode import SlowFast
from fathom.runtime.decode_step import Ahead, Step
from fathom.runtime.kv.device_view import DUMMY, DeviceView
from fathom.runtime.kv.view import SpanView
from fathom.runtime.sfi.step import NOBODY, RefreshBatch, refresh_layer
from fathom.runtime.staging import staged

DUMMY_ROW = (DUMMY, 0, 1, 0, 0, -1)
"""Columns of ``FIELDS``: reads the dummy slot."""
NOBODY_COLUMN = np.array(NOBODY)[:, None]


class CapturedStep:
    """What stands for a ``Step`` while its launches are captured, and is filled with those it is replayed for.

    Attributes:
        packed: [spans, rows, 6] int32, the plan of each span.
        renewed: [spans, 7, most] int64, whose selections are renewed, as ``RefreshBatch`` has it; pitch: [spans, 4]
            int32, of which the first is the width of the evidence.
        most: requests whose selections one step renews at most.
        size: rows of the step that is captured or replayed.
    """

    def __init__(self, state: SlowFast, rows: int) -> None:
        """
        Args:
            rows: most query rows of a step.
        """
        self.state, there = state, {"device": state.shape.device}
        # Multiples of 4, so that Triton meets the same alignment everywhere.
        rows, self.most = (-(-count // 4) * 4 for count in (rows, min(rows, state.runs.count)))
        self.packed = torch.zeros(state.spans, rows, len(FIELDS), dtype=torch.int32, **there)
        self.renewed = torch.zeros(state.spans, len(NOBODY), self.most, dtype=torch.int64, **there)
        self.pitch = torch.zeros(state.spans, 4, dtype=torch.int32, **there)
        self.size = 0

    def serves(self, step: Step, rows: int) -> bool:
        """Whether replayed launches do what the step does: all ``rows`` of a pass, with room for its evidence."""
        if len(step.owner) != rows:
            return False
        room = self.state.ring.entries - self.most
        return not step.capacity or (not step.at_random and step.capacity * step.width <= room)

    def fill(
        self, size: int, step: Step | None, views: Sequence[SpanView], there: Sequence[DeviceView]
    ) -> None:
        """Write the plans of a step, filled up to ``size`` rows with such as read the dummy slot.

        Args:
            step: one that is served; None for dummies alone.
            views, there: of each span.
        """
        self.size = size
        self._write(step, views, there)
        if isinstance(step, Ahead):
            rows, requests = len(step.owner), step.capacity
            packed, renewed = self.packed[:, :rows], self.renewed[:, :, :requests]
            crossed = packed.clone(), renewed.clone()
            self._write(step.otherwise, views, there)
            packed.copy_(step.of_rows(crossed[0], packed))
            if requests:
                renewed.copy_(step.of_places(crossed[1], renewed))

    def _write(self, step: Step | None, views: Sequence[SpanView], there: Sequence[DeviceView]) -> None:
        """The plans of one step, as the host has them."""
        device = self.packed.device
        plans = staged((len(self.packed), self.size, len(FIELDS)), torch.int32, device)
        renewed = staged(tuple(self.renewed.shape), torch.int64, device)
        pitch = staged(tuple(self.pitch.shape), torch.int32, device)
        # NumPy writes a few numbers in a fraction of PyTorch's time.
        rows, who, width = plans.numpy(), renewed.numpy(), pitch.numpy()
        rows[:], who[:], width[:] = DUMMY_ROW, NOBODY_COLUMN, self.state.grain
        if step is not None:
            for span, (view, device_view) in enumerate(zip(views, there, strict=True)):
                planned = step.plan(span, view, device_view)
                rows[span, : len(step.owner)] = planned.step.plan.packed.numpy()
                width[span] = planned.width
                if step.capacity:
                    who[span, :, : step.capacity] = planned.step.refresh.packed.numpy()
        self.packed[:, : self.size].copy_(plans, non_blocking=True)
        if step is None or step.capacity:
            self.renewed.copy_(renewed, non_blocking=True)
            self.pitch.copy_(pitch, non_blocking=True)

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        pool: tuple[torch.Tensor, torch.Tensor],
        there: DeviceView,
        scale: float,
        renews: bool,
    ) -> torch.Tensor:
        """Attention at one layer of the step that is captured.

        Args:
            query: [rows, heads, head_dim]; pool: as for ``Step.attend``; there: the view of the layer's span.
            renews: whether the step is one in which selections are renewed; then within ``executor.step()``.

        Returns:
            [rows, heads, value_dim] in the query's type.
        """
        state, span = self.state, layer // self.state.shape.span
        compact, evidence = state.compact[layer], None
        requests = min(self.size, self.most)
        if renews:
            slot = state.executor.acquire()
            evidence = state.ring.captured(slot, requests, self.pitch[span, :1])
        plan = SegmentPlan(self.packed[span, : self.size], state.shape.kv_heads)
        output = query.new_empty(len(query), query.shape[1], pool[1].shape[2])
        two_segment_attention(query, pool, compact, there.table, plan, scale, evidence, output)
        if evidence is not None:
            batch = RefreshBatch(self.renewed[span, :, :requests])
            config, selector = state.config, state.options.selector
            state.executor.submit(
                partial(refresh_layer, evidence, pool, compact, there.table, batch, config, selector)
            )
        return output
