"""``fathom serve``: from a command line to a running server."""

import argparse
import contextlib
import io
import os
import sys
import traceback
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import urlsplit

from fathom.runtime import config
from fathom.runtime.plan import PlanError
from fathom.runtime.sfi import options as sfi_options
from fathom.runtime.sglang_host import imports
from fathom.runtime.sglang_host.options import EngineOptions
from fathom.server import (
    admission,
    checks,
    config_file,
    cpu_quota,
    depth_pages,
    ending,
    flags,
    memory_flags,
    quiet,
)
from fathom.server.admission import Gate
from fathom.server.checks import StartError
from fathom.server.context import Face
from fathom.server.profile import limits_of

DEFAULT_HOST, DEFAULT_PORT = "127.0.0.1", 30000
ENGINE_DEFAULTS = {"--served-model-name": None, "--log-level": "warning"}
MODEL_OPTIONS = ("--model-path", "--model", "--demo")
SGLANGS_DRAFT = ("--speculative-draft-model-path", "--speculative-draft-model")
DRAFT_OPTIONS = ("--draft-model-path", *SGLANGS_DRAFT)
DEMO_NAME = "fathom-demo"
DEMO_TUNINGS = {"min_prompt_tokens": 256}
"""The demo's documents are short; its draft was trained on their like."""
DEMO_FLAGS = ("--constrained-json-disable-any-whitespace",)
"""Where JSON may have blanks, the demo model writes nothing else, to the end of the context."""
KEEP_ALIVE = ("SGLANG_TIMEOUT_KEEP_ALIVE", "75")
"""Seconds after which an idle connection is closed, unless the operator says otherwise. A request that meets a
closing connection is lost: clients (5 s is usual) and load balancers (60 s) have to be first. SGLang has 5."""
ONEDNN_CACHES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
"""How many matrix products oneDNN and PyTorch's layer above it keep ready, one for each matrix and number of rows:
1,024 each, which prompts of ever new lengths fill with hundreds of MiB that leave the heap in pieces. To make one
again takes about a millisecond."""
PRODUCTS_KEPT = "128"
DIAGNOSES = ("SGLANG_PYSPY_DUMP_BEFORE_CRASH", "SGLANG_CUDA_COREDUMP_BEFORE_CRASH")
"""What SGLang does with the engine processes that are left when one has failed, or at SIGTERM after a failed health
check: 65 s and more in which the HTTP process does nothing else, SIGTERM included. Off, unless the operator says
otherwise."""

DESCRIPTION = """Serve a model over HTTP: the OpenAI and Anthropic routes, SGLang's own, and /fathom/info.

Every other option is passed on to SGLang: --tp-size, --context-length, --api-key, ... (sglang serve --help).
"""


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        """Exit with status 2 and the message."""
        self.exit(checks.USAGE, f"{self.prog}: error: {message}\n")


@dataclass(frozen=True)
class Plan:
    """A checked command line.

    Attributes:
        model: model folder, file or repository.
        name: name under which it is served.
        host, port: where to listen.
        draft: draft model, or None.
        draft_given: whether the operator named it; the demo's own can be left out.
        engine_flags: SGLang's flags, the draft's left out.
        face: policy and limits of the HTTP side.
        gate: how many requests are let in, and how long the last ones may take.
        engine: options of the engine's processes, beside SGLang's; without what follows from the model.
        tsp_layer: layers below FastKV's selection that the operator asked for, or None for the nearest to L / 2.
        propagation_buffer: longest prompt, in tokens, that FastKV may propagate; None for the default.
        profile: file of what was measured for the model, or None.
        verbose: whether to show tracebacks.
        reading: where the vocabularies of the model and its draft are read from.
        gpu_depth_pages: whether depth pages are wanted on a GPU; None for any that takes them.
    """

    model: str
    name: str
    host: str
    port: int
    draft: str | None
    draft_given: bool
    engine_flags: list[str]
    face: Face
    gate: Gate
    engine: EngineOptions
    tsp_layer: int | None
    propagation_buffer: int | None
    profile: Path | None
    verbose: bool
    reading: checks.Reading
    gpu_depth_pages: bool | None = None


def parser() -> Parser:
    """The options that are Fathom's own."""
    result = Parser(
        prog="fathom serve",
        usage="fathom serve [MODEL] [options] [SGLang's options]",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    result.add_argument(
        "--config",
        action="append",
        metavar="FILE",
        help="YAML mapping of options, these and SGLang's (preset: balanced); the command line wins over it",
    )
    model = result.add_argument_group("model")
    model.add_argument("--model-path", "--model", metavar="MODEL", help="folder, or name on Hugging Face")
    model.add_argument("--demo", action="store_true", help="serve the small model that comes with Fathom")
    model.add_argument(
        "--draft-model-path",
        metavar="MODEL",
        help="draft model, with the same vocabulary; it needs KV in depth pages",
    )
    model.add_argument(
        "--draft-cost",
        type=float,
        metavar="SHARE",
        help="time of a decode step of the draft as a share of the model's: where too little is accepted to make "
        "up for it, drafting rests (default: estimated from layers and weights)",
    )
    network = result.add_argument_group("network")
    network.add_argument("--host", help=f"address to listen on (default: {DEFAULT_HOST})")
    network.add_argument("--port", type=int, help=f"port (default: {DEFAULT_PORT})")
    network.add_argument(
        "--max-body-mib",
        type=int,
        default=admission.DEFAULT_MAX_BODY_BYTES >> 20,
        metavar="MIB",
        help="largest request body, in MiB; a larger one is answered with 413 (default: %(default)s)",
    )
    network.add_argument(
        "--max-in-flight",
        type=int,
        default=admission.DEFAULT_MAX_IN_FLIGHT,
        metavar="N",
        help="most generation requests inside the server; one more is answered with 503 (default: %(default)s)",
    )
    network.add_argument(
        "--drain-seconds",
        type=float,
        default=admission.DEFAULT_DRAIN_SECONDS,
        metavar="S",
        help="how long running requests may take after SIGTERM (default: %(default)s)",
    )
    network.add_argument(
        "--client-timeout",
        type=float,
        default=admission.DEFAULT_CLIENT_SECONDS,
        metavar="S",
        help="how long a client may send nothing of a request that it has begun, or read nothing of a stream that "
        "fills all buffers, before it counts as gone (default: %(default)s)",
    )
    memory_flags.add_arguments(result)
    flags.add_arguments(result)
    sfi_options.add_arguments(result)
    return result


def _engine_parser() -> Parser:
    """The options of SGLang that are looked at before SGLang is loaded."""
    result = Parser(prog="fathom serve", add_help=False, allow_abbrev=False)
    result.add_argument(*SGLANGS_DRAFT)
    result.add_argument("--served-model-name")
    checks.add_options(result)
    return result


def plan(argv: list[str]) -> Plan:
    """Check a command line as far as that is possible without SGLang.

    Raises:
        StartError: for a model that cannot be chosen, a refused option, or an illegal policy.
        SystemExit: from the parser.
    """
    positional = argv[0] if argv and not argv[0].startswith("-") else None
    words = argv[1:] if positional else argv
    own, passed_on = parser().parse_known_args(words)
    models = _models(own, positional)
    if own.config is not None:
        if len(own.config) > 1:
            raise StartError("give only one --config")
        drafted = _draft(own, _engine_parser().parse_known_args(passed_on)[0]) is not None
        given = (*(MODEL_OPTIONS if models else ()), *(DRAFT_OPTIONS if drafted else ()))
        in_file = config_file.words(own.config[0], given)
        own, passed_on = parser().parse_known_args([*in_file, *words])
        models = models or _models(own)
    engine, _ = _engine_parser().parse_known_args(passed_on)
    checks.refuse_bypass(engine)
    if error := memory_flags.problem(own) or _problem(own):
        raise StartError(error)
    try:
        asked = flags.asked_by(own)
        sfi = sfi_options.from_arguments(own)
    except ValueError as error:
        raise StartError(str(error)) from None
    if len(models) != 1:
        problem = "give a model" if not models else "give only one model"
        raise StartError(f"{problem}: MODEL as the first word, --model-path MODEL, or --demo")
    model = str(checks.demo_model()) if own.demo else models[0]
    name = engine.served_model_name or (DEMO_NAME if own.demo else model)
    host = own.host or DEFAULT_HOST
    port = own.port if own.port is not None else DEFAULT_PORT
    if not 1 <= port <= 65535:
        raise StartError(f"--port must be in [1, 65535], got {port}")
    draft = _draft(own, engine)
    fixed = ["--model-path", model, "--host", host, "--port", str(port)]
    return Plan(
        model=model,
        name=name,
        host=host,
        port=port,
        draft=draft or (str(checks.demo_model("draft")) if own.demo else None),
        draft_given=draft is not None,
        engine_flags=[*fixed, *passed_on, *_missing(engine, name), *(DEMO_FLAGS if own.demo else ())],
        face=Face(asked=asked, tunings=flags.tunings_of(own, DEMO_TUNINGS if own.demo else None)),
        gate=Gate(
            own.max_in_flight, own.drain_seconds, own.max_body_mib << 20, client_seconds=own.client_timeout
        ),
        engine=EngineOptions(
            depth_span=own.depth_span,
            shallow_factor=own.shallow_factor,
            sfi=sfi,
            draft_cost=own.draft_cost,
            gpu_prefill=own.gpu_prefill_attention,
        ),
        tsp_layer=own.tsp_layer,
        propagation_buffer=own.propagation_buffer,
        profile=own.profile,
        verbose=engine.log_level == "debug",
        reading=checks.Reading.given(engine),
        gpu_depth_pages=own.gpu_depth_pages,
    )


def _problem(own: argparse.Namespace) -> str:
    """What is wrong with other numbers than those of :mod:`memory_flags`; "" where nothing is."""
    if own.draft_cost is not None and not 0 <= own.draft_cost <= 1:
        return f"--draft-cost must be in [0, 1], got {own.draft_cost:g}"
    for flag, value in (("--max-body-mib", own.max_body_mib), ("--max-in-flight", own.max_in_flight)):
        if value < 1:
            return f"{flag} must be at least 1, got {value}"
    if not 0 <= own.drain_seconds < float("inf"):
        return f"--drain-seconds must be at least 0, got {own.drain_seconds:g}"
    if not 0 < own.client_timeout < float("inf"):
        return f"--client-timeout must be above 0, got {own.client_timeout:g}"
    return ""


def _models(own: argparse.Namespace, positional: str | None = None) -> list[Any]:
    """The models that are named, which should be one."""
    return [value for value in (positional, own.model_path, own.demo or None) if value is not None]


def _draft(own: argparse.Namespace, engine: argparse.Namespace) -> str | None:
    """The draft model that is named, by our name for the option or by SGLang's.

    Raises:
        StartError: when both names are used.
    """
    given = [value for value in (own.draft_model_path, engine.speculative_draft_model_path) if value]
    if len(given) > 1:
        raise StartError("give --draft-model-path or --speculative-draft-model-path, not both")
    return given[0] if given else None


def _missing(engine: argparse.Namespace, name: str) -> list[str]:
    """SGLang's flags for our defaults, where the operator said nothing else."""
    result = ["--enable-metrics"]
    for flag, value in ENGINE_DEFAULTS.items():
        if getattr(engine, flag.removeprefix("--").replace("-", "_")) is None:
            result += [flag, value or name]
    return result


def main(argv: list[str]) -> NoReturn:
    """Serve until stopped, then end the process.

    Args:
        argv: arguments after ``fathom serve``.

    Raises:
        StartError: for what keeps the server from starting.
    """
    work = plan(argv)
    checks.check_model(work.model)
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
    from fathom.runtime.sglang_host import torchvision_ops

    torchvision_ops.declare()
    if reason := depth_pages.why_not(work.gpu_depth_pages):
        print(f"Fathom serves every request dense, by SGLang's own path: {reason}", flush=True)
    work = _with_fitting_draft(work)
    print(f"Fathom is loading {work.name} ...", flush=True)
    if not work.verbose:
        quiet.hush_server()
    _verify_seams()
    draft_flags = [] if work.draft is None else ["--speculative-draft-model-path", work.draft]
    server_args = _server_args([*work.engine_flags, *draft_flags], work.engine)
    for refuse in (checks.refuse_bypass, checks.refuse_odd_keys, checks.refuse_numbers):
        refuse(server_args)
    work.face.completes_middles = server_args.completion_template is not None
    return replace(work, engine=_learn_limits(work, server_args)), server_args


def _with_fitting_draft(work: Plan) -> Plan:
    """The plan; without the demo's draft on a machine whose KV is not in depth pages.

    Raises:
        StartError: for a draft that the operator named and that cannot be had, or does not fit the model.
    """
    if work.draft is None:
        return work
    if reason := depth_pages.why_not(work.gpu_depth_pages):
        if work.draft_given:
            raise StartError(f"--draft-model-path needs KV in depth pages, and there are none: {reason}")
        print("Fathom leaves out the demo's draft model", flush=True)
        return replace(work, draft=None)
    checks.check_draft(work.model, work.draft, work.reading)
    return work


def _verify_seams() -> None:
    from fathom.runtime.sglang_host import seams

    try:
        seams.verify("server")
    except seams.SeamError as error:
        raise StartError(str(error), checks.SEAM) from None


def _server_args(words: list[str], options: EngineOptions) -> Any:
    """SGLang's parsed arguments; its parser's pages of usage are cut down to what was wrong."""
    from fathom.runtime.sglang_host import engine_args, redact, rope_overrides

    rope_overrides.install()
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
        raise StartError(checks.one_line(error)) from error


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
    from fathom.runtime.sglang_host import seams

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
    return StartError(message, checks.FAILURE)
