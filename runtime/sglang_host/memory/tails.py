"""Room for tokens that may not stay, behind a request's last one: taken for one step, given back where rejected.

All requests of a step at once: what the host has to know of the slots is one copy from the device, when they are
taken. What is given back it knows from then.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from sglang.srt.managers.schedule_batch import Req

from fathom.runtime.kv.memory import Growth
from fathom.runtime.kv.pages import pages_of
from fathom.runtime.sglang_host.memory.kv_allocator import DepthAllocator
from fathom.runtime.staging import send


@dataclass(frozen=True)
class Tail:
    """Room taken for the tokens ``begin .. begin + count - 1`` of a request.

    Attributes:
        slots: [count] their virtual slots.
    """

    request: Req
    begin: int
    count: int
    slots: np.ndarray


class Tails:
    """Takes and gives back virtual slots and the depth pages behind them.

    Nothing is evicted or taken back from anyone for a tail: where memory is short, there is no room and the step
    goes on without.
    """

    def __init__(self, allocator: DepthAllocator, rows: torch.Tensor) -> None:
        self.allocator, self.rows = allocator, rows

    def take(self, wanted: Sequence[tuple[Req, int]]) -> list[Tail]:
        """Room for up to so many tokens of each request, for fewer or none where memory or its row is full."""
        memory, size = self.allocator.memory, self.allocator.page_size
        virtual, physical = self.allocator.virtual_size() // size, memory.pool.free
        tails = []
        for request, count in wanted:
            begin, row = request.kv.kv_allocated_len, request.kv.req_pool_idx
            count = max(min(count, self.rows.shape[1] - begin), 0)
            while count:
                pages = pages_of(begin + count, size) - pages_of(begin, size)
                need = memory.need([Growth(row, begin, begin + count, np.zeros(pages, np.int64))])
                if pages <= virtual and need <= physical:
                    virtual, physical = virtual - pages, physical - need
                    break
                count //= 2
            tails.append(Tail(request, begin, count, np.zeros(0, np.int64)))
        return self._filled(tails) if any(tail.count for tail in tails) else tails

    def _filled(self, tails: Sequence[Tail]) -> list[Tail]:
        """The same with slots in their rows, and physical pages behind them."""
        slots, size = self._slots([tail for tail in tails if tail.count]), self.allocator.page_size
        assert slots is not None, "virtual slots were counted"
        counts = [tail.count for tail in tails]
        known = np.split(slots.cpu().numpy(), np.cumsum(counts)[:-1])
        filled = [replace(tail, slots=own) for tail, own in zip(tails, known, strict=True)]
        rows = [tail.request.kv.req_pool_idx for tail in tails]
        positions = [np.arange(tail.begin, tail.begin + tail.count) for tail in tails]
        told = np.stack([np.repeat(rows, counts), np.concatenate(positions)])
        row, position = send(told, self.rows.device)
        self.rows[row, position] = slots.to(self.rows.dtype)
        self.allocator.memory.grow(
            [
                Growth(row, tail.begin, tail.begin + tail.count, tail.slots[tail.slots % size == 0] // size)
                for row, tail in zip(rows, filled, strict=True)
                if tail.count
            ]
        )
        return filled

    def _slots(self, tails: Sequence[Tail]) -> torch.Tensor | None:
        if self.allocator.page_size == 1:
            return self.allocator.alloc(sum(tail.count for tail in tails))
        rows = [tail.request.kv.req_pool_idx for tail in tails]
        begins, counts = (np.array([getattr(tail, name) for tail in tails]) for name in ("begin", "count"))
        row, last = send(np.stack([rows, begins - 1]), self.rows.device)
        return self.allocator.slots_behind(begins, begins + counts, self.rows[row, last])

    def settle(self, tails: Sequence[Tail], kept: Sequence[int]) -> None:
        """The first tokens of each are the request's own from now on; the room of the others is given back."""
        self.shrink(tails, kept)
        for tail, count in zip(tails, kept, strict=True):
            tail.request.kv.kv_allocated_len = tail.begin + count
            tail.request.kv.kv_committed_len += count

    def shrink(self, tails: Sequence[Tail], kept: Sequence[int]) -> list[Tail]:
        """Give back the room of all but the first tokens of each. Nothing waits for the device."""
        memory, size, unused, left = self.allocator.memory, self.allocator.page_size, [], []
        for tail, count in zip(tails, kept, strict=True):
            if count < tail.count:
                memory.shrink(tail.request.kv.req_pool_idx, tail.count - count)
                first = pages_of(tail.begin + count, size) * size - tail.begin
                unused.append(tail.slots[first::size] // size)
                left.append(replace(tail, count=count, slots=tail.slots[:count]))
            else:
                left.append(tail)
        if unused:
            self.allocator.free_known(np.concatenate(unused))
        return left
