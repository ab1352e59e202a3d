"""Starts servers as processes of their own and ends all of them, however the bench ends."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import httpx
import psutil

from fathom.benchmarks.client import MODEL_NAME, BenchError
from fathom.benchmarks.usage import cpu_seconds, tree
from fathom.benchmarks.variants import Place, Variant

_PR_SET_PDEATHSIG = 1
_STOP_GRACE = 5.0


_PORTS = range(20000, 32000)
"""Below the range that Linux takes ports from by itself: nobody takes one of these by chance before its server
listens, which may be a minute after it was chosen."""
_SHARE = 100


@functools.cache
def _ports(process: int) -> Iterator[int]:
    """Ports to try in turn: processes that run side by side, whose numbers are near each other, share none."""
    first = _PORTS.start + process * _SHARE % len(_PORTS)
    return itertools.cycle(range(first, first + _SHARE))


def free_port() -> int:
    """A TCP port of 127.0.0.1 that nobody listens on now."""
    for port in itertools.islice(_ports(os.getpid()), _SHARE):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise BenchError(f"no free port found in {_PORTS.start}..{_PORTS.stop - 1}")


def environment(extra: dict[str, str]) -> dict[str, str]:
    """This process's environment with the same threads for every server, no GPU and no network look-ups."""
    common = {
        "OMP_NUM_THREADS": str(len(os.sched_getaffinity(0))),
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
    }
    return {**os.environ, **common, **extra}


def _die_with_parent() -> None:
    """In the child before exec: the kernel ends it when the bench is killed in a way it cannot handle."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


@dataclass
class Server:
    """A started server, or one that somebody else has started.

    Attributes:
        process: None for somebody else's.
        started: its start-up in seconds once `wait_ready` returned.
        model: the name it serves its model under.
        headers: of every request.
        command, env: that it was started with.
    """

    variant: Variant
    url: str
    log: Path
    process: subprocess.Popen | None
    born: float
    started: float = 0.0
    model: str = MODEL_NAME
    headers: dict[str, str] = field(default_factory=dict)
    command: list[str] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)

    def check_alive(self, patience: float = 0.0) -> None:
        """BenchError with the log's end if its process has ended, or does within `patience` seconds."""
        if self.process is None:
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = self.process.wait(patience)
            raise BenchError(f"{self.variant.name} ended in mid-run ({status}):\n{self.log_tail()}")

    def log_tail(self, lines: int = 12) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def wait_ready(self, limit: float) -> None:
        """Return once /health says 200; BenchError with the log's end if the process ends or time is up."""
        # One client: each loads the certificates anew, which would take processor time from the start it waits for.
        with httpx.Client(base_url=self.url, timeout=10, trust_env=False) as client:
            while time.monotonic() - self.born < limit:
                if self.process is not None and self.process.poll() is not None:
                    raise BenchError(
                        f"{self.variant.name} ended at start ({self.process.returncode}):\n{self.log_tail()}"
                    )
                with contextlib.suppress(httpx.HTTPError):
                    if client.get("/health").status_code == 200:
                        self.started = time.monotonic() - self.born
                        return
                time.sleep(0.25)
        raise BenchError(f"{self.variant.name} was not ready after {limit:g} s:\n{self.log_tail()}")


def start(running: list[Server], variant: Variant, at: Place, folder: Path, limit: float) -> Server:
    """Start a variant's server on a port of its own, in a session of its own, and wait until it is ready.

    Args:
        running: has the server as soon as there is a process to end.
        at: all but the port.
        folder: for its output, NAME.log; limit: as `wait_ready`.
    """
    at = replace(at, port=free_port())
    command = [at.fill(part) for part in variant.command]
    env = {key: at.fill(value) for key, value in variant.env.items()}
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / f"{variant.name}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            env=environment(env),
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_die_with_parent,
        )
    url = f"http://127.0.0.1:{at.port}"
    server = Server(variant, url, log, process, time.monotonic(), command=command, env=env)
    running.append(server)
    server.wait_ready(limit)
    return server


def stop(processes: list[subprocess.Popen]) -> None:
    """Ask each server to end; once it has, or after a grace, end what is left of its process tree."""
    members = [member for process in processes for member in tree(process.pid)]
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + _STOP_GRACE
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline - time.monotonic()))
    for member in members:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
    deadline = time.monotonic() + _STOP_GRACE
    while not all(map(_has_ended, members)) and time.monotonic() < deadline:
        time.sleep(0.01)


def _has_ended(process: psutil.Process) -> bool:
    """Whether a process is gone, or a zombie: one that is not ours stays that until its parent looks for it."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.status() == psutil.STATUS_ZOMBIE
    return True


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into an exit that runs `finally` blocks, as Ctrl-C does already."""

    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    previous = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def stopping() -> Iterator[list[Server]]:
    """A list to append started servers to; all are stopped when the block is left."""
    servers: list[Server] = []
    with ended_by_signals():
        try:
            yield servers
        finally:
            stop([server.process for server in servers if server.process is not None])


def wait_quiet(servers: list[Server], limit: float = 10.0, share: float = 0.1) -> None:
    """Return once all servers together use less than `share` of a core: only the next one will be busy.

    Some spin for a while after their last request. BenchError if they still do after `limit` seconds.
    """
    deadline = time.monotonic() + limit
    pids = {server.process.pid for server in servers if server.process is not None}
    while pids:
        processes = [member for pid in pids for member in tree(pid)]
        before, at = cpu_seconds(processes), time.monotonic()
        time.sleep(0.2)
        used = (cpu_seconds(processes) - before) / (time.monotonic() - at)
        if used < share:
            return
        if time.monotonic() > deadline:
            raise BenchError(f"idle servers still use {used:.0%} of a core after {limit:g} s")
