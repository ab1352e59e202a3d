"""Whose turn it is to have a place among the adapters of a batch."""

import random
import time
from types import SimpleNamespace

import pytest

from fathom.runtime.sglang_host.scheduling.adapter_turns import Turns

SECONDS = 5.0


class Engine:
    """Requests that come, wait, and run a token per step, as SGLang's scheduler admits them.

    Args:
        places: adapters in one batch; pinned: of these that keep one; rows: requests in one batch.
    """

    def __init__(self, places, pinned=(), rows=100):
        self.places, self.pinned, self.rows = places, set(pinned), rows
        self.waiting, self.running, self.done, self.step_number = [], [], [], 0
        self.turns = Turns(SECONDS, self.fit, self.pinned.__contains__, lambda: None)

    def fit(self, adapters):
        free = [adapter for adapter in adapters if adapter not in self.pinned]
        return len(adapters) <= self.places and len(free) <= self.places - len(self.pinned)

    def come(self, adapter, tokens):
        request = SimpleNamespace(
            lora_id=adapter, rid=str(random.random()), output_ids=[], came=self.step_number
        )
        request.sampling_params = SimpleNamespace(max_new_tokens=tokens)
        request.time_stats = SimpleNamespace(wait_queue_entry_time=time.perf_counter())
        request.finished = lambda: len(request.output_ids) >= tokens
        self.waiting.append(request)
        return request

    def step(self):
        for told in self.turns.news(self.waiting, self.running):
            self.turns.late = told.adapters
        self.turns.update_draining_state(self.waiting, self.running)
        held = {request.lora_id for request in self.running}
        for request in list(self.waiting):
            adapter = request.lora_id
            if not self.turns.can_schedule(request) or not (adapter in held or self.fit(held | {adapter})):
                continue
            if len(self.running) == self.rows:
                break
            held.add(adapter)
            self.waiting.remove(request)
            self.running.append(request)
            request.began = self.step_number
        self.ran = len(self.running)
        for request in self.running:
            request.output_ids.append(0)
        self.done += [request for request in self.running if request.finished()]
        self.running = [request for request in self.running if not request.finished()]
        self.step_number += 1


@pytest.fixture
def clock(monkeypatch):
    """Seconds, one for each step."""
    now = SimpleNamespace(time=1.0)
    monkeypatch.setattr(time, "perf_counter", lambda: now.time)
    random.seed(0)
    return now


@pytest.mark.parametrize("wanted", ["c", None])
@pytest.mark.parametrize("tokens", [(20, 20), (1, 40)])
@pytest.mark.parametrize("pinned", [(), ("a",)])
def test_who_has_no_place_gets_one(clock, wanted, tokens, pinned):
    """However many come for the adapters that have them, a request waits no longer than those that run last."""
    engine = Engine(2 + len(pinned), pinned)
    for step in range(200):
        clock.time += 1
        for adapter in ("b", "d"):
            engine.come(adapter, random.randint(*tokens))
        if step == 50:
            request = engine.come(wanted, 3)
        engine.step()
    assert request in engine.done
    assert request.began - request.came <= SECONDS + max(tokens) + 3


def test_many_adapters_take_turns(clock):
    engine = Engine(3)
    names = [None, *"abcdefghijk"]
    for _ in range(600):
        clock.time += 1
        engine.come(random.choice(names), random.randint(1, 12))
        engine.step()
    waits = [request.began - request.came for request in engine.done]
    assert {request.lora_id for request in engine.done[-60:]} == set(names)
    assert max(waits) <= 4 * (SECONDS + 12 + 3)  # twelve adapters, three at a time


def test_who_waits_for_a_row_takes_nobodys_place(clock):
    """Where each adapter has a place, all rows are used, however long their requests wait for one."""
    engine = Engine(2, rows=4)
    for _ in range(30):
        for adapter in ("a", "b"):
            engine.come(adapter, random.randint(5, 15))
    while engine.waiting:
        clock.time += 1
        engine.step()
        assert engine.ran == 4


def test_nobody_drains_for_who_has_left(clock):
    engine = Engine(1)
    engine.come("a", 50)
    engine.step()
    left = engine.come("b", 5)
    for _ in range(10):
        clock.time += 1
        engine.step()
    other = engine.come("a", 60)
    engine.step()
    assert other in engine.waiting
    engine.waiting.remove(left)
    engine.step()
    assert other in engine.running
