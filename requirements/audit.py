"""Known vulnerabilities of the locked packages, by pip-audit.

    python requirements/audit.py requirements/cpu.lock requirements/test.lock

Asks PyPI's advisory service, then OSV's. Status 1 for an advisory that a newer version answers, unless SGLang pins
the package to this one; those, and advisories without an answer yet, are listed. Where no service can be asked this
says so and ends with status 0: nothing is known then, and nothing is claimed.
"""

import json
import re
import subprocess
import sys
from importlib import metadata
from typing import Any

SERVICES = ("pypi", "osv")
SECONDS = 300


def ask(lock: str, service: str, options: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    """The packages of a lock file that a service knows, each with its ``vulns``; empty where it does not answer."""
    command = [
        sys.executable,
        "-m",
        "pip_audit",
        "-r",
        lock,
        "--no-deps",
        "--disable-pip",
        "-f",
        "json",
        "-s",
        service,
        *options,
    ]
    try:
        done = subprocess.run(
            [*command, "--progress-spinner", "off"], capture_output=True, text=True, timeout=SECONDS
        )
        report = json.loads(done.stdout)
    except (subprocess.TimeoutExpired, ValueError):
        return []
    return [package for package in report["dependencies"] if "vulns" in package]


def pinned_by_sglang() -> set[str]:
    """Names of the packages that SGLang wants in one version only."""
    found = (re.match(r"([\w.-]+)(?:\[[^]]*\])?\s*==", text) for text in metadata.requires("sglang") or ())
    return {normal(match[1]) for match in found if match} | {"sglang"}


def normal(name: str) -> str:
    """A package's name as indexes spell it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def judge(packages: list[dict[str, Any]], pinned: set[str]) -> tuple[list[str], bool]:
    """A line per advisory, and whether one of them is ours to answer.

    Args:
        packages: as pip-audit lists them: ``name``, ``version``, ``vulns`` with ``id`` and ``fix_versions``.
        pinned: packages that SGLang wants in one version only.
    """
    lines, failed = [], False
    for package in packages:
        for advisory in package["vulns"]:
            fixed, held = advisory["fix_versions"], normal(package["name"]) in pinned
            answer = f"fixed in {', '.join(fixed)}" if fixed else "no fixed version yet"
            answer += "; SGLang pins this one" if held else ""
            lines.append(f"{package['name']} {package['version']}: {advisory['id']}, {answer}")
            failed |= bool(fixed) and not held
    return lines, failed


def main(locks: list[str]) -> int:
    """Audit each lock file; the exit status."""
    failed, pinned = False, pinned_by_sglang()
    for lock in locks:
        for service in SERVICES:
            if packages := ask(lock, service):
                lines, bad = judge(packages, pinned)
                print(
                    f"{lock}: {len(packages)} packages audited ({service}), {len(lines)} advisories",
                    *lines,
                    sep="\n  ",
                )
                failed |= bad
                break
        else:
            print(f"{lock}: NOT AUDITED: neither of {', '.join(SERVICES)} knows or answers")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
