"""Run by itself: what of SGLang's gives way to ours and has no row in the seam ledger, as JSON.

``server``, ``scheduler`` and ``detokenizer``: how many places these processes take when they begin, and which of
them no row names.
``overrides``: how many members of SGLang's classes ours override, and which of them no row names.
"""

import dataclasses
import importlib
import inspect
import json
import sys
from pathlib import Path
from typing import Protocol, TypeVar

from fathom.runtime.sglang_host.machine import torchvision_ops

torchvision_ops.declare()

import fathom.runtime  # noqa: E402
import fathom.server  # noqa: E402
from fathom.runtime.sglang_host import options, process  # noqa: E402
from fathom.runtime.sglang_host.reports import detokenizer  # noqa: E402
from fathom.runtime.sglang_host.seams import seams  # noqa: E402
from fathom.server import app  # noqa: E402

SGLANG = "sglang.srt."
Item = TypeVar("Item")


@dataclasses.dataclass
class Plain(Protocol[Item]):
    """What Python itself puts into classes; the constructor too, which fails where its caller is not as it was."""

    item: Item


def ours():
    """Every module of the HTTP face and of the host of SGLang's engine."""
    host = Path(fathom.runtime.__path__[0]) / "sglang_host"
    for package, room in (
        ("fathom.server", Path(fathom.server.__path__[0])),
        ("fathom.runtime.sglang_host", host),
    ):
        for path in sorted(room.rglob("*.py")):
            parts = path.relative_to(room).with_suffix("").parts
            yield importlib.import_module(".".join([package, *parts]))


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


def at_home(target):
    """A member of a class, named by the module that the class is written in."""
    owner, _, member = target.rpartition(".")
    found = seams.resolve(owner) if ":" in owner else None
    home = (
        f"{found.__module__.removeprefix(SGLANG)}:{found.__qualname__}" if inspect.isclass(found) else owner
    )
    return f"{home}.{member}"


def named(role=None):
    """Places that rows name, and the globals that functions of rows read."""
    found = set()
    for seam in seams.rows(role):
        module, _, path = seam.target.partition(":")
        found |= {seam.target, at_home(seam.target)}
        code = getattr(inspect.unwrap(seams.resolve(seam.target)), "__code__", None)
        if path and code is not None:
            found |= {f"{module}:{name}" for name in names_in(code)}
    return found


def taken(role, take):
    """Places that are others once ``take`` was called."""
    known, before = named(role), places()
    take()
    replaced = {name for name, value in places().items() if before.get(name) is not value}
    replaced = {name for name in replaced if name in before or name.rpartition(".")[0] in before}
    return len(replaced), sorted(replaced - known)


def overridden(modules):
    """Members of SGLang's classes that classes of ours have too, each by all the classes it may be known by."""
    for module in modules:
        for found in vars(module).values():
            if not inspect.isclass(found) or found.__module__ != module.__name__:
                continue
            bases = [base for base in found.__mro__[1:] if base.__module__.startswith(SGLANG)]
            for member in vars(found).keys() - vars(Plain).keys() - {"__slots__"}:
                homes = [base for base in bases if hasattr(base, member)]
                if homes:
                    yield {
                        f"{base.__module__.removeprefix(SGLANG)}:{base.__qualname__}.{member}"
                        for base in homes
                    }


if __name__ == "__main__":
    modules, known = list(ours()), named()
    overrides = list(overridden(modules))
    unnamed = sorted("|".join(sorted(homes)) for homes in overrides if not homes & known)
    told = {"overrides": (len(overrides), unnamed), "server": taken(seams.SERVER, lambda: app.install(""))}
    told["scheduler"] = taken(seams.SCHEDULER, lambda: process.install(options.EngineOptions()))
    told["detokenizer"] = taken(seams.DETOKENIZER, detokenizer.install)
    print(json.dumps(told))
