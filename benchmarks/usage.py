"""Memory and CPU time of a server's whole process tree."""

from __future__ import annotations

import contextlib
import threading
import time
from dataclasses import dataclass

import psutil

_GONE = (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess)


def tree(pid: int) -> list[psutil.Process]:
    """The process and all its descendants that exist now."""
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except _GONE:
        return []


def rss(processes: list[psutil.Process]) -> int:
    """Resident bytes summed over processes; pages they share count once for each."""
    total = 0
    for process in processes:
        with contextlib.suppress(*_GONE):
            total += process.memory_info().rss
    return total


def pss(processes: list[psutil.Process]) -> int:
    """Proportional bytes: a page shared by n processes counts 1/n in each, so the sum counts it once."""
    total = 0
    for process in processes:
        with contextlib.suppress(*_GONE):
            total += process.memory_full_info().pss
    return total


def cpu_seconds(processes: list[psutil.Process]) -> float:
    """User plus system time used so far."""
    total = 0.0
    for process in processes:
        with contextlib.suppress(*_GONE):
            times = process.cpu_times()
            total += times.user + times.system
    return total


def machine_busy_seconds() -> float:
    """CPU seconds that all cores together have been busy since boot, whoever used them."""
    times = psutil.cpu_times()
    return (
        sum(times)
        - times.idle
        - getattr(times, "iowait", 0.0)
        - getattr(times, "guest", 0.0)
        - getattr(times, "guest_nice", 0.0)
    )


@dataclass
class Usage:
    """Peaks in bytes over a span of time, and how busy others kept the machine (share of all cores, 0..1)."""

    rss_peak: int = 0
    pss_peak: int = 0
    foreign_cpu: float = 0.0


class Sampler:
    """Samples a process tree from a thread while the `with` block runs; `usage` is complete after it.

    RSS is one small read per process and sampled every `interval` seconds. PSS makes the kernel walk the
    pages, so it is taken once a second and once at the end. Peaks that last less than an interval are missed.
    """

    PSS_EVERY = 1.0

    def __init__(self, pid: int, interval: float = 0.1):
        self._pid, self._interval = pid, interval
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._members: list[psutil.Process] = []
        self.usage = Usage()

    def _take_pss(self) -> list[psutil.Process]:
        processes = tree(self._pid)
        self.usage.rss_peak = max(self.usage.rss_peak, rss(processes))
        self.usage.pss_peak = max(self.usage.pss_peak, pss(processes))
        return processes

    def _run(self) -> None:
        processes, next_pss = self._members, time.monotonic() + self.PSS_EVERY
        while not self._stop.wait(self._interval):
            self.usage.rss_peak = max(self.usage.rss_peak, rss(processes))
            if time.monotonic() >= next_pss:
                processes, next_pss = self._take_pss(), time.monotonic() + self.PSS_EVERY

    def _clocks(self) -> tuple[float, float, float]:
        ours = cpu_seconds([psutil.Process(), *self._members])
        return time.monotonic(), machine_busy_seconds(), ours

    def __enter__(self) -> Sampler:
        self._members = tree(self._pid)
        self._before = self._clocks()
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        after = self._clocks()
        self._stop.set()
        self._thread.join()
        self._take_pss()
        wall, busy, ours = (b - a for a, b in zip(self._before, after, strict=True))
        self.usage.foreign_cpu = min(1.0, max(0.0, (busy - ours) / (wall * (psutil.cpu_count() or 1))))
