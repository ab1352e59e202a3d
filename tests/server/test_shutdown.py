"""What the server does after SIGTERM, on a made-up clock: whom it waits for, and what it then cuts off."""

import asyncio
from types import SimpleNamespace

import pytest

from fathom.runtime.sglang_host.machine import torchvision_ops
from fathom.server.requests.admission import Gate

torchvision_ops.declare()

from fathom.server import drain  # noqa: E402
from fathom.server.drain import ABORT_SECONDS, CLOSE_SECONDS, ServingTokenizerManager  # noqa: E402

LIMIT = 30.0
LATE = 0.5
"""Seconds after which what has happened is seen at the latest."""


class Clock:
    """Time passes where the server sleeps; ``events`` are (seconds, function)."""

    def __init__(self):
        self.now, self.events = 0.0, []

    async def sleep(self, seconds):
        self.now += seconds
        for event in [event for event in self.events if event[0] <= self.now]:
            self.events.remove(event)
            event[1]()


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(drain, "asyncio", SimpleNamespace(sleep=made.sleep))
    monkeypatch.setattr(drain, "time", SimpleNamespace(monotonic=lambda: made.now))
    return made


@pytest.fixture
def manager():
    """With nothing running, and what is sent to the scheduler in a list."""
    made = ServingTokenizerManager.__new__(ServingTokenizerManager)
    made._gate, made.rid_to_state, made.sent = Gate(drain_seconds=LIMIT), {}, []
    made._dispatch_to_scheduler = made.sent.append
    return made


def drained(manager, clock):
    """Seconds until it has drained."""
    asyncio.run(manager._drain())
    return clock.now


def test_an_idle_server_ends_at_once(manager, clock, capsys):
    assert drained(manager, clock) == 0
    assert not manager.sent and not capsys.readouterr().err


@pytest.mark.parametrize(("generation", "answer"), [(5, 20), (20, 5)])
def test_who_ends_in_time_is_waited_for_and_not_cut_off(manager, clock, capsys, generation, answer):
    """Generations, and requests whose answer is not made or not sent yet."""
    manager.rid_to_state["a"], manager._gate.in_flight = object(), 1
    clock.events.append((generation, manager.rid_to_state.clear))
    clock.events.append((answer, lambda: setattr(manager._gate, "in_flight", 0)))
    assert 20 <= drained(manager, clock) < 20 + LATE
    assert not manager.sent and not capsys.readouterr().err


def test_a_request_without_a_generation_is_not_waited_for_longer(manager, clock):
    manager._gate.in_flight = 1
    assert LIMIT <= drained(manager, clock) < LIMIT + LATE
    assert not manager.sent


def test_what_runs_at_the_limit_is_cut_off_with_503(manager, clock, capsys):
    manager.rid_to_state |= {"a": 1, "b": 2}

    def give_up(abort):
        manager.sent.append(abort)
        clock.events.append((clock.now + 1, manager.rid_to_state.clear))

    manager._dispatch_to_scheduler = give_up
    assert LIMIT + 1 <= drained(manager, clock) < LIMIT + 1 + 2 * LATE
    (abort,) = manager.sent
    assert abort.abort_all and abort.abort_message == drain.SHUTTING_DOWN
    reason = abort.finished_reason
    assert (reason["type"], reason["status_code"], reason["message"]) == ("abort", 503, drain.SHUTTING_DOWN)
    assert capsys.readouterr().err == "fathom serve: 2 generations were cut off 30 s after SIGTERM\n"


def test_an_engine_that_hangs_is_given_a_while_and_then_forgotten(manager, clock):
    manager.rid_to_state["a"] = 1
    assert LIMIT + ABORT_SECONDS <= drained(manager, clock) < LIMIT + ABORT_SECONDS + 2 * LATE
    assert len(manager.sent) == 1 and manager.rid_to_state == {}


def test_sigterm_closes_the_gate_and_the_process_ends_whatever_clients_do(clock, monkeypatch):
    happened, timers = [], []

    class Timer(SimpleNamespace):
        daemon = False

        def __init__(self, seconds, function):
            super().__init__(seconds=seconds, function=function)

        def start(self):
            timers.append(self)

    async def stop(self):
        assert not self.rid_to_state, "SGLang would wait for these without end"
        happened.append("stopped")

    monkeypatch.setattr(drain, "threading", SimpleNamespace(Timer=Timer))
    monkeypatch.setattr(drain.FathomTokenizerManager, "sigterm_watchdog", stop)
    monkeypatch.setattr(drain.FathomTokenizerManager, "__init__", lambda *_: None)
    gate = Gate(drain_seconds=LIMIT)
    made = ServingTokenizerManager(
        None, None, None, gate, lambda: happened.append("died"), lambda: happened.append("left")
    )
    made.rid_to_state, made.gracefully_exit = {"a": 1}, False
    assert not gate.draining()

    def sigterm():
        assert happened == [] and clock.now >= 50, "nothing ends before"
        made.gracefully_exit = True
        assert gate.draining()
        clock.events.append((60, made.rid_to_state.clear))

    clock.events.append((50, sigterm))
    asyncio.run(made.sigterm_watchdog())
    assert happened == ["stopped"] and 60 <= clock.now < 60 + LATE
    (timer,) = timers
    assert timer.seconds == CLOSE_SECONDS and timer.daemon
    timer.function()
    assert happened == ["stopped", "left"]
    handler = made.signal_handler_class(SimpleNamespace(dump_requests_before_crash=lambda: None))
    handler.running_phase_sigquit_handler()
    assert happened == ["stopped", "left", "died"]


def test_a_dead_engine_ends_the_process():
    happened = []
    manager = SimpleNamespace(dump_requests_before_crash=lambda: happened.append("dumped"))
    handler = drain._signal_handler(lambda: happened.append("died"))(manager)
    handler.running_phase_sigquit_handler()
    assert happened == ["dumped", "died"]
