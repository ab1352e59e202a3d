"""Scripts that hold Triton's kernels against the plain paths, in Triton's interpreter."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture
def interpret():
    """A function: the name of a script of this folder -> what it says, in a process of its own.

    The interpreter is chosen before the kernels are decorated, and runs one program after the other.
    """

    def run(script: str) -> str:
        env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, Path(__file__).with_name(script)]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run
