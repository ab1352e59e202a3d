"""The ``fathom`` command. Light to import: SGLang and PyTorch are loaded only by what needs them."""

import argparse
import os
import signal
import sys
from importlib import import_module

from fathom.server import ending
from fathom.server.command.checks import StartError
from fathom.server.version import versions

USAGE = """usage: fathom COMMAND [options]

Long-context LLM inference on SGLang's scheduler.

commands:
  serve     serve a model over HTTP        (fathom serve --help)
  explain   what a policy drops and saves  (fathom explain --help)
  bench     measure against stock SGLang   (fathom bench --help)
  fidelity  what policies cost in answers  (fathom fidelity --help)
  soak      mixed policies under load      (fathom soak --help)
  calibrate where FastKV should select     (fathom calibrate tsp --help)
  version   show versions

A first try, without a download:  fathom serve --demo"""


MODULES = {
    "serve": "fathom.server.serve",
    "explain": "fathom.server.command.explain",
    "bench": "fathom.benchmarks.cli",
    "fidelity": "fathom.benchmarks.fidelity",
    "soak": "fathom.benchmarks.soak",
    "calibrate": "fathom.benchmarks.calibrate",
}
"""By command, where its ``main`` is. Imported when it is asked for."""
COMMANDS = (*MODULES, "version")


def _version(argv: list[str]) -> int:
    argparse.ArgumentParser(prog="fathom version", description="Show versions.").parse_args(argv)
    for name, version in versions().items():
        print(f"{name} {version}")
    return 0


def main(argv: list[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: arguments without the program's name; the process's own when None.

    Returns:
        The exit code: 0, 1 for a failure, 2 for a wrong command line, 3 for an unknown SGLang, 141 where the reader
        of the output has gone, as a shell has it for SIGPIPE.
    """
    _replace_closed_streams()
    try:
        try:
            return _run(argv)
        finally:
            sys.stdout.flush()  # not at the interpreter's end, which would report a closed pipe
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE


def _replace_closed_streams() -> None:
    """Have an output where this process was given none, which libraries rely on.

    A file that is opened gets the lowest free number, so that no connection gets that of an output and its text.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w"))


def _run(argv: list[str] | None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    command, rest = (argv[0], argv[1:]) if argv else ("--help", [])
    if command in ("--version", "-V"):
        command = "version"
    if command in ("--help", "-h", "help"):
        print(USAGE)
        return 0
    if command not in COMMANDS:
        known = ", ".join(COMMANDS)
        print(f"fathom: error: unknown command {command!r}; commands: {known}", file=sys.stderr)
        return 2
    try:
        return _version(rest) if command == "version" else import_module(MODULES[command]).main(rest)
    except StartError as error:
        print(f"fathom {command}: error: {error}", file=sys.stderr)
        return error.code
    except KeyboardInterrupt:
        if command == "serve":  # being told to stop is how a server ends
            ending.leave(0)
        return 130


if __name__ == "__main__":
    sys.exit(main())
