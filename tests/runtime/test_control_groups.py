"""What a container with limits gets, threads and memory: groups as the kernel shows them, in files."""

import os

import pytest

from fathom.runtime import control_groups
from fathom.server.command import cpu_quota

V1 = "4:memory:/a\n3:cpu,cpuacct:/a/b\n"
CASES = {
    "a container of its own": ("0::/\n", {"cpu.max": "250000 100000\n"}, 2.5),
    "no limit": ("0::/\n", {"cpu.max": "max 100000\n"}, None),
    "the root, which has no such file": ("0::/\n", {}, None),
    "the smallest of the groups that it is in": (
        "0::/a/b\n",
        {"a/b/cpu.max": "max 100000\n", "a/cpu.max": "150000 100000\n", "cpu.max": "800000 100000\n"},
        1.5,
    ),
    "the host's name for a container": ("0::/kubepods/x\n", {"cpu.max": "50000 100000\n"}, 0.5),
    "version 1": (V1, {"cpu/a/b/cpu.cfs_quota_us": "300000", "cpu/a/b/cpu.cfs_period_us": "100000"}, 3),
    "version 1 in a container": (
        V1,
        {"cpu/cpu.cfs_quota_us": "200000", "cpu/cpu.cfs_period_us": "100000"},
        2,
    ),
    "version 1 without a limit": (
        V1,
        {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"},
        None,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_quota_of_a_group(tmp_path, case):
    own, files, expected = CASES[case]
    assert control_groups.processors(*shown(tmp_path, own, files)) == expected


def shown(tmp_path, own, files):
    """Groups in files: where they are mounted, and this process's own."""
    (tmp_path / "own").write_text(own)
    for name, content in files.items():
        file = tmp_path / "mounted" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
    return tmp_path / "mounted", tmp_path / "own"


UNLIMITED = "9223372036854771712\n"
MEMORY = {
    "a container of its own": ("0::/\n", {"memory.max": "2147483648\n"}, 2 << 30),
    "no limit": ("0::/\n", {"memory.max": "max\n"}, None),
    "the smallest of the groups that it is in": (
        "0::/a/b\n",
        {"a/b/memory.max": "max\n", "a/memory.max": "1073741824\n", "memory.max": "4294967296\n"},
        1 << 30,
    ),
    "version 1": (
        V1,
        {"memory/a/memory.limit_in_bytes": "1073741824\n", "memory/memory.limit_in_bytes": UNLIMITED},
        1 << 30,
    ),
    "version 1 in a container": (V1, {"memory/memory.limit_in_bytes": "1073741824\n"}, 1 << 30),
}


@pytest.mark.parametrize("case", MEMORY)
def test_the_memory_of_a_group(tmp_path, case):
    own, files, expected = MEMORY[case]
    assert control_groups.memory(*shown(tmp_path, own, files)) == expected


def test_elsewhere_there_is_none(tmp_path):
    assert control_groups.processors(tmp_path, tmp_path / "none") is None
    assert control_groups.memory(tmp_path, tmp_path / "none") is None


@pytest.mark.parametrize(
    ("quota", "given", "threads"),
    [(2.5, {}, "2"), (0.5, {}, "1"), (None, {}, None), (8, {}, None), (2, {"OMP_NUM_THREADS": "5"}, "5")],
)
def test_threads_fit_the_quota(monkeypatch, quota, given, threads):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(control_groups, "processors", lambda: quota)
    cpu_quota.limit_threads(given)
    assert given.get("OMP_NUM_THREADS") == threads
