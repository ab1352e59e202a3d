"""What is checked before a model is loaded, so that a mistake costs a second and one line."""

import argparse
import errno
import json
import os
import re
import socket
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, fields
from importlib.util import find_spec
from itertools import pairwise
from math import isfinite
from pathlib import Path
from typing import Any

from fathom.server.units import json_object

USAGE, FAILURE, SEAM = 2, 1, 3
"""Exit codes: a wrong command line, a server that could not start, an SGLang that is not as we know it."""


class StartError(Exception):
    """A reason not to start, in one line.

    Attributes:
        code: the process's exit code.
    """

    def __init__(self, message: str, code: int = USAGE):
        super().__init__(message)
        self.code = code


def one_line(error: BaseException) -> str:
    """An error's first line; where that only announces a list, all of them."""
    lines = [line.strip() for line in str(error).strip().splitlines()]
    if lines and lines[0].endswith(":"):
        return " ".join(filter(None, lines))
    return lines[0] if lines else type(error).__name__


@dataclass(frozen=True)
class Refusal:
    """An option of SGLang that would serve requests past Fathom's layer.

    Attributes:
        flag: the option.
        kind: type of its value; bool for a switch.
        refused: whether a value of it is refused.
        reason: what would go wrong.
    """

    flag: str
    kind: type
    refused: Callable[[Any], bool]
    reason: str

    @property
    def name(self) -> str:
        """The option's name among SGLang's server arguments."""
        return self.flag.removeprefix("--").replace("-", "_")


def installed(*modules: str) -> bool:
    """Whether all of these modules can be imported; none is, but for those that they are in."""
    try:
        return all(find_spec(module) is not None for module in modules)
    except (ImportError, ValueError):
        return False


_GRPC = "requests over gRPC cannot carry a policy, and their answers could not say what was done"
_SPECULATION = "SGLang's own speculation replaces the worker that runs Fathom's step"

REFUSALS = (
    Refusal(
        "--tokenizer-worker-num", int, lambda n: n > 1, "further HTTP workers run without Fathom's middleware"
    ),
    Refusal("--grpc-mode", bool, bool, _GRPC),
    Refusal("--smg-grpc-mode", bool, bool, _GRPC),
    Refusal("--grpc-port", int, bool, _GRPC),
    Refusal(
        "--enable-http2", bool, bool, "SGLang's HTTP/2 server is not covered by Fathom's shutdown and tests"
    ),
    Refusal(
        "--disaggregation-mode",
        str,
        lambda mode: mode != "null",
        "Fathom's step needs prefill and decode together",
    ),
    Refusal("--enable-pdmux", bool, bool, "SGLang then runs prompts through the model past Fathom's step"),
    Refusal(
        "--detokenizer-worker-num",
        int,
        lambda n: n > 1,
        "several need several HTTP workers, which run without Fathom's middleware",
    ),
    Refusal("--encoder-only", bool, bool, "an encoder server does not run Fathom's scheduler"),
    Refusal("--use-ray", bool, bool, "Ray starts SGLang's own scheduler processes in place of Fathom's"),
    Refusal("--speculative-algorithm", str, bool, _SPECULATION),
    Refusal("--speculative-token-map", str, bool, _SPECULATION),
    Refusal(
        "--enable-trace",
        bool,
        lambda asked: asked and not installed("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.grpc"),
        "it needs the packages opentelemetry-sdk and opentelemetry-exporter-otlp, which are not installed",
    ),
    Refusal(
        "--tool-server",
        str,
        lambda server: server != "demo" and not installed("mcp"),
        "tools of other servers need the package mcp, which is not installed",
    ),
)

REFUSED_ENVIRONMENT = {
    "SGLANG_RUST_SERVER": "SGLang's Rust server replaces the HTTP process that Fathom extends",
    "SGLANG_GRPC_PORT": _GRPC,
}

JSON_OBJECTS = "--json-model-override-args", "--model-loader-extra-config"
"""SGLang reads them where nothing tells any more which option is meant."""

CPU_ENGINE = "SGLANG_USE_CPU_ENGINE"


def add_refused(parser: argparse.ArgumentParser) -> None:
    """Let ``parser`` recognise the refused options; their names are absent where they are not given."""
    for refusal in REFUSALS:
        switch = {"action": "store_true"} if refusal.kind is bool else {"type": refusal.kind}
        parser.add_argument(refusal.flag, dest=refusal.name, default=argparse.SUPPRESS, **switch)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Let ``parser`` recognise SGLang's options that are looked at in this module."""
    add_refused(parser)
    Reading.add_arguments(parser)
    levels = "critical", "error", "warning", "info", "debug"
    parser.add_argument("--log-level", choices=levels)
    parser.add_argument("--log-level-http", choices=(*levels, "trace"))
    for flag in JSON_OBJECTS:
        parser.add_argument(flag, type=json_object)


def refuse_bypass(arguments: object, environment: Mapping[str, str] = os.environ) -> None:
    """Refuse options and environment variables that would leave Fathom out.

    Args:
        arguments: anything with the options as attributes: parsed flags, or SGLang's server arguments.
        environment: environment variables.

    Raises:
        StartError: naming the option and the reason.
    """
    for refusal in REFUSALS:
        value = getattr(arguments, refusal.name, None)
        if isinstance(value, refusal.kind) and refusal.refused(value):
            shown = refusal.flag if value is True else f"{refusal.flag} {value}"
            raise StartError(f"{shown} is not supported: {refusal.reason}")
    for name, reason in REFUSED_ENVIRONMENT.items():
        if environment.get(name, "").lower() not in ("", "0", "false", "no", "n"):
            raise StartError(f"the environment variable {name} is not supported: {reason}")
    if environment.get(CPU_ENGINE) == "1" and find_spec("sgl_kernel") is None:
        raise StartError(
            f"the environment variable {CPU_ENGINE} asks for SGLang's own kernels for CPUs (sgl_kernel), which are "
            "not installed; Fathom needs none of them: leave it unset"
        )


def refuse_abbreviations(words: Iterable[str], options: Collection[str]) -> None:
    """Refuse the beginning of an option, which SGLang would take for it and Fathom would not see.

    Args:
        words: a command line; options: all that there are.

    Raises:
        StartError: naming the word and the options that it could be.
    """
    for word in words:
        flag = word.partition("=")[0]
        if not flag.startswith("--") or flag == "--" or flag in options:
            continue
        if meant := sorted(option for option in options if option.startswith(flag)):
            raise StartError(f"{flag} is no option; did you mean {' or '.join(meant[:4])}?")


LEAST = {
    "--decode-log-interval": 1,
    "--max-lora-rank": 1,
    "--max-queued-requests": 1,
    "--max-running-requests": 1,
    "--prefill-max-requests": 1,
    "--stream-interval": 1,
}
"""Numbers of SGLang with which it would start and answer nothing, or end at a request."""


def refuse_numbers(arguments: Any) -> None:
    """Refuse numbers with which a server answers nothing.

    Raises:
        StartError: naming the option.
    """
    for flag, least in LEAST.items():
        value = getattr(arguments, flag.removeprefix("--").replace("-", "_"))
        if value is not None and value < least:
            raise StartError(f"{flag} must be at least {least}, got {value}")
    if not 0 <= arguments.node_rank < arguments.nnodes:
        # It would wait for others for ever.
        raise StartError(f"--node-rank must be in [0, {arguments.nnodes - 1}], got {arguments.node_rank}")


BUCKETS = "--bucket-time-to-first-token", "--bucket-inter-token-latency", "--bucket-e2e-request-latency"
SGLANGS_LABELS = "model_name", "engine_type", "priority", "le"


def refuse_metrics(arguments: Any) -> None:
    """Refuse buckets and labels with which there are no metrics, or with which clients write over SGLang's labels.

    Raises:
        StartError: naming the option.
    """
    for flag in BUCKETS:
        given = getattr(arguments, flag.removeprefix("--").replace("-", "_"))
        if given is not None and not (
            given and all(low < high for low, high in pairwise([0.0, *given])) and isfinite(given[-1])
        ):
            shown = " ".join(f"{bound:g}" for bound in given)
            raise StartError(
                f"{flag} must be one or more ascending numbers of seconds above 0, got {shown or 'none'}"
            )
    for name in arguments.tokenizer_metrics_allowed_custom_labels or ():
        if not re.fullmatch(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]*", name) or name in SGLANGS_LABELS:
            raise StartError(
                "--tokenizer-metrics-allowed-custom-labels must be names of letters, digits and underscores, and "
                f"none of {', '.join(SGLANGS_LABELS)}, got {name}"
            )


def refuse_preferred(given: Any, vocabulary: int) -> None:
    """Refuse ``--preferred-sampling-params`` that no request could have.

    Raises:
        StartError: naming what is wrong.
    """
    from fathom.server.requests import bounds

    if given is not None:
        try:
            bounds.check_preferred(given, vocabulary)
        except ValueError as error:
            raise StartError(f"--preferred-sampling-params: {error}") from None


def refuse_odd_keys(arguments: Any) -> None:
    """Refuse keys that no request can bring: headers are compared as ASCII.

    Raises:
        StartError: naming the option.
    """
    for flag, key in (("--api-key", arguments.api_key), ("--admin-api-key", arguments.admin_api_key)):
        if key is not None and not key.isascii():
            raise StartError(f"{flag} must be of ASCII characters")


def check_port(host: str, port: int) -> None:
    """See that the address can be listened on.

    Raises:
        StartError: when it cannot, with the reason.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror:
        raise StartError(f"--host {host} is not an address of this machine") from None
    family, kind, protocol, _, address = found[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                message = f"port {port} on {host} is already in use; choose another one with --port"
            else:
                message = f"cannot listen on {host}:{port}: {error.strerror}"
            raise StartError(message, FAILURE) from None


def demo_model(name: str = "target") -> Path:
    """The folder of a demo model that comes with Fathom: ``target`` or ``draft``.

    Raises:
        StartError: when this installation has none.
    """
    package = find_spec("fathom.demo")
    for place in (package.submodule_search_locations or []) if package else []:
        folder = Path(place) / "models" / name
        if (folder / "config.json").is_file():
            return folder
    raise StartError("--demo: this installation has no demo model; give a model with --model-path", FAILURE)


def check_model(model: str, option: str = "--model-path", config: str | None = "config.json") -> None:
    """See that a model can be found: a local folder, a file, or a repository on Hugging Face.

    Args:
        config: the file that tells of it, a JSON object; None where there need not be one.

    Raises:
        StartError: when there is none.
    """
    path = Path(model)
    if (
        "://" in model
        or path.is_file()
        or os.environ.get("SGLANG_USE_MODELSCOPE", "").lower() in ("1", "true")
    ):
        return
    if path.is_dir():
        if config is None:
            return
        if not (path / config).is_file():
            raise StartError(f"{option} {model}: the folder has no {config}")
        content = read_object(path / config, f"{option} {model}: its {config}")
        if not isinstance(content.get("quantization_config") or {}, dict):
            raise StartError(f"{option} {model}: its {config}: quantization_config must be an object")
        return
    if model.count("/") != 1 or model.startswith((".", "/", "~")):
        raise StartError(f"{option} {model}: no such folder or file")
    _check_repository(model, option, config or "tokenizer_config.json")


def read_object(file: Path, name: str) -> dict[str, Any]:
    """A file's JSON object.

    Args:
        name: of the file, in messages.

    Raises:
        StartError: when it has none.
    """
    try:
        content = json.loads(file.read_text())
    except OSError as error:
        raise StartError(f"{name}: {error.strerror}") from None
    except ValueError:
        raise StartError(f"{name} is not valid JSON") from None
    if not isinstance(content, dict):
        raise StartError(f"{name} is not a JSON object")
    return content


def _check_repository(model: str, option: str, config: str) -> None:
    from huggingface_hub import HfApi, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError

    try:
        if isinstance(try_to_load_from_cache(model, config), str):
            return
        HfApi().model_info(model, timeout=10)
    except (RepositoryNotFoundError, HFValidationError):
        raise StartError(f"{option} {model}: no such folder, and no such model on Hugging Face") from None
    except Exception as error:
        message = f"no such folder, and Hugging Face could not be asked ({type(error).__name__})"
        raise StartError(f"{option} {model}: {message}") from None


@dataclass(frozen=True)
class Reading:
    """Where tokenizers are read from and how: SGLang's options of these names."""

    tokenizer_path: str | None = None
    revision: str | None = None
    speculative_draft_model_revision: str | None = None
    trust_remote_code: bool = False

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        """Let ``parser`` recognise these options."""
        for flag in ("--tokenizer-path", "--revision", "--speculative-draft-model-revision"):
            parser.add_argument(flag)
        parser.add_argument("--trust-remote-code", action="store_true")

    @classmethod
    def given(cls, arguments: object) -> "Reading":
        """As parsed flags have it."""
        return cls(**{item.name: getattr(arguments, item.name) for item in fields(cls)})


def check_draft(target: str, draft: str, reading: Reading | None = None) -> None:
    """See that a draft model is there and speaks the target's language, token for token.

    Raises:
        StartError: when there is none, or saying how the vocabularies differ.
    """
    option, how = "--draft-model-path", reading or Reading()
    if Path(draft).is_file():
        raise StartError(
            f"{option} {draft} is a file: a draft is a folder with a config.json and a tokenizer, or a name on "
            "Hugging Face, and cannot be of GGUF"
        )
    check_model(draft, option)
    difference = vocabulary_difference(
        _vocabulary(how.tokenizer_path or target, how.revision, how.trust_remote_code),
        _vocabulary(draft, how.speculative_draft_model_revision, how.trust_remote_code),
    )
    if difference:
        message = f"the draft model must share the target's vocabulary; {difference}"
        raise StartError(f"{option} {draft}: {message}")


def described(server_args: Any, drafted: bool) -> list[Any]:
    """SGLang's description (``ModelConfig``) of the model, and of its draft where there is one.

    Raises:
        StartError: when a model has none, or when a draft's context is shorter than the model's.
    """
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.environ import envs

    from fathom.server.command import quantized

    draft = server_args.speculative_draft_model_path
    paths = [server_args.model_path, *([draft] if drafted else [])]
    found: list[ModelConfig] = []
    for path in paths:
        try:
            found.append(ModelConfig.from_server_args(server_args, path, is_draft_model=len(found) > 0))
        except Exception as error:
            raise StartError(quantized.why_unknown(error, path) or one_line(error)) from error
    model, *others = (each.context_len for each in found)
    if others and others[0] < model and not envs.SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN.get():
        raise StartError(
            f"--draft-model-path {draft}: its context has {others[0]} tokens, the model's {model}; "
            f"what both have is served with --context-length {others[0]}"
        )
    return found


def vocabulary_difference(target: Mapping[str, int], draft: Mapping[str, int]) -> str:
    """How two vocabularies (token to id) differ, in words; "" when they are the same."""
    if len(target) != len(draft):
        return f"the target has {len(target)} tokens, the draft {len(draft)}"
    for token, number in sorted(target.items(), key=lambda item: item[1]):
        if draft.get(token) != number:
            other = f"id {draft[token]}" if token in draft else "absent"
            return f"token {token!r} is id {number} in the target and {other} in the draft"
    return ""


def _vocabulary(model: str, revision: str | None, trust_remote_code: bool) -> dict[str, int]:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(
            model, revision=revision, trust_remote_code=trust_remote_code
        ).get_vocab()
    except Exception as error:
        raise StartError(f"the vocabulary of {model} cannot be read: {one_line(error)}") from None
