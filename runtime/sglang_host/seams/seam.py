"""One row of the seam ledger: a place of SGLang that Fathom relies on."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

SERVER, SCHEDULER, DETOKENIZER = "server", "scheduler", "detokenizer"


class SeamError(RuntimeError):
    """Something of SGLang that Fathom relies on is missing or not as it was."""


@dataclass(frozen=True)
class Seam:
    """One dependency on SGLang's insides.

    Attributes:
        target: ``module:attribute.path`` below ``sglang.srt``.
        use: what we do with it: subclass, override, call, replace, register or read.
        why: what breaks without it.
        roles: the processes that rely on it.
        parameters: the parameter names of a function, in order, ``self`` left out; None where it is no function.
        check: a property the object must have besides, as a predicate.
    """

    target: str
    use: str
    why: str
    roles: tuple[str, ...]
    parameters: tuple[str, ...] | None = None
    check: Callable[[Any], bool] | None = None


def relies_on(
    roles: str, target: str, use: str, why: str, parameters: str | None = None, check: Any = None
) -> Seam:
    names = None if parameters is None else tuple(parameters.split())
    return Seam(target, use, why, tuple(roles.split()), names, check)


def reads_attributes(names: str) -> Callable[[Any], bool]:
    """Whether a method, or the one that it wraps, reads these attributes, in the code or by a name in quotes."""

    def reads(method: Any) -> bool:
        code = inspect.unwrap(method).__code__
        return set(names.split()) <= {*code.co_names, *code.co_consts}

    return reads


def reads_global(name: str) -> Callable[[Any], bool]:
    return lambda function: name in inspect.unwrap(function).__code__.co_names
