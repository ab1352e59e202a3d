"""Run by itself: how many places of SGLang's the server's process gives to ours, and those that no row of the seam
ledger names, as JSON.
"""

import importlib
import inspect
import json
import sys
from pathlib import Path

from fathom.runtime.sglang_host.machine import torchvision_ops

torchvision_ops.declare()

import fathom.server  # noqa: E402
from fathom.runtime.sglang_host.seams import seams  # noqa: E402
from fathom.server import app  # noqa: E402

SGLANG = "sglang.srt."


def places():
    """What each global of a module, and each member of a class of that module, is."""
    found = {}
    for name in [name for name in sys.modules if name.startswith(SGLANG)]:
        module = name.removeprefix(SGLANG)
        for attribute, value in list(vars(sys.modules[name]).items()):
            found[f"{module}:{attribute}"] = value
            if isinstance(value, type) and value.__module__ == name:
                found |= {f"{module}:{attribute}.{key}": member for key, member in vars(value).items()}
    return found


def names_in(code):
    inner = [constant for constant in code.co_consts if inspect.iscode(constant)]
    return set(code.co_names).union(*map(names_in, inner))


def named():
    """Places that rows name, and the globals that functions of rows read."""
    found = set()
    for seam in seams.rows(seams.SERVER):
        module, _, path = seam.target.partition(":")
        found.add(seam.target)
        code = getattr(inspect.unwrap(seams.resolve(seam.target)), "__code__", None)
        if path and code is not None:
            found |= {f"{module}:{name}" for name in names_in(code)}
    return found


if __name__ == "__main__":
    room = fathom.server.__path__[0]
    for path in Path(room).rglob("*.py"):
        importlib.import_module(".".join(["fathom.server", *path.relative_to(room).with_suffix("").parts]))
    known, before = named(), places()
    app.install("")
    replaced = {name for name, value in places().items() if before.get(name) is not value}
    replaced = {name for name in replaced if name in before or name.rpartition(".")[0] in before}
    print(json.dumps([len(replaced), sorted(replaced - known)]))
