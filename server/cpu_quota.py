"""Threads on a machine that gives this process less than its cores: a container with a CPU limit."""

import os
from collections.abc import MutableMapping
from pathlib import Path

OMP_NUM_THREADS = "OMP_NUM_THREADS"


def limit_threads(environment: MutableMapping[str, str] = os.environ) -> None:
    """Let OpenMP, which counts cores, start no more threads than the quota pays for; what is set stays.

    Before the first import of PyTorch. Child processes inherit it.
    """
    found = quota()
    if found is not None and found < len(os.sched_getaffinity(0)):
        environment.setdefault(OMP_NUM_THREADS, str(max(1, int(found))))


def quota(mounted: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> float | None:
    """Processors' time that this process's control groups may use, in seconds per second; None without a limit.

    Args:
        mounted: where the groups are mounted, of either version.
        own: what the kernel says of the groups that this process is in.
    """
    try:
        lines = [line.split(":", 2) for line in own.read_text().splitlines()]
    except OSError:
        return None
    found = []
    for _, controllers, path in lines:
        if not controllers:  # version 2
            found += [_limit(folder / "cpu.max") for folder in _with_parents(mounted, path)]
        elif "cpu" in controllers.split(","):
            files = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
            found += [
                _limit(*(folder / name for name in files)) for folder in _with_parents(mounted / "cpu", path)
            ]
    return min((value for value in found if value is not None), default=None)


def _with_parents(mounted: Path, path: str) -> list[Path]:
    """The folders of a group and of those that it is in; in a container its own may be mounted alone."""
    group = mounted / path.lstrip("/")
    return [folder for folder in (group, *group.parents) if folder.is_relative_to(mounted)]


def _limit(*files: Path) -> float | None:
    """Quota over period, both in microseconds, from one file or two; None where there is none."""
    try:
        quota, period = " ".join(file.read_text() for file in files).split()
        return int(quota) / int(period) if int(quota) > 0 else None
    except (OSError, ValueError):  # no such group here, or "max"
        return None
