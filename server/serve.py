"""``fathom serve``: from a command line to a running server."""

import contextlib
import io
import os
import signal
import sys
import traceback
from dataclasses import replace
from typing import Any, NoReturn
from urllib.parse import urlsplit

from fathom.runtime import config
from fathom.runtime.plan import PlanError
from fathom.runtime.sglang_host import imports
from fathom.runtime.sglang_host.options import EngineOptions
from fathom.server import ending, quiet
from fathom.server.command import checks, command_line, cpu_quota, depth_pages, flags, memory_flags, quantized
from fathom.server.command.checks import StartError
from fathom.server.command.command_line import Plan
from fathom.server.command.profile import limits_of
from fathom.server.requests.context import Face

KEEP_ALIVE = ("SGLANG_TIMEOUT_KEEP_ALIVE", "75")
"""Seconds after which an idle connection is closed, unless the operator says otherwise. A request that meets a
closing connection is lost: clients (5 s is usual) and load balancers (60 s) have to be first. SGLang has 5."""
ONEDNN_CACHES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
"""How many matrix products oneDNN and PyTorch's layer above it keep ready, one for each matrix and number of rows:
1,024 each, which prompts of ever new lengths fill with hundreds of MiB that leave the heap in pieces. To make one
again takes about a millisecond."""
PRODUCTS_KEPT = "128"
KILLED = {
    signal.SIGKILL: (
        "most often the memory of the machine or the container is too small; give it more, or on a CPU a smaller "
        "KV pool (--max-total-tokens)"
    ),
    signal.SIGABRT: (
        "its own report is above; `Resource temporarily unavailable` there means that the limit of processes and "
        "threads (ulimit -u, docker --pids-limit) is too low"
    ),
    signal.SIGBUS: (
        "most often a file in memory found no room; make /dev/shm larger (docker --shm-size, the chart's "
        "sharedMemory)"
    ),
}
"""By the signal that ended an engine process before the server was ready: why, and what to do."""
DIAGNOSES = ("SGLANG_PYSPY_DUMP_BEFORE_CRASH", "SGLANG_CUDA_COREDUMP_BEFORE_CRASH")
"""What SGLang does with the engine processes that are left when one has failed, or at SIGTERM after a failed health
check: 65 s and more in which the HTTP process does nothing else, SIGTERM included. Off, unless the operator says
otherwise."""


def main(argv: list[str]) -> NoReturn:
    """Serve until stopped, then end the process.

    Args:
        argv: arguments after ``fathom serve``.

    Raises:
        StartError: for what keeps the server from starting.
    """
    work = command_line.plan(argv)
    checks.check_model(work.model)
    work.files.check(work.model, work.draft, work.name)
    checks.check_port(work.host, work.port)
    ending.end_when_told()
    depth_pages.choose(work.gpu_depth_pages)
    cpu_quota.limit_threads()
    try:
        with imports.uncollected():
            work, server_args = _load(work)
    except OSError as error:  # as PyTorch raises it while it is imported
        if work.verbose:
            traceback.print_exc()
        hint = "the folders for caches (HOME) and temporary files (TMPDIR) must be writable"
        raise StartError(f"{checks.one_line(error)}; {hint}", checks.FAILURE) from error
    _run(work, server_args)


def _load(work: Plan) -> tuple[Plan, Any]:
    """Import SGLang, and check with it what could not be checked before.

    Returns:
        The plan as it fits the machine, and SGLang's ``ServerArgs``.

    Raises:
        StartError: for what keeps the server from starting.
    """
    # Before anything imports torchvision; needs PyTorch, so not before the checks above.
    from fathom.runtime.sglang_host.machine import torchvision_ops

    torchvision_ops.declare()
    if reason := depth_pages.why_not(work.gpu_depth_pages):
        print(f"Fathom serves every request dense, by SGLang's own path: {reason}", flush=True)
        if work.of_pages:
            need = "needs" if len(work.of_pages) == 1 else "need"
            raise StartError(
                f"{', '.join(work.of_pages)} {need} KV in depth pages, and there are none: {reason}"
            )
    work = _with_fitting_draft(work)
    print(f"Fathom is loading {work.name} ...", flush=True)
    if not work.verbose:
        quiet.hush_server()
    _verify_seams()
    draft_flags = [] if work.draft is None else ["--speculative-draft-model-path", work.draft]
    server_args = _server_args([*work.engine_flags, *draft_flags], work.engine)
    for refuse in (
        checks.refuse_bypass,
        checks.refuse_odd_keys,
        checks.refuse_numbers,
        checks.refuse_metrics,
    ):
        refuse(server_args)
    work.face.look_at(server_args)
    return replace(work, engine=_learn_limits(work, server_args)), server_args


def _with_fitting_draft(work: Plan) -> Plan:
    """The plan; without the demo's draft on a machine whose KV is not in depth pages.

    Raises:
        StartError: for a draft that does not fit the model.
    """
    if work.draft is None:
        return work
    if depth_pages.why_not(work.gpu_depth_pages):
        print("Fathom leaves out the demo's draft model", flush=True)
        return replace(work, draft=None)
    checks.check_draft(work.model, work.draft, work.reading)
    return work


def _verify_seams() -> None:
    from fathom.runtime.sglang_host.seams import seams

    try:
        seams.verify("server")
    except seams.SeamError as error:
        raise StartError(str(error), checks.SEAM) from None


def _server_args(words: list[str], options: EngineOptions) -> Any:
    """SGLang's parsed arguments; its parser's pages of usage are cut down to what was wrong."""
    from fathom.runtime.sglang_host import engine_args
    from fathom.runtime.sglang_host.draft import draft_config
    from fathom.runtime.sglang_host.models import language_models
    from fathom.runtime.sglang_host.reports import redact

    language_models.install()
    draft_config.install()
    checks.refuse_abbreviations(words, engine_args.options())
    captured = io.StringIO()
    try:
        with contextlib.redirect_stderr(captured):
            args = engine_args.build(words, options.depth_span, options.shallow_factor)
        args._launch_command = redact.command(words)
        return args
    except SystemExit:
        lines = captured.getvalue().strip().splitlines() or ["SGLang refused the options"]
        raise StartError(lines[-1].split("error: ", 1)[-1]) from None
    except Exception as error:
        model = words[words.index("--model-path") + 1]
        raise StartError(quantized.why_unknown(error, model) or checks.one_line(error)) from error


def _learn_limits(work: Plan, server_args: Any) -> EngineOptions:
    """Tell the face what the model allows, before anything is started; the engine adds what it lacks when it is up.

    Returns:
        The engine's options, with what follows from the model.
    """
    drafted, options = work.draft is not None, work.engine
    model, *others = checks.described(server_args, drafted)
    checks.refuse_preferred(server_args.preferred_sampling_params, model.vocab_size)
    for each in (model, *others):
        depth_pages.refuse_model(each, server_args.tp_size)
        quantized.refuse_model(each, server_args.load_format)
    buffer = work.propagation_buffer
    if buffer is None:
        buffer = min(memory_flags.DEFAULT_PROPAGATION_BUFFER, model.context_len)
    try:
        asked = options.depth_span, work.tsp_layer, work.profile
        limits = limits_of(model.num_hidden_layers, *asked, drafted, options.sfi.config.selected)
        work.face.learn(limits)
    except PlanError as error:
        raise StartError(str(error)) from None
    except config.PolicyError as error:
        raise StartError(flags.as_flag(error)) from None
    return replace(options, tsp_layer=limits.tsp_layer or None, propagation_buffer=buffer)


def _run(work: Plan, server_args: Any) -> NoReturn:
    from fathom.server.app import launch

    def ready(engine: dict[str, Any]) -> None:
        _verify_engine(engine)
        _learn_lacking(work.face, engine["fathom"])
        work.face.packed_weights = bool(engine["fathom"]["packed_weights"])
        print(
            f"Fathom is ready: {server_args.url()} (model {work.name}, {_of_draft(engine['fathom'])}"
            f"policy {_of_policy(work.face.choice)})",
            flush=True,
        )

    _reach_itself(server_args.url())
    os.environ.setdefault(*KEEP_ALIVE)
    for name in ONEDNN_CACHES:
        os.environ.setdefault(name, PRODUCTS_KEPT)
    for name in DIAGNOSES:
        os.environ.setdefault(name, "0")
    try:
        launch(server_args, work.face, work.gate, work.engine, ready)
    except (Exception, SystemExit) as failure:
        if work.verbose:
            traceback.print_exc()
        error = _engine_error(failure)
        print(f"fathom serve: error: {error}", file=sys.stderr)
        ending.hint()
        ending.end(error.code)
    finally:
        ending.stop_children()
    ending.leave(0)


def _reach_itself(url: str) -> None:
    """Let SGLang's warm-up, which asks this server by HTTP, pass by the proxies that the environment names."""
    others = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
    if others.strip() != "*":
        host = urlsplit(url).hostname
        os.environ["no_proxy"] = os.environ["NO_PROXY"] = ",".join(filter(None, (others, host)))


def _of_draft(report: dict[str, Any]) -> str:
    """The draft model and the memory that its KV takes, for the line that says what is served."""
    if (draft := report.get("draft")) is None:
        return ""
    return f"draft {os.path.basename(draft['model'])} with {draft['kv_bytes'] / 2**20:.0f} MiB of KV, "


def _of_policy(choice: config.Choice) -> str:
    """The default policy's name, and what its preset has to leave out, for the same line."""
    without = ", ".join(choice.left_out)
    return choice.policy.preset + (f"; its preset without {without}" if without else "")


def _verify_engine(first_report: dict[str, Any]) -> None:
    """End everything unless the engine process reported Fathom's scheduler when it started."""
    from fathom.runtime.sglang_host.seams import seams

    try:
        seams.verify_scheduler_report(first_report.get("fathom"))
    except seams.SeamError as error:
        print(f"fathom serve: error: {error}", file=sys.stderr, flush=True)
        ending.end(checks.SEAM)


def _learn_lacking(face: Face, report: dict[str, Any]) -> None:
    """What the engine's own report says it cannot do; end everything if the default policy asks for that."""
    try:
        face.learn(replace(face.limits, lacking=report.get("lacking", {})))
    except config.PolicyError as error:
        print(f"fathom serve: error: {flags.as_flag(error)}", file=sys.stderr, flush=True)
        ending.end(checks.USAGE)


def _engine_error(error: BaseException) -> StartError:
    if isinstance(error, SystemExit):  # uvicorn's
        return StartError("the HTTP server did not start; its own report is above", checks.FAILURE)
    message = checks.one_line(error)
    if f"exit code: {checks.SEAM}" in message:
        return StartError("an engine process refused this SGLang; its reason is above", checks.SEAM)
    for number, reason in KILLED.items():
        if f"exit code: {-number})" in message:
            message = f"an engine process was ended ({number.name}) while it started: {reason}"
    return StartError(message, checks.FAILURE)
