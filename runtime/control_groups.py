"""What the control groups of this process allow it: a container's limits of processors' time and of memory."""

from collections.abc import Iterator
from pathlib import Path

MOUNTED = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")


def processors(mounted: Path = MOUNTED, own: Path = OWN) -> float | None:
    """Processors' time that may be used, in seconds per second; None without a limit.

    Args:
        mounted: where the groups are mounted, of either version.
        own: what the kernel says of the groups that this process is in.
    """
    found = []
    for folder, version in _groups("cpu", mounted, own):
        names = ("cpu.max",) if version == 2 else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        try:
            quota, period = " ".join((folder / name).read_text() for name in names).split()
            if int(quota) > 0:
                found.append(int(quota) / int(period))
        except (OSError, ValueError):  # no such group here, or "max"
            continue
    return min(found, default=None)


def memory(mounted: Path = MOUNTED, own: Path = OWN) -> int | None:
    """Bytes of memory that may be used; None without a limit, or a huge number where version 1 has none.

    Args:
        mounted, own: as for :func:`processors`.
    """
    found = []
    for folder, version in _groups("memory", mounted, own):
        try:
            found.append(
                int((folder / ("memory.max" if version == 2 else "memory.limit_in_bytes")).read_text())
            )
        except (OSError, ValueError):  # as above
            continue
    return min(found, default=None)


def _groups(controller: str, mounted: Path, own: Path) -> Iterator[tuple[Path, int]]:
    """The folders that may limit a controller, of the groups that this process is in, and their version."""
    try:
        lines = [line.split(":", 2) for line in own.read_text().splitlines()]
    except OSError:
        return
    for _, controllers, path in lines:
        if not controllers:
            yield from ((folder, 2) for folder in _with_parents(mounted, path))
        elif controller in controllers.split(","):
            yield from ((folder, 1) for folder in _with_parents(mounted / controller, path))


def _with_parents(mounted: Path, path: str) -> list[Path]:
    """The folders of a group and of those that it is in; in a container its own may be mounted alone."""
    group = mounted / path.lstrip("/")
    return [folder for folder in (group, *group.parents) if folder.is_relative_to(mounted)]
