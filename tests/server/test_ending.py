"""A server that is told to end while it loads does so, whatever its interpreter is in the midst of."""

import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import psutil
import pytest

from fathom.server import serve

SCRIPT = """
import os, signal, subprocess, sys
from fathom.server import ending

class Held:
    def __del__(self):  # an exception from here is reported and ignored
        os.kill(os.getpid(), {number})

ending.end_when_told()
child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
print(child.pid, flush=True)
Held()
print("still loading", flush=True)
sys.exit(2)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_ends_where_exceptions_are_ignored(number):
    command = [sys.executable, "-c", SCRIPT.format(number=int(number))]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    (child,) = ended.stdout.splitlines()
    assert (ended.returncode, ended.stderr) == (0, "")
    assert not psutil.pid_exists(int(child))


@pytest.mark.parametrize(
    "trouble", ["sys.stdout = open('/dev/full', 'w'); print('lost')", "sys.stdout.close()"]
)
def test_its_code_is_kept_where_the_last_words_are_lost(trouble):
    script = f"import sys; from fathom.server import ending; {trouble}; ending.leave(3)"
    assert subprocess.run([sys.executable, "-c", script], timeout=60).returncode == 3


WRITES = """
import atexit, os, tempfile, threading
from fathom.server import ending

def write():
    gone.wait()
    open(os.path.join(folder.name, "metrics"), "w")

gone, writer = threading.Event(), threading.Thread(target=write, daemon=True)
atexit.register(lambda: (gone.set(), writer.join()))  # after the folder, which comes later, is removed
folder = tempfile.TemporaryDirectory()
writer.start()
ending.leave(0)
"""


def test_a_thread_that_finds_its_folder_gone_is_no_trouble():
    """As SGLang's, which counts processor time in a folder of metrics that the end removes."""
    ended = subprocess.run([sys.executable, "-c", WRITES], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (0, "")


FORK = """
import os, sys
from types import SimpleNamespace
from fathom.runtime.sglang_host.machine import torchvision_ops
torchvision_ops.declare()
from sglang.srt.utils.common import set_prometheus_multiproc_dir
from fathom.server import children, ending
set_prometheus_multiproc_dir()
if (child := os.fork()) == 0:
    children._prepare(SimpleNamespace(log_level="info"))
    ending.leave(0)
assert os.waitpid(child, 0)[1] == 0
folder = os.environ["PROMETHEUS_MULTIPROC_DIR"]
print(folder, os.path.isdir(folder), flush=True)
ending.leave(0)
"""


def test_the_folder_of_metrics_ends_with_the_process_that_made_it():
    """Not with a copy of it, beside which others write into the folder."""
    env = {name: value for name, value in os.environ.items() if name != "PROMETHEUS_MULTIPROC_DIR"}
    done = subprocess.run([sys.executable, "-c", FORK], capture_output=True, text=True, timeout=100, env=env)
    assert done.returncode == 0, done.stderr
    folder, there = done.stdout.split()
    assert there == "True" and not os.path.exists(folder)


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (signal.SIGKILL, "--max-total-tokens"),
        (signal.SIGBUS, "--shm-size"),
        (signal.SIGABRT, "--pids-limit"),
    ],
)
def test_an_engine_process_that_the_system_ends_at_start_is_told_with_what_to_do(number, remedy):
    """In SGLang's words there is a number, of which it explains one by a command that a container does not have."""
    from sglang.srt.entrypoints.engine import _scheduler_died_error

    died = SimpleNamespace(exitcode=-number, join=lambda timeout: None)
    error = serve._engine_error(_scheduler_died_error(0, died))
    assert error.code == 1 and number.name in str(error) and remedy in str(error)
    died.exitcode = 3
    assert serve._engine_error(_scheduler_died_error(0, died)).code == 3
