"""``fathom`` beside a package of tool servers that is there, and empty."""

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

from fathom.server import cli


def main(argv):
    empty = ModuleType("mcp")
    empty.__spec__ = ModuleSpec("mcp", None)
    sys.modules["mcp"] = empty
    return cli.main(argv)
