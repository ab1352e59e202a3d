"""Files of metrics whose room on the disk is taken when they are made, not when they are written to.

``prometheus_client`` maps them into memory as files with holes. Where the disk is full when a hole is first written
to, the kernel ends the process (SIGBUS), without a word.
"""

import logging
import os

from prometheus_client import mmap_dict, values

ENTRY_BYTES = 40
"""Most that an entry takes beside its key: a length, two numbers, and blanks behind the key."""

logger = logging.getLogger(__name__)


class AllocatedDict(mmap_dict.MmapedDict):
    """A dict of doubles in a file without holes; what a full disk has no room for stays in memory until it has.

    Raises:
        OSError: where the disk has no room for a new file.
    """

    def __init__(self, filename: str, read_mode: bool = False) -> None:
        if not read_mode:
            with open(filename, "a+b") as file:
                os.posix_fallocate(file.fileno(), 0, mmap_dict._INITIAL_MMAP_SIZE)
        self._waiting: dict[str, tuple[float, float]] = {}
        super().__init__(filename, read_mode)

    def read_value(self, key: str) -> tuple[float, float]:
        """Value and time of an entry."""
        if self._has_room(key):
            found: tuple[float, float] = super().read_value(key)
            return found
        return self._waiting.setdefault(key, (0.0, 0.0))

    def write_value(self, key: str, value: float, timestamp: float) -> None:
        """Set an entry's value and time."""
        if self._has_room(key):
            self._waiting.pop(key, None)
            super().write_value(key, value, timestamp)
        else:
            self._waiting[key] = value, timestamp

    def _has_room(self, key: str) -> bool:
        """Whether an entry is in the file or can be added."""
        if key in self._positions or self._used + len(key.encode()) + ENTRY_BYTES <= self._capacity:
            return True
        try:
            os.posix_fallocate(self._f.fileno(), 0, 2 * self._capacity)
        except OSError as error:
            if not self._waiting:
                logger.error("some metrics are not written to %s: %s", self._fname, error.strerror)
            return False
        return True


def install() -> None:
    """Let this process's metrics have such files; before the first of them is made."""
    values.MmapedDict = AllocatedDict  # type: ignore[misc]
