"""SGLang's server arguments without their secrets, for whoever may read them but not hold the keys."""

from collections.abc import Iterable
from typing import Any

SECRETS = ("api_key", "admin_api_key", "ssl_keyfile_password")
"""SGLang's arguments that are secrets."""

HIDDEN = "(hidden)"

_FLAGS = frozenset(f"--{name.replace('_', '-')}" for name in SECRETS)


def install() -> None:
    """Leave secrets out of what SGLang tells of its arguments, in answers and in its log."""
    from sglang.srt.server_args import ServerArgs

    resolved_dict = ServerArgs.resolved_dict

    def without_secrets(self: Any) -> dict[str, Any]:
        return arguments(resolved_dict(self))

    ServerArgs.resolved_dict = without_secrets


def arguments(given: dict[str, Any]) -> dict[str, Any]:
    """Arguments by name, with the secrets that were given hidden."""
    return {name: HIDDEN if name in SECRETS and value else value for name, value in given.items()}


def command(words: Iterable[str]) -> str:
    """A command line, with the values of secrets hidden."""
    shown: list[str] = []
    for word in words:
        flag, assigned, _ = word.partition("=")
        if shown and shown[-1] in _FLAGS:
            word = HIDDEN
        elif assigned and flag in _FLAGS:
            word = f"{flag}={HIDDEN}"
        shown.append(word)
    return " ".join(shown)
