"""The shape of the project: which room may import which, what the wheel holds, and the README's map."""

import ast
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("server", "runtime", "kernels", "benchmarks", "demo")
# Each room may import the rooms listed, besides itself.
MAY_IMPORT = {
    "kernels": set(),
    "runtime": {"kernels"},
    "server": {"runtime", "kernels", "benchmarks", "demo"},
    "benchmarks": {"server", "runtime", "kernels", "demo"},
    "demo": {"runtime", "kernels"},
}


def sources() -> list[Path]:
    return sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))


def imported_modules(path: Path) -> set[str]:
    """Absolute names of all modules a file imports, at any depth; relative imports resolved."""
    package = ["fathom", *path.relative_to(ROOT).parent.parts]
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            names |= {module} | {f"{module}.{alias.name}" for alias in node.names}
    return names


@pytest.mark.parametrize("path", sources(), ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_down(path):
    room = path.relative_to(ROOT).parts[0]
    for name in imported_modules(path):
        parts = name.split(".")
        if parts[0] == "fathom" and len(parts) > 1:
            assert parts[1] == room or parts[1] in MAY_IMPORT[room], f"{room} must not import {name}"
        assert parts[0] not in ROOMS, f"import fathom.{name}, not {name}"


@pytest.mark.parametrize("path", sources(), ids=lambda p: str(p.relative_to(ROOT)))
def test_only_the_host_and_the_http_face_import_sglang(path):
    relative = path.relative_to(ROOT)
    allowed = relative.parts[:2] == ("runtime", "sglang_host") or relative.parts[0] == "server"
    allowed |= relative == Path("benchmarks/stock_sglang.py")
    if not allowed:
        assert not [name for name in imported_modules(path) if name.split(".")[0] == "sglang"]


def test_mechanism_rooms_do_not_import_each_other():
    mechanisms = {p.name for p in (ROOT / "runtime").iterdir() if p.is_dir()} - {
        "sglang_host",
        "kv",
        "__pycache__",
    }
    for mechanism in mechanisms:
        for path in (ROOT / "runtime" / mechanism).rglob("*.py"):
            others = {n.split(".")[2] for n in imported_modules(path) if n.startswith("fathom.runtime.")}
            assert not others & (mechanisms - {mechanism}), path


def test_top_folders_are_namespace_packages():
    for room in ROOMS:
        assert not (ROOT / room / "__init__.py").exists()


def test_files_stay_readable():
    """A file that cannot be read in one sitting should become two."""
    tests = sorted((ROOT / "tests").rglob("*.py"))
    assert {str(p): n for p in [*sources(), *tests] if (n := len(p.read_text().splitlines())) > 500} == {}


def test_the_wheel_holds_every_file(tmp_path):
    for name in (*ROOMS, "pyproject.toml", "README.md", "LICENSE"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tmp_path / name)  # built in a copy: setuptools leaves its build folder behind
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", str(tmp_path)]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    held = set(zipfile.ZipFile(wheel).namelist())
    tracked = subprocess.run(
        ["git", "ls-files", *ROOMS], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.split()
    wanted = {f"fathom/{name}" for name in tracked if not name.startswith("benchmarks/results/")}
    assert wanted - held == set()
    assert {name.split("/")[0] for name in held} == {"fathom", wheel.name.rsplit("-py3", 1)[0] + ".dist-info"}


def test_packages_are_listed():
    listed = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    folders = {path.parent for path in sources()}
    assert {".".join(("fathom", *folder.relative_to(ROOT).parts)) for folder in folders} == listed


def test_the_readme_map_names_every_room_and_file():
    """Each line of the map starts with a path that exists; every room, package and runtime file has a line."""
    readme = (ROOT / "README.md").read_text()
    drawn = re.search(r"<!-- map -->\n```\n(.*?)```", readme, re.S).group(1)
    lines = [line.split() for line in drawn.splitlines() if line.strip()]
    paths = {words[0].rstrip("/") for words in lines}
    assert all(len(words) > 3 for words in lines), "every line needs a caption"
    assert {p for p in paths if not (ROOT / p).exists()} == set()
    tracked = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.splitlines()
    rooms = {name.split("/")[0] for name in tracked if "/" in name and not name.startswith(".")}
    runtime = {str(Path(n)) for n in tracked if re.fullmatch(r"(runtime|kernels)/[^/]+\.py", n)}
    packages = {str(path.parent.relative_to(ROOT)) for path in sources()}
    assert {room for room in rooms if not any(path.split("/")[0] == room for path in paths)} == set()
    assert runtime | packages - {"runtime", "kernels"} <= paths
