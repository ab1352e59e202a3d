"""``fathom serve`` in forks of a process that has imported what it imports: most of the work of a start.

Run as a script, with a socket's address and what to import first, it is that process. Beside it others are started
as an operator does.
"""

import contextlib
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
import traceback
from pathlib import Path
from types import SimpleNamespace

from fathom.runtime.sglang_host import imports

IMPORTED = (
    "numba",
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.models.registry",
    "fathom.runtime.sglang_host.engine_args",
    "fathom.runtime.sglang_host.seams.seams",
    "fathom.runtime.sglang_host.scheduler",
    "fathom.runtime.sglang_host.step.slow_fast",
    "fathom.server.app",
    "fathom.server.serve",
)
READ_LATE = {
    "SGLANG_CPU_OMP_THREADS_BIND",
    "SGLANG_HEALTH_CHECK_TIMEOUT",
    "SGLANG_LOG_SCHEDULER_STATUS_INTERVAL",
    "SGLANG_LOG_SCHEDULER_STATUS_TARGET",
    "SGLANG_MAX_NEW_TOKENS_LIMIT",
    "SGLANG_TEST_RETRACT",
    "SGLANG_TEST_RETRACT_INTERVAL",
    "http_proxy",
    "no_proxy",
}
"""What a fork reads of its own environment; others were read when the template imported SGLang."""
LOOK = 0.05
"""Seconds after which an exit is noticed."""
HASTE = 10
"""By how much less a server waits for its own port than the second after which SGLang looks for it."""
TESTS = Path(__file__).parent
WIDTH = 16
"""Bytes in which a process's id is told, and later how it ended."""
LEAVING = []
"""Servers that were told to end with one file of tests, and may do so while those of the next begin."""


def await_ends() -> None:
    while LEAVING:
        with contextlib.suppress(subprocess.TimeoutExpired):
            LEAVING.pop().ended()


class Forked:
    """A server's process, as ``subprocess.Popen`` shows it."""

    def __init__(self, told: socket.socket) -> None:
        self.told, self.returncode = told, None
        told.settimeout(60)
        self.pid = int(told.recv(WIDTH, socket.MSG_WAITALL))

    def __enter__(self) -> "Forked":
        return self

    def __exit__(self, *_: object) -> None:
        """Whatever is left of it ends."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            self.told.settimeout(timeout)
            try:
                self.returncode = int(self.told.recv(WIDTH, socket.MSG_WAITALL))
            except (TimeoutError, BlockingIOError):
                raise subprocess.TimeoutExpired("fathom serve", timeout or 0) from None
            self.told.close()
        return self.returncode

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


class Template:
    """The process that is forked, started with the first server.

    Args:
        folder: for its socket and its log.
        first: modules that are imported before what a server imports.
    """

    def __init__(self, folder: Path, env: dict[str, str], *first: str) -> None:
        self.address = str(folder / "socket")
        with (folder / "log").open("w") as log:
            command = [sys.executable, __file__, self.address, *first]
            self.process = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=log, stderr=log)

    def start(
        self,
        argv: list[str],
        log: Path,
        env: dict[str, str],
        script: Path | None = None,
        hasty: bool = True,
    ) -> Forked:
        """``fathom`` with these arguments, as a process with a session of its own that writes to the log.

        Args:
            script: of the tests, whose ``main`` is called in place of the command's.
            hasty: ask itself as soon as its port can be had, not a second later.
        """
        told = socket.socket(socket.AF_UNIX)
        while True:
            try:
                told.connect(self.address)
                break
            except (FileNotFoundError, ConnectionRefusedError):
                assert self.process.poll() is None, Path(self.address).with_name("log").read_text()
                select.select([], [], [], LOOK)
        module = script.stem if script else "fathom.server.cli"
        asked = {"argv": argv, "log": str(log), "env": env, "module": module, "hasty": hasty}
        told.sendall(json.dumps(asked).encode() + b"\n")
        return Forked(told)

    def __enter__(self) -> "Template":
        return self

    def __exit__(self, *_: object) -> None:
        await_ends()  # it is from here that their ends are known
        self.process.stdin.close()
        self.process.wait(20)


def import_all(first: tuple[str, ...]) -> None:
    """As the command does it, in its order: torchvision's operators before SGLang."""
    sys.path[0] = os.getcwd()
    sys.path += [str(TESTS / "engine"), str(TESTS)]
    for name in first:
        importlib.import_module(name)
    from fathom.runtime.sglang_host.machine import torchvision_ops
    from fathom.server import quiet

    quiet.hush_loggers()
    torchvision_ops.declare()
    for name in IMPORTED:
        importlib.import_module(name)


def read_again() -> None:
    """The members of ``READ_LATE`` that SGLang reads when it is imported."""
    from sglang.srt.entrypoints import http_server
    from sglang.srt.environ import envs
    from sglang.srt.managers import scheduler

    http_server.HEALTH_CHECK_TIMEOUT = int(
        os.environ.get("SGLANG_HEALTH_CHECK_TIMEOUT", http_server.HEALTH_CHECK_TIMEOUT)
    )
    scheduler.TEST_RETRACT = envs.SGLANG_TEST_RETRACT.get()
    scheduler.TEST_RETRACT_INTERVAL = envs.SGLANG_TEST_RETRACT_INTERVAL.get()


def hasten() -> None:
    """SGLang's server sleeps before each try to ask itself, and nowhere else."""
    from sglang.srt.entrypoints import http_server

    clock = SimpleNamespace(**vars(time))
    clock.sleep = lambda seconds: time.sleep(seconds / HASTE)
    http_server.time = clock


def fork(listener: socket.socket, others: list[socket.socket]) -> tuple[int, socket.socket]:
    """A server for who calls next; in the process that is the server it does not return."""
    told, _ = listener.accept()
    with told.makefile() as lines:
        request = json.loads(lines.readline())
    if pid := os.fork():
        told.sendall(b"%16d" % pid)
        return pid, told
    for each in (listener, told, *others):
        each.close()
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    log = os.open(request["log"], os.O_WRONLY | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.close(log)
    # What stays the same stays where it is: from there a process finds the title that it changes.
    os.environ.update(request["env"].items() - os.environ.items())
    read_again()
    if request["hasty"]:
        hasten()
    sys.argv = ["fathom", *request["argv"]]
    try:
        code = importlib.import_module(request["module"]).main(request["argv"])
    except SystemExit as ended:
        code = ended.code
        if isinstance(code, str):
            print(code, file=sys.stderr)
            code = 1
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    os._exit(code or 0)


def serve(address: str, *first: str) -> None:
    """Fork servers until standard input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal interrupts all that it has started
    with imports.uncollected():
        import_all(first)
    running = {}
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{address}.new")
        listener.listen()
        os.rename(f"{address}.new", address)
        while True:
            ready, _, _ = select.select([listener, sys.stdin], [], [], LOOK)
            if sys.stdin in ready:
                return
            if listener in ready:
                pid, told = fork(listener, list(running.values()))
                running[pid] = told
            while running:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    break
                with running.pop(pid) as told, contextlib.suppress(OSError):
                    told.sendall(b"%16d" % os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    serve(*sys.argv[1:])
