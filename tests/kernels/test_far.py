"""Pools, tables and evidence of more than 2**31 elements. Triton's interpreter wraps around where a GPU does."""

import os
import subprocess
import sys
from pathlib import Path


def test_offsets_do_not_wrap_around():
    """In a process of its own: the interpreter is chosen before the kernels are decorated."""
    script = Path(__file__).with_name("interpret_far.py")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [sys.executable, script], env=environment, capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout == "5 cases\n"
