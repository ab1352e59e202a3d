"""What the Makefile says to a Python that the locked packages are not for."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def make(folder, version):
    """`make setup` into a folder with a Python that says it is of this version, and that makes no environments."""
    python = folder / "python"
    said = f"import sys; sys.version_info = {version}; exec(sys.argv[2])"
    python.write_text(f'#!/bin/sh\ntest "$1" = -c || exit 7\nexec {sys.executable} -c "{said}" "$@"\n')
    python.chmod(0o755)
    command = ["make", "-C", str(ROOT), f"PYTHON={python}", f"VENV={folder / 'venv'}", "setup"]
    plain = os.environ | {"LC_ALL": "C", "MAKEFLAGS": ""}  # not those of the `make` that runs the tests
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=plain)


@pytest.mark.parametrize("version", [(3, 9, 18), (3, 10, 13), (3, 13, 0), (4, 11, 0)])
def test_a_python_without_packages_is_named(tmp_path, version):
    ended = make(tmp_path, version)
    major, minor, _ = version
    assert ended.returncode == 2
    assert f"python) is Python {major}.{minor}; the locked packages are for 3.11 3.12 only" in ended.stderr
    assert "venv" not in ended.stdout


@pytest.mark.parametrize("version", [(3, 11, 7), (3, 12, 1)])
def test_others_make_an_environment(tmp_path, version):
    ended = make(tmp_path, version)
    assert f"{tmp_path}/python -m venv {tmp_path}/venv" in ended.stdout and "Error 7" in ended.stderr
