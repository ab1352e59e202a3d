"""Runs the steps of a Dockerfile without Docker: its own RUN and COPY lines, in an empty folder.

    python docker/run_steps.py docker/Dockerfile.cpu [--keep FOLDER] [--build-arg NAME=VALUE]

Absolute paths of the image (those of WORKDIR, ENV and COPY) become paths below the folder. All stages share it, so
a COPY from an earlier stage is only checked. Steps that would change this machine (users, system packages) are
listed, not run. Afterwards the image's own command is started with its environment and without compilers in PATH,
its HEALTHCHECK is polled, the demo's question is asked, and SIGTERM must end it with status 0.
What this cannot show: that the base image has the same system libraries as this machine.
"""

import argparse
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from urllib.request import Request, urlopen

HOST_STEPS = ("useradd", "apt-get")
COMPILERS = ("gcc", "g++", "cc", "c++", "clang", "nvcc", "ninja", "cmake", "make")
START_SECONDS = 240


@dataclass(frozen=True)
class Step:
    """One instruction of a Dockerfile, its line continuations joined."""

    name: str
    text: str


def parse(text: str) -> list[Step]:
    """The instructions of a Dockerfile, comments left out."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n", " ", "\n".join(lines))
    return [
        Step(name.upper(), rest.strip())
        for name, _, rest in (line.strip().partition(" ") for line in joined.splitlines() if line.strip())
    ]


@dataclass
class Image:
    """What the steps so far have made.

    Attributes:
        root: the folder that stands for ``/``.
        context: the repository.
        arguments: values of ARG.
        environment: values of ENV of the current stage, paths not yet below ``root``.
        moved: absolute paths of the image that lie below ``root``.
    """

    root: Path
    context: Path
    arguments: dict[str, str]
    environment: dict[str, str] = field(default_factory=dict)
    moved: set[str] = field(default_factory=set)
    workdir: str = "/"
    healthcheck: list[str] = field(default_factory=list)
    entrypoint: list[str] = field(default_factory=list)
    command: list[str] = field(default_factory=list)

    def below(self, text: str) -> str:
        """``text`` with the image's paths below ``root``."""
        for path in sorted(self.moved, key=len, reverse=True):
            text = re.sub(rf"(?<![\w.]){re.escape(path)}(?=[/:\"'\s]|$)", f"{self.root}{path}", text)
        return text

    def variables(self) -> dict[str, str]:
        """The environment of a step: this machine's, the arguments, and the image's."""
        host = {
            key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "VIRTUAL_ENV"))
        }
        own = {key: self.below(value) for key, value in self.environment.items()}
        own["HOME"] = str(self.root / "home")
        return host | self.arguments | {k: v.replace("$PATH", host["PATH"]) for k, v in own.items()}

    def folder(self) -> Path:
        """The working directory."""
        place = self.root / self.workdir.lstrip("/")
        place.mkdir(parents=True, exist_ok=True)
        return place


def copy(image: Image, text: str) -> str:
    """Do one COPY; returns what was done."""
    words = shlex.split(text)
    if words[0].startswith("--from="):
        missing = [path for path in words[1:-1] if not (image.root / path.lstrip("/")).exists()]
        if missing or words[1:-1] != [words[-1]]:
            raise SystemExit(f"COPY {text}: only an existing path to the same path can be stood in for")
        return "already there: stages share the folder"
    *sources, target = words
    for source in sources:
        found = image.context / source
        place = image.folder() / target
        if found.is_dir():
            ignore = shutil.ignore_patterns("__pycache__", "results")
            shutil.copytree(found, place, dirs_exist_ok=True, ignore=ignore)
        else:
            place = place / found.name if target.endswith("/") else place
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(found, place)
    return "copied"


def run(image: Image, text: str) -> str:
    """Do one RUN; returns what was done."""
    if any(word in text for word in HOST_STEPS):
        return "NOT RUN: would change this machine"
    begin = time.perf_counter()
    subprocess.run(
        ["/bin/sh", "-ec", image.below(text)], cwd=image.folder(), env=image.variables(), check=True
    )
    return f"{time.perf_counter() - begin:.0f} s"


def assignments(text: str) -> dict[str, str]:
    """``A=b C="d e"`` as a dict."""
    return dict(word.split("=", 1) for word in shlex.split(text))


def do(image: Image, step: Step) -> str:
    """Do one step; returns what was done, "" for nothing worth a line."""
    if step.name == "FROM":
        image.environment = {}
        image.workdir = "/"
    elif step.name == "ARG":
        name, _, value = step.text.partition("=")
        image.arguments.setdefault(name, value)
    elif step.name == "ENV":
        values = assignments(step.text)
        image.environment |= values
        image.moved |= {p for v in values.values() for p in v.split(":") if p.startswith("/")}
    elif step.name == "WORKDIR":
        image.workdir = step.text
        image.moved.add(step.text)
    elif step.name == "COPY":
        return copy(image, step.text)
    elif step.name == "RUN":
        return run(image, step.text)
    elif step.name == "HEALTHCHECK":
        image.healthcheck = json.loads(step.text.partition(" CMD ")[2])
    elif step.name == "ENTRYPOINT":
        image.entrypoint = json.loads(step.text)
    elif step.name == "CMD":
        image.command = json.loads(step.text)
    return ""


def without_compilers(path: str, folder: Path) -> str:
    """A PATH with links to all its programs but compilers, as the image has none."""
    folder.mkdir(parents=True)
    for place in path.split(":"):
        for program in sorted(Path(place).glob("*")) if place else []:
            compiler = program.name in COMPILERS or re.search(
                r"(^|-)(gcc|g\+\+|clang\+*)(-[\d.]+)?$", program.name
            )
            if not compiler and not (folder / program.name).is_symlink():
                (folder / program.name).symlink_to(program)
    return str(folder)


def serve(image: Image) -> None:
    """Start the image's command, poll its health check, ask the demo's question, and stop it."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])
    environment = image.variables()
    own, _, rest = environment["PATH"].partition(":")
    environment["PATH"] = f"{own}:{without_compilers(rest, image.root / 'bin')}"
    here = {"cwd": image.folder(), "env": environment}
    command = [word.replace("30000", port) for word in [*image.entrypoint, *image.command]]
    command[0] = shutil.which(command[0], path=environment["PATH"]) or command[0]
    check = [image.below(word).replace("30000", port) for word in image.healthcheck]
    check[0] = shutil.which(check[0], path=environment["PATH"]) or check[0]
    begin = time.monotonic()
    server = subprocess.Popen(command, start_new_session=True, **here)
    try:
        while subprocess.run(check, stderr=subprocess.DEVNULL, **here).returncode:
            if server.poll() is not None or time.monotonic() - begin > START_SECONDS:
                raise SystemExit(f"the server did not become healthy (exit status {server.poll()})")
            time.sleep(1)
        print(f"healthy after {time.monotonic() - begin:.0f} s", flush=True)
        question = (image.context / "demo/examples/question.json").read_bytes()
        url = f"http://127.0.0.1:{port}/v1/chat/completions"
        request = Request(url, question, {"Content-Type": "application/json"})
        answer = json.load(urlopen(request, timeout=120))["choices"][0]["message"]["content"]
        expected = (image.context / "demo/examples/answer.txt").read_text().strip()
        print(
            f"answer: {answer[:60]}... {'as expected' if answer == expected else 'NOT AS EXPECTED'}",
            flush=True,
        )
        server.send_signal(signal.SIGTERM)
        status = server.wait(60)
        print(f"stopped with status {status}")
        if status or answer != expected:
            raise SystemExit(1)
    finally:
        if server.poll() is None:
            os.killpg(server.pid, signal.SIGKILL)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("dockerfile", type=Path)
    parser.add_argument("--keep", type=Path, help="an empty folder to work in and to leave behind")
    parser.add_argument("--build-arg", action="append", default=[], metavar="NAME=VALUE")
    options = parser.parse_args()
    context = options.dockerfile.resolve().parent.parent
    root = options.keep.resolve() if options.keep else Path(tempfile.mkdtemp(prefix="image-"))
    root.mkdir(parents=True, exist_ok=True)
    if any(root.iterdir()):
        sys.exit(f"{root} is not empty")
    image = Image(root, context, assignments(shlex.join(options.build_arg)))
    try:
        for step in parse(options.dockerfile.read_text()):
            print(f"{step.name} {step.text[:100]}", flush=True)
            if done := do(image, step):
                print(f"  -> {done}", flush=True)
        size = subprocess.run(["du", "-sh", root / "opt"], capture_output=True, text=True).stdout.split()
        print(f"size of /opt: {size[0] if size else '?'}")
        serve(image)
    finally:
        if not options.keep:
            shutil.rmtree(root, ignore_errors=True)


if __name__ == "__main__":
    main()
