"""When the Selector and the reorganisation of a layer run: one schedule, in order or beside the attention.

Attention of the next layer needs neither (Slow-Fast Inference, section 4.1), so on a GPU they run on a second
stream. What one layer hands over (logits, key norms) lies in a slot of a ring. Three waits keep it correct:

- the auxiliary lane waits until the layer's attention has written the slot;
- the main lane waits, before attention writes a slot again, until the auxiliary lane is done with it;
- at the end of the step the main lane waits for all auxiliary work, so that the next step reads whole buffers, and
  pages that a request gives back are not overwritten while they are being read.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch

from fathom.kernels.two_segment_attention import Evidence

MAIN, AUXILIARY = 0, 1
FIRST = -1
"""Priority of the stream that a step is launched or captured on, above that of the auxiliary one."""
RING_SLOTS = 4
"""R of section 4.1."""


class Lanes(Protocol):
    """Two queues of device work, each done in order. The host only ever enqueues."""

    def event(self) -> Any:
        """A new event, not recorded yet."""

    def record(self, event: Any, lane: int) -> None:
        """``event`` now stands for all work enqueued on ``lane`` so far."""

    def wait(self, lane: int, event: Any) -> None:
        """Work enqueued on ``lane`` from here on starts after what ``event`` stands for at this moment."""

    def auxiliary(self) -> AbstractContextManager[Any]:
        """Within it, work is enqueued on the auxiliary lane."""


class InOrder:
    """Lanes of a device without streams: work is done where it is called, so there is nothing to wait for."""

    def event(self) -> None:
        return None

    def record(self, event: None, lane: int) -> None:
        pass

    def wait(self, lane: int, event: None) -> None:
        pass

    def auxiliary(self) -> AbstractContextManager[None]:
        return nullcontext()


class CudaLanes:
    """Two CUDA streams: the one that is current when work is enqueued, and one of the least priority.

    CUDA's least priority is also the default one: the auxiliary stream yields to a main stream that was created
    with a higher priority (a negative number), also in a graph that both were captured in.
    """

    def __init__(self, device: torch.device | str | int = "cuda") -> None:
        self._stream = torch.cuda.Stream(device, priority=0)

    def event(self) -> torch.cuda.Event:
        return torch.cuda.Event()

    def record(self, event: torch.cuda.Event, lane: int) -> None:
        event.record(self._of(lane))

    def wait(self, lane: int, event: torch.cuda.Event) -> None:
        self._of(lane).wait_event(event)

    def auxiliary(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self._stream)

    def _of(self, lane: int) -> torch.cuda.Stream:
        return self._stream if lane == AUXILIARY else torch.cuda.current_stream(self._stream.device)


def lanes_of(device: torch.device | str) -> tuple[Lanes, int]:
    """The lanes of a device, and how many ring slots are of use with them."""
    if torch.device(device).type == "cuda":
        return CudaLanes(device), RING_SLOTS
    return InOrder(), 1


class RefreshExecutor:
    """Runs the refreshes of one slow step::

        with executor.step():
            for each layer:
                slot = executor.acquire()
                ...  # attention of the layer, its evidence into ring slot `slot`
                executor.submit(lambda: ...)  # Selector and reorganisation, reading that slot

    Work must not touch what later layers' attention of the same step writes, nor allocate what the main lane frees.
    """

    def __init__(self, lanes: Lanes, slots: int = RING_SLOTS) -> None:
        self.slots = slots
        self._lanes = lanes
        self._written = [lanes.event() for _ in range(slots)]
        self._released = [lanes.event() for _ in range(slots)]
        self._finished = lanes.event()
        self._submitted = 0
        self._acquired: int | None = None
        self._running = False
        # Inputs of enqueued work stay referenced until the barrier, so that their memory is not handed out before.
        self._enqueued: list[Callable[[], Any]] = []

    @contextmanager
    def step(self) -> Iterator[None]:
        """One slow step; its end is the barrier, also when the step fails.

        Raises:
            RuntimeError: inside another step.
        """
        if self._running:
            raise RuntimeError("a refresh step is already running")
        self._running = True
        try:
            yield
        finally:
            self._lanes.record(self._finished, AUXILIARY)
            self._lanes.wait(MAIN, self._finished)
            self._enqueued.clear()
            self._submitted, self._acquired, self._running = 0, None, False

    def acquire(self) -> int:
        """The ring slot for the next layer's evidence, free as seen from the main lane.

        Raises:
            RuntimeError: outside a step, or when the last slot was not submitted.
        """
        if not self._running or self._acquired is not None:
            raise RuntimeError("acquire() belongs inside step(), once per submit()")
        slot = self._acquired = self._submitted % self.slots
        if self._submitted >= self.slots:
            self._lanes.wait(MAIN, self._released[slot])
        return slot

    def submit(self, work: Callable[[], Any]) -> None:
        """Run ``work`` on the auxiliary lane, after what the main lane has been given so far.

        Raises:
            RuntimeError: without :meth:`acquire`.
        """
        if self._acquired is None:
            raise RuntimeError("submit() needs acquire() before")
        slot, self._acquired = self._acquired, None
        self._lanes.record(self._written[slot], MAIN)
        self._lanes.wait(AUXILIARY, self._written[slot])
        with self._lanes.auxiliary():
            work()
        self._lanes.record(self._released[slot], AUXILIARY)
        self._enqueued.append(work)
        self._submitted += 1


class EvidenceRing:
    """Memory for the evidence of ``slots`` layers, allocated once and viewed in each step's shape.

    Attributes:
        entries: of one request alone that fit in a slot, one query per head; or of several together.
    """

    def __init__(
        self, slots: int, heads: int, kv_heads: int, budget_bytes: int, device: torch.device | str = "cpu"
    ) -> None:
        """
        Args:
            budget_bytes: for all slots together.
        """
        self.heads, self.kv_heads = heads, kv_heads
        # Slots begin at multiples of 16 bytes: for others Triton would compile its kernels once more.
        size = budget_bytes // (16 * slots) * 4
        self._memory = torch.empty(slots, size, dtype=torch.float32, device=device)
        # Multiples of 16, so that norms behind logits begin where whole lines do.
        self.entries = self._memory.shape[1] // (heads + kv_heads) // 16 * 16

    def capacity(self, width: int) -> int:
        """How many requests of up to ``width`` table entries fit in a slot."""
        return self._memory.shape[1] // (max(width, 1) * (self.heads + self.kv_heads))

    def view(self, slot: int, requests: int, width: int) -> Evidence:
        """A slot as evidence of ``requests`` rows, not initialised.

        Raises:
            ValueError: when they do not fit.
        """
        if requests > self.capacity(width):
            raise ValueError(
                f"{requests} requests of {width} entries do not fit in an evidence slot: at most "
                f"{self.capacity(width)}"
            )
        logits = requests * self.heads * width
        norms = requests * self.kv_heads * width
        memory = self._memory[slot]
        return Evidence(
            memory[:logits].view(requests, self.heads, width),
            memory[logits : logits + norms].view(requests, self.kv_heads, width),
        )

    def captured(self, slot: int, requests: int, pitch: torch.Tensor) -> Evidence:
        """A slot for a launch that serves any lengths: of up to ``requests`` rows that are ``pitch`` apart.

        Args:
            pitch: [1] int32 on the device, the width of the evidence. Where there are ``n`` rows,
                ``n * pitch`` may be up to ``entries - requests``.
        """
        each, memory = self.entries // requests, self._memory[slot]
        logits, norms = memory[: self.entries * self.heads], memory[self.entries * self.heads :]
        return Evidence(
            logits[: requests * self.heads * each].view(requests, self.heads, each),
            norms[: requests * self.kv_heads * each].view(requests, self.kv_heads, each),
            pitch,
        )
