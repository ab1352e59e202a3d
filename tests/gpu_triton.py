"""The Triton that a GPU gets, beside the environment's own; nothing here may import either."""

import sys
from pathlib import Path

FOLDER = Path(sys.prefix) / "gpu-triton"
LOCK = Path(__file__).resolve().parents[1] / "requirements" / "cuda.lock"


def locked() -> str:
    """Its version."""
    (line,) = (line for line in LOCK.read_text().splitlines() if line.startswith("triton=="))
    return line.removeprefix("triton==")


def use() -> None:
    """Let the first import in this process find it.

    Raises:
        FileNotFoundError: where it is not installed.
    """
    if not (FOLDER / ".installed").exists():
        raise FileNotFoundError(f"{FOLDER} is missing; `make test` installs it")
    sys.path.insert(0, str(FOLDER))
