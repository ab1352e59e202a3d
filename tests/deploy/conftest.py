"""Prometheus itself: what is installed, or Debian's package unpacked into this virtual environment."""

import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

NAMES = ("prometheus", "promtool")
UNPACKED = Path(sys.prefix) / "debian" / "prometheus"


@pytest.fixture(scope="session")
def prometheus_tools() -> dict[str, str]:
    """Paths of ``prometheus`` and ``promtool``; skips, with the reason, where there is no way to have them."""
    found = {name: shutil.which(name) for name in NAMES}
    if not all(found.values()):
        try:
            folder = unpack()
        except (OSError, subprocess.SubprocessError) as error:
            pytest.skip(
                f"prometheus is not installed, and Debian's package cannot be fetched: {reason(error)}"
            )
        found = {name: str(folder / name) for name in NAMES}
    return {name: path for name, path in found.items() if path}


def unpack() -> Path:
    """The folder with Debian's programs, fetched and verified by apt, without root; once per environment.

    Raises:
        OSError, subprocess.SubprocessError: without apt, its package list, a network, or the right to write here.
    """
    programs = UNPACKED / "usr" / "bin"
    UNPACKED.parent.mkdir(parents=True, exist_ok=True)
    with (UNPACKED.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two workers of one run
        if not programs.is_dir():
            fresh = UNPACKED.with_name(f"{UNPACKED.name}.{os.getpid()}")
            shutil.rmtree(fresh, ignore_errors=True)
            fresh.mkdir()
            run(["apt-get", "-q", "download", "prometheus"], fresh)
            (package,) = fresh.glob("prometheus_*.deb")
            run(["dpkg-deb", "-x", package.name, "."], fresh)
            run([str(fresh / "usr" / "bin" / "prometheus"), "--version"], fresh)
            package.unlink()
            fresh.rename(UNPACKED)
    return programs


def run(command: list[str], folder: Path) -> None:
    subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True, timeout=180)


def reason(error: Exception) -> str:
    """The last line of what a command said, or the error itself."""
    said = (getattr(error, "stderr", None) or "").strip().splitlines()
    return said[-1] if said else str(error)
