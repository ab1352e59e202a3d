"""SGLang's server arguments without their secrets, for whoever may read them but not hold the keys."""

import pickle
import sys
from collections.abc import Iterable
from typing import IO, Any

SECRETS = ("api_key", "admin_api_key", "ssl_keyfile_password")
"""SGLang's arguments that are secrets."""

HIDDEN = "(hidden)"

_FLAGS = frozenset(f"--{name.replace('_', '-')}" for name in SECRETS)


def install() -> None:
    """Leave secrets out of what SGLang tells of its arguments, in answers, in its log and in dumps of requests."""
    from sglang.srt.managers import tokenizer_manager
    from sglang.srt.server_args import ServerArgs

    resolved_dict = ServerArgs.resolved_dict

    def without_secrets(self: Any) -> dict[str, Any]:
        return arguments(resolved_dict(self))

    ServerArgs.resolved_dict = without_secrets
    tokenizer_manager.pickle = Dumps


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


class Dumps:
    """In the place of ``pickle`` where SGLang writes dumps of requests."""

    @staticmethod
    def dump(content: dict[str, Any], file: IO[bytes]) -> None:
        """Write what SGLang gathered, with the secrets in its arguments and in the command line hidden."""
        if "launch_command" in content:
            content = content | {"launch_command": command(sys.argv)}
        _Pickler(file).dump(content)


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        from sglang.srt.server_args import ServerArgs

        if not isinstance(value, ServerArgs):
            return NotImplemented
        rebuild, (kind, fields, kept) = value.__reduce__()
        # Beside the fields it keeps what they were given, by name too.
        kept = {name: arguments(each) if isinstance(each, dict) else each for name, each in kept.items()}
        return rebuild, (kind, arguments(fields), kept)
