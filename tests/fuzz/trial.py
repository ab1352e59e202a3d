"""One world: its server, waves of requests, and what has to be true between them."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Any

import conftest
import httpx
from forked import READ_LATE, Template
from fuzz.answers import Checker
from fuzz.clients import Client, Reply, Wrong
from fuzz.reference import Reference
from fuzz.report import Report
from fuzz.requests import REPEATABLE, Drawer, Request
from fuzz.worlds import World
from waiting import wait_until

WAVES = 4
OVERLAP = "FATHOM_TESTS_OVERLAP"
"""As in ``compared.py``."""
LOOK_SECONDS = 5.0
STILL_SECONDS = 90.0
"""A server that answers nobody and takes no step for so long stands still."""
WAVE_SECONDS = 900.0
"""The most that a wave may take."""
END_SECONDS = 10.0
"""In which a server's process ends after its connections."""
SETTLE_SECONDS = 60.0
TAIL = 6000
"""Characters of a log that a failure keeps."""
ERRORS = ("Traceback", "AssertionError", "leak")
HARMLESS = "resource_tracker"
"""Of Python, which warns of semaphores of its own when a process was killed."""


class Down(Exception):
    """The server has ended, or stands still; ``unanswered``: places in the wave of those that wait."""

    def __init__(self, why: str, unanswered: Iterable[int] = ()) -> None:
        super().__init__(why)
        self.unanswered = list(unanswered)


def start(
    run: Callable[..., conftest.Server], template: Template, world: World, reference: Reference
) -> conftest.Server:
    """The server of a world, a fork of the template; several devices compare what they do.

    Args:
        run: as of ``conftest.starter``.
    """
    command = ["serve", str(reference.target), *world.flags, *reference.flags]
    env = {"OMP_NUM_THREADS": "1", **world.env}
    script = conftest.OVERLAPPING if world.overlap else None
    if world.devices > 1:
        command += ["--tp-size", str(world.devices)]
        env |= {OVERLAP: "1"} if world.overlap else {}
        script = conftest.COMPARED
    assert world.env.keys() <= READ_LATE
    return run(command, env, start=partial(template.start, script=script))


class Trial:
    """The waves of one server.

    Attributes:
        server: that runs.
        replies: of the last wave.
    """

    def __init__(self, world: World, reference: Reference, server: conftest.Server, report: Report) -> None:
        self.world, self.server, self.report = world, server, report
        self.client, self.drawer = Client(server.url, world), Drawer(world)
        self.checker = Checker(world, reference, self.drawer, report.counts)
        self.replies: list[Reply] = []
        report.counts["servers"] += 1

    def run(self, waves: int = WAVES) -> None:
        """All waves, and the server's end."""
        for number in range(waves):
            if not self.wave(self.drawer.wave(number)):
                return
        self.end()

    def wave(self, requests: list[Request]) -> bool:
        """Send requests together and check what comes back; whether the server still runs as it should."""
        self.report.counts["requests"] += len(requests)
        self.checker.wave = requests
        try:
            futures = self._send(requests)
        except Down as down:
            told = {"wave": [vars(request) for request in requests], "unanswered": down.unanswered}
            self.report.failed(self.world, str(down), **told, engine=self._engine(), log=self._log())
            self._kill()
            return False
        self.replies = []
        for request, future in zip(requests, futures, strict=True):
            try:
                self.replies += future.result()
            except (Wrong, httpx.HTTPError, ValueError, KeyError) as error:
                self._failed(request, error)
        healthy = self._healthy()
        for reply in self.replies:
            try:
                self.checker.check(reply)
            except Exception as error:
                self._failed(reply.request, error, reply)
        return healthy and self._healthy()

    def _send(self, requests: list[Request]) -> list[Future[list[Reply]]]:
        pool = ThreadPoolExecutor(len(requests))
        futures = [pool.submit(self.client.send, request) for request in requests]
        pool.shutdown(wait=False)
        begun = moved = time.monotonic()
        seen: Any = None
        while waiting := wait(futures, LOOK_SECONDS).not_done:
            places = [place for place, future in enumerate(futures) if future in waiting]
            if (code := self.server.process.poll()) is not None:
                raise Down(f"the server ended with {code}, {len(waiting)} requests unanswered", places)
            now, progress = time.monotonic(), (len(waiting), self._steps())
            if progress != seen:
                seen, moved = progress, now
            if now - moved > STILL_SECONDS:
                raise Down(f"no step in {STILL_SECONDS:g} s, {len(waiting)} requests unanswered", places)
            if now - begun > WAVE_SECONDS:
                raise Down(f"{len(waiting)} requests unanswered after {WAVE_SECONDS:g} s", places)
        if any(isinstance(future.exception(), httpx.HTTPError) for future in futures):
            with contextlib.suppress(subprocess.TimeoutExpired):
                raise Down(f"the server ended with {self.server.process.wait(END_SECONDS)}")
        return futures

    def _engine(self) -> dict[str, Any] | None:
        with contextlib.suppress(httpx.HTTPError, ValueError, KeyError):
            return self.client.http.get("/fathom/info", timeout=30).json()["engine"][0]
        return None

    def _steps(self) -> tuple[int, int] | None:
        engine = self._engine()
        return engine and (engine["steps"]["prefill_steps"], engine["steps"]["decode_steps"])

    def _log(self) -> str:
        return self.server.log.read_text()[-TAIL:]

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.server.process.pid, signal.SIGKILL)

    def _failed(self, request: Request, error: Exception, reply: Reply | None = None) -> None:
        """Write it down, with what the server says to the same request when it is alone."""
        alone = None
        if reply is not None and request.kind in REPEATABLE - {"leave"}:
            with contextlib.suppress(httpx.HTTPError, ValueError):
                body = self.client.body(request) | {"stream": False}
                alone = self.client.http.post("/generate", json=body, timeout=STILL_SECONDS).json()
        why = str(error) if isinstance(error, Wrong) else repr(error)
        expected, wave = getattr(error, "expected", None), [vars(each) for each in self.checker.wave]
        told = reply and vars(reply) | {"request": None}
        self.report.failed(self.world, why, request, told, expected, alone=alone, wave=wave)

    def _healthy(self) -> bool:
        """Nothing is held once nobody asks, and the log has no error."""
        if (code := self.server.process.poll()) is not None:
            self.report.failed(self.world, f"the server ended with {code}", log=self._log())
            return False
        try:
            wait_until(lambda: not self._held(), SETTLE_SECONDS, self._held)
        except AssertionError as error:
            self.report.failed(self.world, f"what is held after all answers: {error}", engine=self._engine())
            return False
        return self._clean_log()

    def _held(self) -> dict[str, Any]:
        """What of the engine's books is not at rest."""
        engine = self._engine()
        if engine is None:
            return {"engine": "does not answer"}
        pages, fastkv = engine["kv_pool"]["depth_pages"], engine["fastkv"] or {}
        books = {
            "open_accounts": engine["open_accounts"],
            "open_rows": pages["open_rows"],
            "held": pages["held"],
            "lost": pages["total"] - pages["free"] - pages["cached"],
            "not evictable": pages["cached"] - pages["evictable"],
            "compact buffers": engine["slow_fast"]["buffers_in_use"],
            "hidden states": fastkv.get("buffer_used", 0),
        }
        return {name: count for name, count in books.items() if count}

    def _clean_log(self) -> bool:
        lines = self.server.log.read_text().splitlines()
        wrong = [
            line
            for line in lines
            if HARMLESS not in line and any(word.lower() in line.lower() for word in ERRORS)
        ]
        if wrong:
            self.report.failed(self.world, f"the log says {wrong[0]!r}", log=self._log())
        return not wrong

    def end(self) -> None:
        """Empty the prefix cache, after which every page is free, and stop the server."""
        self.server.flush()
        pages = self.server.engine()["kv_pool"]["depth_pages"]
        if pages["free"] != pages["total"]:
            self.report.failed(self.world, f"{pages['free']} of {pages['total']} pages free after a flush")
        if code := self.server.stop():
            self.report.failed(self.world, f"the server's exit code is {code}", log=self._log())
        self._clean_log()
