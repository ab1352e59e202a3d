"""The policy's fields as command-line flags."""

import argparse
from collections.abc import Mapping
from typing import Any

from fathom.runtime import config


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add one flag per field: the policy of requests that bring none."""
    group = parser.add_argument_group("policy of requests that ask for none")
    for name, spec in config.SPECS.items():
        flag = "--" + name.replace("_", "-")
        default, legal = config.DEFAULTS[name], spec.legal(config.Limits())
        default = " ".join(default) if spec.several else default
        text = f"{spec.help}; {legal} (default: {default}; {spec.source})".replace("%", "%%")
        if spec.kind is bool:
            group.add_argument(flag, action=argparse.BooleanOptionalAction, default=None, help=text)
        else:
            nargs = "*" if spec.several else None
            group.add_argument(
                flag, type=spec.from_text, nargs=nargs, metavar="VALUE", default=None, help=text
            )


def asked_by(arguments: argparse.Namespace) -> dict[str, Any]:
    """The policy fields that the flags of :func:`add_arguments` ask for.

    Raises:
        PolicyError: for a value that is legal for no model, with the flag's name in place of the field's.
    """
    given = {name: getattr(arguments, name) for name in config.SPECS if getattr(arguments, name) is not None}
    try:
        config.choose(given)
    except config.PolicyError as error:
        raise config.PolicyError(as_flag(error), error.field) from error
    return given


def tunings_of(arguments: argparse.Namespace, defaults: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """What the flags of :func:`add_arguments` say of fields that only refine another one.

    Args:
        defaults: values for flags that are not given.
    """
    given = {name: getattr(arguments, name) for name, spec in config.SPECS.items() if spec.tunes}
    return {**(defaults or {}), **{name: value for name, value in given.items() if value is not None}}


def as_flag(error: config.PolicyError) -> str:
    """The error's message with the flag's name in place of the field's."""
    return str(error).replace(f"fathom.{error.field}", "--" + error.field.replace("_", "-"))
