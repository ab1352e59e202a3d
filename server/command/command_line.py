"""The command line of ``fathom serve``, checked as far as that is possible without SGLang."""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from fathom.runtime.sfi import options as sfi_options
from fathom.runtime.sglang_host.options import AUTO, SHORT_PROMPT_SHARE, EngineOptions
from fathom.server.command import checks, config_file, flags, memory_flags
from fathom.server.command.checks import StartError
from fathom.server.command.files import Files
from fathom.server.requests import admission
from fathom.server.requests.admission import Gate
from fathom.server.requests.context import Face

DEFAULT_HOST, DEFAULT_PORT = "127.0.0.1", 30000
ENGINE_DEFAULTS = {
    "--served-model-name": None,
    "--log-level": "warning",
    # SGLang lets those who have a place among the adapters of a batch keep it for ever.
    "--lora-drain-wait-threshold": "2",
}
MODEL_OPTIONS = ("--model-path", "--model", "--demo")
SGLANGS_DRAFT = ("--speculative-draft-model-path", "--speculative-draft-model")
DRAFT_OPTIONS = ("--draft-model-path", *SGLANGS_DRAFT)
OF_PAGES = (
    *("depth_span", "shallow_factor", "tsp_layer", "propagation_buffer", "profile"),
    *("draft_cost", "short_prompt_share", "gpu_prefill_attention"),
)
"""Options, besides those of slow-fast decoding, that nothing heeds where KV is not in depth pages."""
DEMO_NAME = "fathom-demo"
DEMO_TUNINGS = {"min_prompt_tokens": 256}
"""The demo's documents are short; its draft was trained on their like."""
DEMO_FLAGS = ("--constrained-json-disable-any-whitespace",)
"""Where JSON may have blanks, the demo model writes nothing else, to the end of the context."""

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
        draft: draft model, or None; where the operator named none, the demo's own, which can be left out.
        engine_flags: SGLang's flags, the draft's left out.
        face: policy and limits of the HTTP side.
        gate: how many requests are let in, and how long the last ones may take.
        engine: options of the engine's processes, beside SGLang's; without what follows from the model.
        tsp_layer: layers below FastKV's selection that the operator asked for, or None for the nearest to L / 2.
        propagation_buffer: longest prompt, in tokens, that FastKV may propagate; None for the default.
        profile: file of what was measured for the model, or None.
        verbose: whether to show tracebacks.
        reading: where the vocabularies of the model and its draft are read from.
        files: that SGLang's options name.
        gpu_depth_pages: whether depth pages are wanted on a GPU; None for any that takes them.
        of_pages: options that were given and that nothing but depth pages heeds.
    """

    model: str
    name: str
    host: str
    port: int
    draft: str | None
    engine_flags: list[str]
    face: Face
    gate: Gate
    engine: EngineOptions
    tsp_layer: int | None
    propagation_buffer: int | None
    profile: Path | None
    verbose: bool
    reading: checks.Reading
    files: Files
    gpu_depth_pages: bool | None = None
    of_pages: tuple[str, ...] = ()


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
    work = result.add_argument_group("prompts")
    work.add_argument(
        "--short-prompt-share",
        type=float,
        metavar="SHARE",
        help="of each chunk of a long prompt, at most, for short prompts that come meanwhile, which otherwise wait "
        f"for its last one (default: {SHORT_PROMPT_SHARE}; 0: none)",
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
    result.add_argument("--lora-drain-wait-threshold")
    checks.add_options(result)
    Files.add_arguments(result)
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
            short_prompt_share=SHORT_PROMPT_SHARE
            if own.short_prompt_share is None
            else own.short_prompt_share,
            gpu_prefill=own.gpu_prefill_attention,
        ),
        tsp_layer=own.tsp_layer,
        propagation_buffer=own.propagation_buffer,
        profile=own.profile,
        verbose=engine.log_level == "debug",
        reading=checks.Reading.given(engine),
        files=Files.given(engine),
        gpu_depth_pages=own.gpu_depth_pages,
        of_pages=(*(["--draft-model-path"] if draft else []), *_of_pages(own)),
    )


def _problem(own: argparse.Namespace) -> str:
    """What is wrong with other numbers than those of :mod:`memory_flags`; "" where nothing is."""
    if own.draft_cost is not None and not 0 <= own.draft_cost <= 1:
        return f"--draft-cost must be in [0, 1], got {own.draft_cost:g}"
    if (share := own.short_prompt_share) is not None and not 0 <= share <= 0.9:
        return f"--short-prompt-share must be in [0, 0.9], got {share:g}"
    for flag, value in (("--max-body-mib", own.max_body_mib), ("--max-in-flight", own.max_in_flight)):
        if value < 1:
            return f"{flag} must be at least 1, got {value}"
    if not 0 <= own.drain_seconds < float("inf"):
        return f"--drain-seconds must be at least 0, got {own.drain_seconds:g}"
    if not 0 < own.client_timeout < float("inf"):
        return f"--client-timeout must be above 0, got {own.client_timeout:g}"
    return ""


def _of_pages(own: argparse.Namespace) -> Iterator[str]:
    """The options that are given and that only depth pages heed, but for the draft and the policy's fields."""
    for name in (*OF_PAGES, *sfi_options.NAMES):
        if (value := getattr(own, name)) is not None and (name, value) != ("gpu_prefill_attention", AUTO):
            yield f"--{name.replace('_', '-')} {value}"


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
    result = ["--enable-metrics", "--enable-cache-report"]
    for flag, value in ENGINE_DEFAULTS.items():
        if getattr(engine, flag.removeprefix("--").replace("-", "_")) is None:
            result += [flag, value or name]
    return result
