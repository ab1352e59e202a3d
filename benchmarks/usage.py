"""Memory and CPU time of a server's whole process tree."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
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


def _summed(processes: list[psutil.Process], measure: Callable[[psutil.Process], float]) -> float:
    """Over the processes that still exist."""
    total = 0.0
    for process in processes:
        with contextlib.suppress(*_GONE):
            total += measure(process)
    return total


def rss(processes: list[psutil.Process]) -> int:
    """Resident bytes summed over processes; pages they share count once for each."""
    return int(_summed(processes, lambda process: process.memory_info().rss))


def pss(processes: list[psutil.Process]) -> int:
    """Proportional bytes: a page shared by n processes counts 1/n in each, so the sum counts it once."""
    return int(_summed(processes, lambda process: process.memory_full_info().pss))


def cpu_seconds(processes: list[psutil.Process]) -> float:
    """User plus system time used so far."""
    return _summed(processes, lambda process: sum(process.cpu_times()[:2]))


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
    """Samples the processes that a tree has at the start of a `with` block; `usage` is complete after the block.

    RSS costs microseconds and is read every `interval` seconds; a peak shorter than that is missed. PSS makes the
    kernel walk all pages (10 ms per process), so it is read once, after the block: its peak is that value plus what
    RSS has fallen from its own peak, as memory that comes and goes within a request is not shared.
    """

    def __init__(self, pid: int, interval: float = 0.1):
        self._pid, self._interval = pid, interval
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._members: list[psutil.Process] = []
        self.usage = Usage()

    def _run(self) -> None:
        while not self._stop.wait(self._interval):
            self.usage.rss_peak = max(self.usage.rss_peak, rss(self._members))

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
        wall, busy, ours = (b - a for a, b in zip(self._before, after, strict=True))
        self.usage.foreign_cpu = min(1.0, max(0.0, (busy - ours) / (wall * (psutil.cpu_count() or 1))))
        rss_now = rss(self._members)
        self.usage.rss_peak = max(self.usage.rss_peak, rss_now)
        self.usage.pss_peak = pss(self._members) + self.usage.rss_peak - rss_now
