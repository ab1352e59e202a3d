"""A step's page tables as the device writes them; the reference is compared with the host's in ``tests/kv``."""

import os
import subprocess
import sys
from pathlib import Path


def test_the_triton_kernel_in_the_interpreter():
    script = Path(__file__).with_name("interpret_span_tables.py")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [sys.executable, script], env=environment, capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout == "5 cases\n"
