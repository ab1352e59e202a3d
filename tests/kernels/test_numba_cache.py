"""Compiled kernels on a disk that is full, read-only or cut off: told once, and computed all the same. Those of
other sources are not taken."""

import importlib.util
import resource
import sys

import numba
import pytest

from fathom.kernels import numba_cache_cpu, numba_cpu  # noqa: F401 -- the latter installs the former

SOURCE = """
from numba import njit

@njit(cache=True)
def double(x):
    return 2 * x

@njit(cache=True)
def triple(x):
    return 3 * x
"""
NOWHERE = "/dev/null/none"


@pytest.fixture
def declare(tmp_path, monkeypatch):
    """Declare the functions anew, as the next process does; its folder for caches is ``tmp_path / "cache"``."""
    source = tmp_path / "declared_functions.py"
    source.write_text(SOURCE)
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "cache"))
    # Not beside the source, which root may write to whatever its permissions say.
    monkeypatch.setattr(numba.core.caching.InTreeCacheLocator, "from_function", lambda *_: None)
    monkeypatch.setenv("XDG_CACHE_HOME", NOWHERE)

    def declared():
        numba_cache_cpu._tell.cache_clear()
        spec = importlib.util.spec_from_file_location(source.stem, source)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return declared


def told(caplog):
    """What was told since the last call."""
    messages = [record.getMessage() for record in caplog.records if record.name == numba_cache_cpu.__name__]
    caplog.clear()
    assert all(message.endswith(numba_cache_cpu.REMEDY) for message in messages)
    return messages


def hits(function):
    return sum(function.stats.cache_hits.values())


def test_a_folder_that_can_be_used_is_not_spoken_of(declare, caplog):
    for expected in (0, 1):
        module = declare()
        assert (module.double(2), module.triple(2)) == (4, 6)
        assert (hits(module.double), hits(module.triple)) == (expected, expected)
    assert told(caplog) == []


def test_a_kernel_is_compiled_anew_when_what_it_calls_has_changed(declare, tmp_path, monkeypatch):
    """Its own file is as it was."""
    sources = numba_cache_cpu._sources.__wrapped__
    monkeypatch.setattr(numba_cache_cpu, "_sources", lambda: sources(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "declared_functions.py").write_text(
        "from called_function import called\n" + SOURCE.replace("2 * x", "called(x)")
    )
    for factor, expected in ((2, 0), (2, 1), (11, 0)):
        (tmp_path / "called_function.py").write_text(
            f"from numba import njit\n\n@njit\ndef called(x):\n    return {factor} * x\n"
        )
        monkeypatch.delitem(sys.modules, "called_function", raising=False)
        module = declare()
        assert (module.double(2), module.triple(2)) == (2 * factor, 6)
        assert (hits(module.double), hits(module.triple)) == (expected, expected)


def test_without_any_folder_kernels_are_compiled_and_it_is_told_once(declare, monkeypatch, caplog):
    monkeypatch.setattr(numba.config, "CACHE_DIR", NOWHERE)
    module = declare()
    assert (module.double(2), module.triple(2)) == (4, 6)
    (message,) = told(caplog)
    assert f"NUMBA_CACHE_DIR={NOWHERE} and the folder for caches" in message
    assert "each start compiles them again" in message


def test_another_folder_than_the_one_that_was_named_is_told(declare, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(numba.config, "CACHE_DIR", NOWHERE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    declare()
    (message,) = told(caplog)
    assert f"NUMBA_CACHE_DIR={NOWHERE} cannot be written to" in message
    assert f"kept in {tmp_path / 'home' / 'numba'}; " in message


def test_a_full_disk_costs_the_next_start_its_time_and_nothing_else(declare, tmp_path, caplog):
    """No file can grow past a limit of this process, which ends a write as a full disk does."""
    module = declare()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, limits[1]))
    try:
        results = module.double(2), module.triple(2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert results == (4, 6)
    (message,) = told(caplog)
    assert f"cannot be kept in {tmp_path / 'cache'}" in message and "(File too large)" in message
    for expected in (0, 1):
        module = declare()
        assert module.double(2) == 4 and hits(module.double) == expected
    assert told(caplog) == []


@pytest.mark.parametrize("suffix", [".nbi", ".nbc"])
def test_files_that_were_cut_off_are_compiled_anew(declare, tmp_path, caplog, suffix):
    module = declare()
    module.double(2), module.triple(2)
    files = list((tmp_path / "cache").rglob(f"*{suffix}"))
    assert len(files) == 2
    for file in files:
        file.write_bytes(b"")
    module = declare()
    assert (module.double(2), module.triple(2)) == (4, 6)
    (message,) = told(caplog)
    assert f"in {tmp_path / 'cache'}" in message and "cannot be read and are compiled anew" in message
    module = declare()
    assert module.double(2) == 4 and hits(module.double) == 1
    assert told(caplog) == []


def test_a_name_that_numba_does_not_know_stays_an_error(declare, monkeypatch):
    monkeypatch.setattr(numba.config, "CACHE_LOCATOR_CLASSES", "NoSuchLocator")
    with pytest.raises(RuntimeError, match="NoSuchLocator"):
        declare()
