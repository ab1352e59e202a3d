"""Room for tokens that may not stay, behind a request's last one: taken for one step, given back where rejected."""

from dataclasses import dataclass

import numpy as np
import torch
from sglang.srt.managers.schedule_batch import Req

from fathom.runtime.kv.memory import Growth
from fathom.runtime.kv.pages import pages_of
from fathom.runtime.sglang_host.kv_allocator import DepthAllocator
from fathom.runtime.staging import send


@dataclass(frozen=True)
class Tail:
    """Room taken for the tokens ``begin .. begin + count - 1`` of a request."""

    request: Req
    begin: int
    count: int


class Tails:
    """Takes and gives back virtual slots and the depth pages behind them.

    Nothing is evicted or taken back from anyone for a tail: where memory is short, there is no room and the step
    goes on without.
    """

    def __init__(self, allocator: DepthAllocator, rows: torch.Tensor) -> None:
        self.allocator, self.rows = allocator, rows

    def take(self, request: Req, count: int) -> Tail:
        """Room for up to ``count`` tokens, for fewer or none where memory or the request's row is full."""
        begin, row = request.kv.kv_allocated_len, request.kv.req_pool_idx
        count = max(min(count, self.rows.shape[1] - begin), 0)
        while count and not self._fits(row, begin, begin + count):
            count //= 2
        if count:
            slots = self._slots(row, begin, count)
            assert slots is not None, "virtual slots were counted"
            self.rows[row, begin : begin + count] = slots.to(self.rows.dtype)
            self.allocator.memory.grow([self._growth(row, begin, begin + count, slots.cpu().numpy())])
        return Tail(request, begin, count)

    def _slots(self, row: int, begin: int, count: int) -> torch.Tensor | None:
        if self.allocator.page_size == 1:
            return self.allocator.alloc(count)
        held, end, there = torch.tensor([begin]), torch.tensor([begin + count]), self.rows.device
        last = self.rows[row, begin - 1].long().view(1)
        return self.allocator.alloc_extend(send(held, there), held, send(end, there), end, last, count)

    def settle(self, tail: Tail, kept: int) -> None:
        """The first ``kept`` tokens are the request's own from now on; the room of the others is given back."""
        self.shrink(tail, kept)
        tail.request.kv.kv_allocated_len = tail.begin + kept
        tail.request.kv.kv_committed_len += kept

    def shrink(self, tail: Tail, kept: int) -> Tail:
        """Give back the room of all but the first ``kept`` tokens."""
        memory, size = self.allocator.memory, self.allocator.page_size
        row, end = tail.request.kv.req_pool_idx, tail.begin + kept
        memory.shrink(row, tail.count - kept)
        unused = self.rows[row, pages_of(end, size) * size : tail.begin + tail.count]
        if len(unused):
            self.allocator.free(unused.long())
        return Tail(tail.request, tail.begin, kept)

    def _fits(self, row: int, begin: int, end: int) -> bool:
        size = self.allocator.page_size
        pages = pages_of(end, size) - pages_of(begin, size)
        if pages * size > self.allocator.virtual_size():
            return False
        new = Growth(row, begin, end, np.zeros(pages, np.int64))
        return self.allocator.memory.need([new]) <= self.allocator.memory.pool.free

    def _growth(self, row: int, begin: int, end: int, slots: np.ndarray) -> Growth:
        size = self.allocator.page_size
        return Growth(row, begin, end, slots[slots % size == 0] // size)
