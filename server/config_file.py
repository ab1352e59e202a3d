"""A file of options for ``fathom serve``, Fathom's and SGLang's: ``--config FILE``."""

import json
from collections.abc import Collection
from typing import Any

from fathom.runtime import config
from fathom.server.checks import StartError


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
            result += [flag, *map(str, value)] if value else []
        else:
            result.append(f"{flag}={json.dumps(value) if isinstance(value, dict) else value}")
    return result


def _off(flag: str) -> list[str]:
    """A switch that is off: only those of the policy have a word for it."""
    name = flag.removeprefix("--")
    spec = config.SPECS.get(name.replace("-", "_"))
    return [f"--no-{name}"] if spec is not None and spec.kind is bool else []


def _read(path: str) -> dict[Any, Any]:
    import yaml

    try:
        with open(path) as file:
            content = yaml.safe_load(file) or {}
    except (OSError, yaml.YAMLError) as error:
        raise StartError(f"--config {path}: {str(error).splitlines()[0]}") from None
    if not isinstance(content, dict):
        raise StartError(f"--config {path}: must hold a mapping of options")
    return content
