"""How a tool ends that has no result: one line, and an exit code that says whose fault it was."""

import sys

from fathom.benchmarks.client import BenchError
from fathom.server.command.checks import StartError

FAILURES = (BenchError, StartError, ValueError, OSError)  # a folder that cannot be written, for one


def exit_code(command: str, error: Exception) -> int:
    """2 for wrong arguments, a refusal's own, and 1 for what came up in the run. The error is told on stderr."""
    print(f"fathom {command}: error: {error}", file=sys.stderr)
    if isinstance(error, StartError):
        return error.code
    return 2 if isinstance(error, ValueError) else 1
