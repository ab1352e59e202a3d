"""A file of options for ``fathom serve``, Fathom's and SGLang's: ``--config FILE``."""

import json
from collections.abc import Collection
from typing import Any

from fathom.runtime import config
from fathom.runtime.spec import Spec
from fathom.server.command import depth_pages
from fathom.server.command.checks import StartError

ON_OR_OFF = (
    *(
        "--dcp-replicate-q-proj",
        "--dllm-fdfo",
        "--enable-tp-lm-head-all-to-all",
        "--experts-shared-outer-loras",
    ),
    *("--lora-strict-loading", "--ple-offload-embedding"),
)
"""SGLang's switches that may be on by themselves, and have a word for off."""


def words(path: str, left_out: Collection[str] = ()) -> list[str]:
    """The options of a file as words of a command line.

    Args:
        path: a YAML mapping of options, without the two dashes: ``true`` for a switch, which ``false`` leaves out;
            a list for an option with several values.
        left_out: options that are not read.

    Raises:
        StartError: for what is no such file.
    """
    result: list[str] = []
    for key, value in _read(path).items():
        flag = "--" + str(key).replace("_", "-")
        if flag == "--config":
            raise StartError(f"--config {path}: must not name another file")
        if value is None or flag in left_out:
            continue
        if isinstance(value, bool):
            result += [flag] if value else _off(flag)
        elif isinstance(value, list):
            result += [flag, *map(_word, value)] if value or _may_be_empty(flag) else []
        else:
            result.append(f"{flag}={_word(value)}")
    return result


def _word(value: Any) -> str:
    return json.dumps(value) if isinstance(value, dict) else str(value)


def _off(flag: str) -> list[str]:
    """A switch that is off: only those that may be on by themselves have a word for it."""
    off, spec = flag.replace("--", "--no-", 1), _field(flag)
    ours = off == depth_pages.OFF or (spec is not None and spec.kind is bool)
    return [off] if ours or flag in ON_OR_OFF else []


def _may_be_empty(flag: str) -> bool:
    """Whether a list without values asks for something."""
    spec = _field(flag)
    return spec is not None and spec.several


def _field(flag: str) -> Spec | None:
    """The field of a policy that an option sets."""
    return config.SPECS.get(flag.removeprefix("--").replace("-", "_"))


def _reason(error: Exception) -> str:
    """Why a file could not be read: of YAML also the line, of values that Python does not take what it says."""
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
    if mark is not None and problem:
        return f"line {mark.line + 1}: {problem}"
    if isinstance(error, UnicodeDecodeError):
        return "not text in UTF-8"
    return getattr(error, "strerror", None) or str(error).splitlines()[0]


def _read(path: str) -> dict[Any, Any]:
    import yaml

    try:
        with open(path) as file:
            content = yaml.safe_load(file) or {}
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise StartError(f"--config {path}: {_reason(error)}") from None
    if not isinstance(content, dict):
        raise StartError(f"--config {path}: must hold a mapping of options")
    return content
