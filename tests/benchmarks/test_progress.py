"""Progress bars where nobody looks on."""

import os
import pty
import sys
import termios
import time

from fathom.benchmarks.progress import progress

STEPS = 30


def slowly():
    for _ in progress(range(STEPS), desc="counting"):
        time.sleep(0.02)


def test_a_file_gets_the_beginning_and_the_end(tmp_path, monkeypatch):
    log = tmp_path / "log"
    with log.open("w") as file:
        monkeypatch.setattr(sys, "stderr", file)
        slowly()
    shown = log.read_bytes().split(b"\r")
    assert len(shown) <= 3, shown
    assert f"{STEPS}/{STEPS}".encode() in shown[-1]


def test_a_terminal_sees_it_move(monkeypatch):
    reader, writer = pty.openpty()
    termios.tcsetwinsize(writer, (24, 80))
    with open(writer, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        slowly()
        shown = os.read(reader, 1 << 16).split(b"\r")
    os.close(reader)
    assert len(shown) > 4, shown
