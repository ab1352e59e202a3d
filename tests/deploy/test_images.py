"""Dockerfiles and compose: linted, valid, and in step with the project."""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
DOCKER = ROOT / "docker"
IMAGES = ("Dockerfile.cpu", "Dockerfile.cuda")

sys.path.insert(0, str(DOCKER))
import run_steps  # noqa: E402

sys.path.remove(str(DOCKER))


def tool(name: str) -> str:
    """A program of this environment."""
    path = Path(sys.executable).with_name(name)
    if not path.exists():
        pytest.skip(f"needs {name}: run `make test`")
    return str(path)


def steps(image: str) -> list[run_steps.Step]:
    return run_steps.parse((DOCKER / image).read_text())


def last_stage(image: str) -> list[run_steps.Step]:
    found = steps(image)
    start = max(i for i, step in enumerate(found) if step.name == "FROM")
    return found[start:]


@pytest.mark.parametrize("image", IMAGES)
def test_hadolint_has_nothing_to_say(image):
    done = subprocess.run([tool("hadolint"), DOCKER / image], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("image", IMAGES)
def test_the_image_holds_every_room_and_no_more(image):
    rooms = set(
        tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-dir"].values()
    )
    copied = {
        source
        for step in steps(image)
        if step.name == "COPY" and not step.text.startswith("--from")
        for source in step.text.split()[:-1]
    }
    assert all((ROOT / source).exists() for source in copied)
    assert {source for source in copied if (ROOT / source).is_dir()} == rooms
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert {source for source in copied if not source.startswith("requirements/")} <= allowed
    assert any(source.startswith("requirements/") and source.endswith(".lock") for source in copied)


@pytest.mark.parametrize("image", IMAGES)
def test_the_last_stage_runs_without_root_and_is_checked(image):
    stage = {step.name: step.text for step in last_stage(image)}
    environment = " ".join(step.text for step in last_stage(image) if step.name == "ENV")
    assert stage["USER"] == "10001:10001"
    assert "PYTHONSAFEPATH=1" in environment
    assert "/var/cache/fathom" in stage["VOLUME"] and "HF_HOME=/var/cache/fathom/" in environment
    assert "/health" in stage["HEALTHCHECK"]
    assert json.loads(stage["ENTRYPOINT"]) == ["fathom"] and json.loads(stage["CMD"])[0] == "serve"
    installed = " ".join(step.text for step in last_stage(image) if step.name == "RUN")
    for word in ("build-essential", "cmake", "git", " pip"):
        assert word not in installed
    assert "libgomp1" in system_packages(installed)  # Numba's OpenMP layer is linked with it
    if image == "Dockerfile.cpu":
        assert system_packages(installed) == {"libgomp1"}


def system_packages(commands: str) -> set[str]:
    """What ``apt-get install`` is asked for."""
    found = re.findall(r"apt-get install ([^&]*)", commands)
    return {word for words in found for word in words.split() if not word.startswith("-")}


def test_the_cuda_lock_holds_what_the_project_asks_for():
    locked = dict(line.split("==") for line in (ROOT / "requirements" / "cuda.lock").read_text().split())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    for requirement in project:
        name, _, version = re.sub(r">=.*", "", requirement).partition("==")
        assert name in locked and version in ("", locked[name])
    assert locked["nvidia-cuda-nvcc"].rsplit(".", 1)[0] == locked["nvidia-cuda-runtime"].rsplit(".", 1)[0]


def test_what_is_not_for_servers_stays_out_of_their_lock():
    servers = (ROOT / "requirements" / "cpu.lock").read_text().splitlines()
    tests = (ROOT / "requirements" / "test.lock").read_text().splitlines()
    assert not {line.split("==")[0] for line in servers} & {line.split("==")[0] for line in tests}


@pytest.mark.parametrize("files", [["compose.yaml"], ["compose.cuda.yaml"]], ids=" ".join)
def test_compose_fits_its_schema(files):
    command = [tool("check-jsonschema"), "--builtin-schema", "vendor.compose-spec"]
    done = subprocess.run(
        [*command, *(DOCKER / name for name in files)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_compose_mounts_files_that_exist_and_publishes_on_this_machine_only():
    compose = yaml.safe_load((DOCKER / "compose.yaml").read_text())
    volumes = compose["volumes"]
    for service in compose["services"].values():
        for mount in service.get("volumes", []):
            source = mount.split(":")[0]
            assert source in volumes or (DOCKER / source).resolve().exists(), mount
        assert all(str(port).startswith("127.0.0.1:") for port in service["ports"])
    (job,) = yaml.safe_load((DOCKER / "prometheus.yaml").read_text())["scrape_configs"]
    host, _, port = job["static_configs"][0]["targets"][0].partition(":")
    assert compose["services"][host]["ports"][0].endswith(f":{port}")
    source = yaml.safe_load((DOCKER / "grafana" / "datasources" / "prometheus.yaml").read_text())[
        "datasources"
    ][0]
    assert source["url"].removeprefix("http://").split(":")[0] in compose["services"]


def test_what_is_compiled_on_a_gpu_is_kept_and_can_be_loaded():
    places = {}
    for step in last_stage("Dockerfile.cuda"):
        if step.name == "ENV":
            places |= run_steps.assignments(step.text)
    for compiler in (
        "TRITON_CACHE",
        "SGLANG_JIT_CACHE",
        "TVM_FFI_CACHE",
        "TORCH_EXTENSIONS",
        "TILELANG_CACHE",
    ):
        assert places[f"{compiler}_DIR"].startswith("/var/cache/fathom/")
    # Where SGLang loads from too, and where a container's memory is mounted noexec unless it is asked not to be.
    assert "/tmp:exec" in yaml.safe_load((DOCKER / "compose.yaml").read_text())["services"]["server"]["tmpfs"]


def test_compose_gives_a_server_time_to_drain():
    from fathom.server.requests.admission import DEFAULT_DRAIN_SECONDS

    server = yaml.safe_load((DOCKER / "compose.yaml").read_text())["services"]["server"]
    assert int(server["stop_grace_period"].removesuffix("s")) >= DEFAULT_DRAIN_SECONDS + 20


DOCKERFILE = r"""
# a comment
ARG WHO=world
FROM base AS build
ENV PLACE=/opt/thing \
    OTHER=1
WORKDIR /src
COPY note.txt notes/
# in between
RUN mkdir -p "$PLACE" \
    && cp notes/note.txt "$PLACE/$WHO" && echo "/src/x" > /opt/thing/plain
RUN useradd somebody
FROM base
ENV PATH=/opt/thing:$PATH
COPY --from=build /opt/thing /opt/thing
CMD ["serve"]
"""


def test_steps_run_below_a_folder(tmp_path):
    context, root = tmp_path / "context", tmp_path / "root"
    context.mkdir()
    root.mkdir()
    (context / "note.txt").write_text("hello")
    image = run_steps.Image(root, context, {"WHO": "me"})
    done = [run_steps.do(image, step) for step in run_steps.parse(DOCKERFILE)]
    assert (root / "opt/thing/me").read_text() == "hello"
    assert (root / "opt/thing/plain").read_text() == f"{root}/src/x\n"
    assert not Path("/opt/thing").exists()
    assert [text for text in done if text.startswith("NOT RUN")] == ["NOT RUN: would change this machine"]
    assert image.variables()["PATH"] == f"{root}/opt/thing:{os.environ['PATH']}"
    assert image.command == ["serve"]


def test_compilers_are_hidden(tmp_path):
    place = tmp_path / "bin"
    place.mkdir()
    for name in ("gcc", "x86_64-linux-gnu-gcc-12", "g++", "nvcc", "sed"):
        (place / name).touch(mode=0o755)
    path = run_steps.without_compilers(str(place), tmp_path / "links")
    assert shutil.which("sed", path=path)
    assert not any(
        shutil.which(name, path=path) for name in ("gcc", "x86_64-linux-gnu-gcc-12", "g++", "nvcc")
    )
