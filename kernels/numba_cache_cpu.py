"""Numba's compiled kernels on disk: a folder that cannot be used costs time and is told, but ends nothing.

Numba raises where no folder can be written to, where the disk is full when a kernel has been compiled, and at files
that were cut short, by a machine that failed say. Where ``NUMBA_CACHE_DIR`` alone cannot be written to, it takes
another folder without a word. And it looks at a function's own file alone, while what it keeps has functions and
constants of others in it.
"""

import contextlib
import functools
import hashlib
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from numba.core import caching, config, dispatcher

logger = logging.getLogger(__name__)

REMEDY = "set NUMBA_CACHE_DIR to a folder that can be written to, has room, and survives a restart"


@functools.cache
def _tell(problem: str) -> None:
    """Once in a process, however many kernels it is true of."""
    logger.warning("%s; %s", problem, REMEDY)


@functools.cache
def _sources(room: Path = Path(__file__).parent) -> str:
    """What kernels are compiled from, as a hash: it changes with any of the room's files."""
    found = hashlib.sha256()
    for path in sorted(room.glob("*.py")):
        found.update(path.read_bytes())
    return found.hexdigest()


class TolerantCache(caching.FunctionCache):
    """One function's files; a kernel that they do not yield is compiled, one that they do not take is not kept."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        file = self._cache_file
        file._source_stamp = file._source_stamp, _sources()

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """The compiled form for a signature, as Numba has it, or None."""
        try:
            return super().load_overload(sig, target_context)
        except Exception as error:
            _tell(
                f"some compiled kernels in {self.cache_path} cannot be read and are compiled anew: {error!r}"
            )
            if not isinstance(error, OSError):  # else the next one could not read them either
                with contextlib.suppress(OSError):
                    self.flush()
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        """Keep a compiled form for the next process."""
        try:
            super().save_overload(sig, data)
        except OSError as error:
            _tell(
                f"compiled kernels cannot be kept in {self.cache_path} ({error.strerror}), so the next start "
                "compiles them again"
            )


def cache_of(function: Callable[..., Any]) -> Any:
    """Where the compiled forms of a function are kept.

    Args:
        function: as it is in its source, before it is compiled.

    Returns:
        Numba's cache of its files; one that keeps nothing where no folder can be written to.

    Raises:
        RuntimeError: for a ``NUMBA_CACHE_LOCATOR_CLASSES`` that Numba does not know.
    """
    try:
        cache = TolerantCache(function)
    except RuntimeError as error:
        if "no locator available" not in str(error):
            raise
        given = f"NUMBA_CACHE_DIR={config.CACHE_DIR} and " if config.CACHE_DIR else ""
        _tell(
            f"compiled kernels are not kept, so each start compiles them again: {given}the folder for caches "
            "(XDG_CACHE_HOME, else HOME) cannot be written to"
        )
        return caching.NullCache()
    if config.CACHE_DIR and not Path(cache.cache_path).is_relative_to(config.CACHE_DIR):
        kept = os.path.dirname(cache.cache_path)
        _tell(
            f"NUMBA_CACHE_DIR={config.CACHE_DIR} cannot be written to, and compiled kernels are kept in {kept}"
        )
    return cache


def install() -> None:
    """Let all functions that are declared from here on with ``cache=True`` be kept so."""
    dispatcher.FunctionCache = cache_of
