"""Versions of Fathom and of what it runs on."""

import platform
from importlib import metadata

PACKAGES = {"fathom": "fathom-serve", "sglang": "sglang", "torch": "torch"}


def versions() -> dict[str, str]:
    """Version by name; "not installed" where a package is missing."""
    found = {}
    for name, package in PACKAGES.items():
        try:
            found[name] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found | {"python": platform.python_version()}
