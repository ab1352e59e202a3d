"""Memory and CPU of a process tree, against a tree that uses known amounts."""

import contextlib
import subprocess
import sys
import time

import pytest
from waiting import wait_until

from fathom.benchmarks import usage

MIB = 2**20
CHILD_MIB = 96

HOLD = f"x = bytearray(b'1') * ({CHILD_MIB} << 20); print(flush=True); input()"
PARENT = f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {HOLD!r}], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
child.stdout.readline()
print(flush=True)
input()
child.communicate(b"\\n")
"""


@contextlib.contextmanager
def running(code):
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        process.stdout.readline()
        yield process
        process.communicate(b"\n", timeout=20)


def test_the_tree_includes_children_and_their_memory():
    with running(PARENT) as parent:
        processes = usage.tree(parent.pid)
        assert len(processes) == 2
        assert usage.rss(processes[:1]) < CHILD_MIB * MIB
        for measure in (usage.rss, usage.pss):
            assert CHILD_MIB * MIB < measure(processes) < (CHILD_MIB + 64) * MIB
        assert usage.pss(processes) < usage.rss(processes)  # the interpreter's pages are shared
    assert usage.tree(parent.pid) == []
    assert usage.rss(processes) == 0


def test_the_sampler_keeps_a_peak_that_has_passed():
    passing = f"print(flush=True); input(); x = bytearray(b'1') * ({CHILD_MIB} << 20)"
    passing += "\ninput(); del x; print(flush=True); input()"
    with running(passing) as process:

        def go_on():
            process.stdin.write(b"\n")
            process.stdin.flush()

        with usage.Sampler(process.pid, interval=0.05) as sampler:
            go_on()
            wait_until(lambda: sampler.usage.rss_peak > CHILD_MIB * MIB)
            go_on()
            process.stdout.readline()
        assert usage.rss(usage.tree(process.pid)) < CHILD_MIB * MIB
        assert CHILD_MIB * MIB < sampler.usage.rss_peak < (CHILD_MIB + 64) * MIB
        assert 0 < sampler.usage.pss_peak <= sampler.usage.rss_peak


def test_cpu_time_is_the_trees_own():
    with running("print(flush=True); input()") as idle:
        assert usage.cpu_seconds(usage.tree(idle.pid)) < 1
    spin = "import time; end = time.process_time() + 0.5\nwhile time.process_time() < end: pass"
    spin += "\nprint(flush=True); input()"
    with running(spin) as busy:
        assert usage.cpu_seconds(usage.tree(busy.pid)) == pytest.approx(0.5, abs=0.2)


def test_the_load_of_others_is_seen_and_our_own_is_not():
    with running("print(flush=True); input()") as idle:
        with usage.Sampler(idle.pid) as sampler:
            end = time.process_time() + 0.5
            while time.process_time() < end:
                pass
        own = sampler.usage.foreign_cpu
        spin = (
            "import time; print(flush=True)\nwhile time.process_time() < 1: pass\nprint(flush=True); input()"
        )
        with running(spin) as other, usage.Sampler(idle.pid) as sampler:
            other.stdout.readline()
    assert 0 <= own <= 1
    assert sampler.usage.foreign_cpu > 0.1
