"""What the scheduler process counts for ``/metrics``: the time that it waits for a core."""

import os
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from greedy import body_of
from waiting import one_of_three, wait_until

from fathom.runtime.sglang_host.reports.engine_metrics import core_wait

SERIES = "fathom:core_wait_seconds_total"


@contextmanager
def shared_core(thread):
    """Let a thread, by its id, have one core, and a process that is never done have the same one."""
    cores = os.sched_getaffinity(thread)
    command = [sys.executable, "-c", "while True: pass"]
    with subprocess.Popen(command) as other:
        try:
            for each in (thread, other.pid):
                os.sched_setaffinity(each, {min(cores)})
            yield
        finally:
            os.sched_setaffinity(thread, cores)
            other.kill()


@one_of_three
def test_a_thread_that_computes_either_has_a_core_or_waits_for_one():
    with shared_core(0):
        begun, computed, waited = time.monotonic(), time.thread_time(), core_wait()
        while time.thread_time() - computed < 0.3:
            pass
        computed = time.thread_time() - computed
        passed, waited = time.monotonic() - begun, core_wait() - waited
    assert waited == pytest.approx(passed - computed, abs=0.1 * passed)
    assert waited > 0.1


def test_a_kernel_that_does_not_count(tmp_path):
    assert core_wait(tmp_path / "schedstat") == 0.0


def test_the_engine_tells_how_long_it_waited(server):
    pid = server.engine()["pid"]

    def seen():
        return server.series(SERIES)[SERIES]

    def counted():
        return core_wait(Path(f"/proc/{pid}/schedstat"))

    def agree():
        told[1] = seen()
        return told[1] - told[0] == pytest.approx(counted() - before, rel=0.1)

    told, before = [seen(), 0.0], counted()
    with shared_core(pid):
        prompt = list(range(6, 206))
        assert server.client.post("/generate", json=body_of(prompt, {}, 60)).status_code == 200
    wait_until(agree)
    assert told[1] - told[0] > 0.05


def test_an_engine_that_is_paused_waits(server):
    """It does not ask for requests all the time."""
    stat = Path(f"/proc/{server.engine()['pid']}/stat")

    def computed():
        return sum(map(int, stat.read_text().rpartition(")")[2].split()[11:13])) / os.sysconf("SC_CLK_TCK")

    assert server.client.post("/pause_generation", json={"mode": "in_place"}).status_code == 200
    try:
        before = computed()
        time.sleep(2)
        assert computed() - before < 0.2
    finally:
        assert server.client.post("/continue_generation", json={}).status_code == 200
    assert server.client.post("/generate", json=body_of([6, 7, 8], {})).status_code == 200
