"""How the server ends: when told to, or when its engine has failed; no process of the engine outlives it."""

import atexit
import contextlib
import os
import signal
import sys
import threading
from typing import NoReturn

from fathom.server.command import checks, depth_pages
from fathom.server.command.checks import StartError


def leave(code: int) -> NoReturn:
    """End this process alone, without the interpreter's teardown, in which Triton lists all it never freed.

    Args:
        code: the exit code, also where what is left to do fails.
    """
    # Other threads go on, and what they miss from here on, the folder of metrics for one, is no trouble to report.
    threading.excepthook = lambda _: None
    try:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def end(code: int) -> NoReturn:
    """End the engine's processes and this one.

    Args:
        code: the exit code.
    """
    stop_children()
    leave(code)


def stop_children() -> None:
    """End the processes that this one started."""
    import psutil

    _stop_watchdog()
    children = psutil.Process(os.getpid()).children(recursive=True)
    for child in children:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    psutil.wait_procs(children, timeout=10)


def _stop_watchdog() -> None:
    """The engine's processes are ended on purpose: that is no crash to report."""
    http_server = sys.modules.get("sglang.srt.entrypoints.http_server")
    state = getattr(http_server, "get_global_state", lambda: None)()  # it may be in the midst of its import
    watchdog = state.tokenizer_manager._subprocess_watchdog if state is not None else None
    if watchdog is not None:
        watchdog.stop()


def end_when_told() -> None:
    """Let SIGTERM and Ctrl-C end the server until its HTTP server, which has its own way to stop, is up.

    Here and now: an exception raised where Python ignores them, in an object's finalizer say, would be lost.
    """
    import psutil  # noqa: F401 -- not first in a signal's handler, which may interrupt any import

    numbers = signal.SIGTERM, signal.SIGINT

    def told(*_: object) -> NoReturn:
        for number in numbers:  # once is enough: what ends here must not be begun again in its midst
            signal.signal(number, signal.SIG_IGN)
        end(0)

    for number in numbers:
        signal.signal(number, told)


def on_early_end(host: str, port: int) -> NoReturn:
    """The HTTP server stopped before it could be used: it was told to, or its address is taken."""
    code = 0
    try:
        checks.check_port(host, port)
    except StartError as error:
        print(f"fathom serve: error: {error}", file=sys.stderr)
        code = error.code
    end(code)


def on_engine_death() -> NoReturn:
    """An engine process died while serving: say so and leave, for a supervisor to start anew."""
    print("fathom serve: error: an engine process ended; its own report is above", file=sys.stderr)
    end(checks.FAILURE)


def on_engine_failure(*_: object) -> NoReturn:
    """SIGQUIT from an engine process that failed while starting: say so and leave."""
    print("fathom serve: error: the engine failed to start; its own report is above", file=sys.stderr)
    hint()
    end(checks.FAILURE)


def on_failed_warm_up(told: bool) -> NoReturn:
    """The server's own first request was not answered: SGLang would kill this process without a word.

    Args:
        told: whether the server had been told to end.
    """
    if not told:
        message = "the server's own first request was not answered; the reason is above"
        print(f"fathom serve: error: {message}", file=sys.stderr)
    end(0 if told else checks.FAILURE)


def hint() -> None:
    """Where the engine did not start with depth pages on a GPU: that there is a way without."""
    if depth_pages.on_gpu():
        print(f"fathom serve: {depth_pages.HINT}", file=sys.stderr)
