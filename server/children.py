"""The engine's child processes as the server starts them: Ctrl-C is the HTTP process's to handle."""

import signal
from typing import Any

from fathom.runtime.sglang_host import process


def run_scheduler_process(*args: Any, **kwargs: Any) -> None:
    """Fathom's scheduler process, deaf to the Ctrl-C that a terminal sends to every process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    process.run_scheduler_process(*args, **kwargs)


def run_detokenizer_process(*args: Any, **kwargs: Any) -> None:
    """Fathom's detokenizer process, deaf to the Ctrl-C that a terminal sends to every process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    process.run_detokenizer_process(*args, **kwargs)
