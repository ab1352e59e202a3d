"""The refresh schedule under every interleaving that two lanes allow, and proof that each of its waits is needed.

The simulated device runs enqueued work later than the host asks for it, in any order that lanes and events permit,
as a GPU may; work is cut into small pieces so that a buffer can be seen half written.
"""

import random
import sys
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fathom.runtime.sfi.refresh import (
    AUXILIARY,
    MAIN,
    RING_SLOTS,
    CudaLanes,
    EvidenceRing,
    InOrder,
    RefreshExecutor,
    lanes_of,
)


class Event:
    """``recorded`` counts records asked for by the host, ``reached`` those the device has come past."""

    recorded = reached = 0


class SimulatedLanes:
    """Two queues and events with CUDA's meaning: a wait concerns the record that was last when it was enqueued.

    Args:
        ignored: name of the executor's method whose waits are left out; None for a correct device.
    """

    def __init__(self, ignored: str | None = None) -> None:
        self.queues: list[list] = [[], []]
        self.lane = MAIN
        self.ignored = ignored

    def event(self) -> Event:
        return Event()

    def do(self, piece) -> None:
        self.queues[self.lane].append((None, piece))

    def record(self, event: Event, lane: int) -> None:
        event.recorded += 1

        def reach(version=event.recorded):
            event.reached = max(event.reached, version)

        self.queues[lane].append((None, reach))

    def wait(self, lane: int, event: Event) -> None:
        if sys._getframe(1).f_code.co_name != self.ignored:
            self.queues[lane].append(((event, event.recorded), None))

    @contextmanager
    def auxiliary(self):
        self.lane = AUXILIARY
        yield
        self.lane = MAIN

    def run(self, choices) -> None:
        """Do all work; ``choices`` names the lane that goes on, where both can."""
        choices = iter(choices)
        while any(self.queues):
            ready = [lane for lane, queue in enumerate(self.queues) if queue and self._free(queue[0][0])]
            assert ready, "deadlock"
            wanted = next(choices, MAIN)
            _, piece = self.queues[wanted if wanted in ready else ready[0]].pop(0)
            if piece:
                piece()

    @staticmethod
    def _free(wait) -> bool:
        return wait is None or wait[0].reached >= wait[1]


class Immediate(InOrder):
    """A device that does everything at once."""

    def do(self, piece) -> None:
        piece()

    def run(self, choices) -> None:
        pass


def decode(lanes, slots: int, layers: int, steps: int, choices=()) -> list:
    """Slow steps, each followed by a fast one; returns everything that attention read, in order.

    Main lane: attention writes a layer's evidence in two halves; a fast step reads both halves of every compact
    buffer; between steps pages are given to somebody else. Auxiliary lane: reads the evidence and the layer's page,
    and writes the compact buffer in two halves.
    """
    ring = [[None, None] for _ in range(slots)]
    compact = [[None, None] for _ in range(layers)]
    page, seen = {}, []
    executor = RefreshExecutor(lanes, slots)

    def attention(step, layer, slot):
        lanes.do(lambda: page.__setitem__(layer, (step, layer)))
        for half in (0, 1):
            lanes.do(lambda half=half: ring[slot].__setitem__(half, (step, layer, half)))

    def refresh(layer, slot):
        read = []
        lanes.do(lambda: read.append(ring[slot][0]))
        lanes.do(lambda: read.append(ring[slot][1]))
        for half in (0, 1):
            lanes.do(lambda half=half: compact[layer].__setitem__(half, (page[layer], *read)))

    for step in range(steps):
        with executor.step():
            for layer in range(layers):
                slot = executor.acquire()
                attention(step, layer, slot)
                executor.submit(lambda layer=layer, slot=slot: refresh(layer, slot))
        for layer in range(layers):
            lanes.do(lambda layer=layer: seen.extend(compact[layer]))
        for layer in range(layers):
            lanes.do(lambda layer=layer: page.__setitem__(layer, "another request's"))
    lanes.run(choices)
    return seen


@given(
    choices=st.lists(st.sampled_from([MAIN, AUXILIARY]), max_size=200),
    slots=st.integers(1, 4),
    layers=st.integers(1, 9),
    steps=st.integers(1, 3),
)
@settings(max_examples=200, deadline=None)
def test_no_interleaving_changes_what_is_read(choices, slots, layers, steps):
    want = decode(Immediate(), slots, layers, steps)
    assert want[0] == ((0, 0), (0, 0, 0), (0, 0, 1)) and len(want) == 2 * layers * steps
    assert decode(SimulatedLanes(), slots, layers, steps, choices) == want


def test_work_of_the_two_lanes_does_overlap():
    """Otherwise the property above would hold for want of freedom."""
    lanes, order = SimulatedLanes(), []
    executor = RefreshExecutor(lanes, 4)
    with executor.step():
        for layer in range(4):
            executor.acquire()
            lanes.do(lambda layer=layer: order.append(("attention", layer)))
            executor.submit(lambda layer=layer: lanes.do(lambda: order.append(("refresh", layer))))
    lanes.run([])
    assert [kind for kind, _ in order] == ["attention"] * 4 + ["refresh"] * 4


@pytest.mark.parametrize("method", ["acquire", "submit", "step"])
def test_each_wait_is_needed(method):
    """Without the waits of one method, some schedule gives other results."""
    want = decode(Immediate(), 2, 5, 2)
    generator = random.Random(0)
    schedules = [[MAIN] * 300, [AUXILIARY] * 300]
    schedules += [[generator.randrange(2) for _ in range(300)] for _ in range(50)]

    def differs(schedule):
        try:
            return decode(SimulatedLanes(method), 2, 5, 2, schedule) != want
        except KeyError:  # read before anything was written
            return True

    assert any(map(differs, schedules))
    assert all(decode(SimulatedLanes(), 2, 5, 2, schedule) == want for schedule in schedules)


def test_misuse_is_refused():
    executor = RefreshExecutor(InOrder(), 2)
    with pytest.raises(RuntimeError, match="inside step"):
        executor.acquire()
    with executor.step():
        with pytest.raises(RuntimeError, match="needs acquire"):
            executor.submit(lambda: None)
        assert executor.acquire() == 0
        with pytest.raises(RuntimeError, match="once per submit"):
            executor.acquire()
        with pytest.raises(RuntimeError, match="already running"), executor.step():
            pass


def test_a_failed_step_still_ends_in_the_barrier():
    lanes, done = SimulatedLanes(), []
    executor = RefreshExecutor(lanes, 2)
    with pytest.raises(ZeroDivisionError), executor.step():
        executor.acquire()
        executor.submit(lambda: lanes.do(lambda: done.append("refresh")))
        raise ZeroDivisionError
    lanes.do(lambda: done.append("next step"))
    lanes.run([MAIN] * 20)
    assert done == ["refresh", "next step"]
    with executor.step():
        assert executor.acquire() == 0


def test_evidence_slots_do_not_overlap():
    ring = EvidenceRing(3, heads=4, kv_heads=2, budget_bytes=3 * 4 * 1000)
    assert ring.capacity(100) == 1 and ring.capacity(50) == 3
    views = [ring.view(slot, 3, 50) for slot in range(3)]
    for i, view in enumerate(views):
        assert view.logits.shape == (3, 4, 50) and view.key_norms.shape == (3, 2, 50)
        view.logits.fill_(i)
        view.key_norms.fill_(i + 10)
    for i, view in enumerate(views):
        assert torch.equal(view.logits.unique(), torch.tensor([float(i)]))
        assert torch.equal(view.key_norms.unique(), torch.tensor([float(i + 10)]))
    with pytest.raises(
        ValueError, match="2 requests of 100 entries do not fit in an evidence slot: at most 1"
    ):
        ring.view(0, 2, 100)


def test_a_gpu_has_two_lanes_and_a_cpu_one(monkeypatch):
    made = []
    monkeypatch.setattr(torch.cuda, "Stream", lambda device, priority: made.append((device, priority)))
    lanes, slots = lanes_of("cuda:0")
    assert isinstance(lanes, CudaLanes) and slots == RING_SLOTS and made == [("cuda:0", 0)]
    lanes, slots = lanes_of(torch.device("cpu"))
    assert isinstance(lanes, InOrder) and slots == 1 and len(made) == 1
