"""The engine's child processes as the server starts them."""

import signal
from typing import Any

from fathom.runtime.sglang_host.machine import torchvision_ops

torchvision_ops.declare()  # a process that is spawned, beside another thread of who started it, begins here

from sglang.srt.utils import common  # noqa: E402

from fathom.runtime.sglang_host import process  # noqa: E402
from fathom.server import ending, quiet  # noqa: E402


def _prepare(server_args: Any) -> None:
    # A fork has the HTTP process's handlers.
    for number in (signal.SIGTERM, signal.SIGQUIT, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    # A terminal sends Ctrl-C to every process; the HTTP process stops the others when it is done.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # And its folder of metrics, into which others write until the HTTP process, which made it, has ended.
    if (folder := getattr(common, "prometheus_multiproc_dir", None)) is not None:
        folder._finalizer.detach()
    from fathom.runtime import metric_files  # imports what reads the folder's name, which is known by now

    metric_files.install()
    quiet.guard_log()
    if server_args.log_level == "warning":
        quiet.hush_loggers()


def run_scheduler_process(server_args: Any, *args: Any, **kwargs: Any) -> None:
    """Fathom's scheduler process. Arguments as ``process.run_scheduler_process``."""
    _prepare(server_args)
    process.run_scheduler_process(server_args, *args, **kwargs)
    ending.leave(0)


def run_detokenizer_process(server_args: Any, *args: Any, **kwargs: Any) -> None:
    """SGLang's detokenizer process. Arguments as SGLang's function of this name."""
    _prepare(server_args)
    process.run_detokenizer_process(server_args, *args, **kwargs)
    ending.leave(0)
