"""Every Triton kernel compiled ahead for GPUs of three kinds, by the Triton that they get: it fits, and keeps its
values in registers.

A kernel takes part by offering ``specializations()`` in its module; see ``fathom.kernels.triton_aot``.
"""

import ast
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import gpu_triton
import pytest
import triton
import triton.language as tl

from fathom.benchmarks import triton_resources
from fathom.kernels.triton_aot import (
    SHARED_MEMORY,
    Resources,
    Specialization,
    compile_ahead,
    discover,
    normalise,
    signature,
)

ROOT = Path(__file__).resolve().parents[2]
FOUND = list(discover())
FORMS = [(i, arch) for i, (_, item) in enumerate(FOUND) for arch in SHARED_MEMORY if arch >= item.least]


def compile_found(index: int, arch: int) -> list[str]:
    """The problems of one specialization, in a process of a pool."""
    assert triton.__version__ == gpu_triton.locked()
    return compile_ahead(FOUND[index][1], arch).problems(arch)


@pytest.fixture(scope="module")
def compiled():
    """Every specialization for every device, in two processes of their own."""
    spawned = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(2, spawned, initializer=gpu_triton.use) as pool:
        yield {(index, arch): pool.submit(compile_found, index, arch) for index, arch in FORMS}
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize(
    ("index", "arch"), FORMS, ids=[f"{FOUND[index][1].label}-sm_{arch}" for index, arch in FORMS]
)
def test_kernel_compiles_and_fits(compiled, index, arch):
    assert compiled[index, arch].result() == []


def launched_kernels(path: Path) -> set[str]:
    """Names of the jitted functions of a file that are launched in it: ``name[grid](…)``."""
    tree = ast.parse(path.read_text())
    jitted = {
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
        and any("triton.jit" in ast.unparse(d) for d in node.decorator_list)
    }
    calls = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    targets = {ast.unparse(call.value) for call in calls if isinstance(call, ast.Subscript)}
    return jitted & targets


def test_no_launched_kernel_is_left_out():
    compiled = {(name, item.kernel.__name__) for name, item in FOUND}
    launched = {
        (".".join(path.relative_to(ROOT).with_suffix("").parts), kernel)
        for room in ("kernels", "runtime")
        for path in (ROOT / room).rglob("*.py")
        for kernel in launched_kernels(path)
    }
    assert ("kernels.paged_decode", "_decode_kernel") in launched
    assert launched - compiled == set()


@triton.jit
def _hoard(source, target, SIZE: tl.constexpr):
    """Holds twice as many values per thread as there are registers."""
    at = tl.arange(0, SIZE)
    rows = tl.load(source + at[:, None] * SIZE + at[None, :])
    tl.store(target + at[:, None] * SIZE + at[None, :], rows * tl.sum(rows))


def test_a_kernel_that_spills_is_found():
    types = {"source": "*fp32", "target": "*fp32"}
    constants = {"SIZE": 256}
    item = normalise((_hoard, signature(_hoard, types, constants), constants))
    assert item == Specialization("hoard SIZE=256", *item[1:4])
    resources = compile_ahead(item, 90)
    assert resources.spilled > 16
    assert "spill" in resources.problems(90)[0]
    with pytest.raises(TypeError, match="cannot be compiled"):
        compile_ahead(item._replace(kernel=print), 90)


def test_limits_of_the_devices():
    assert Resources(254, 16, 101_376).problems(80) == []
    assert Resources(200, 0, 200_000).problems(90) == []
    assert Resources(200, 0, 110_000).problems(80) == ["110000 bytes of shared memory, of 101376"]
    assert len(Resources(255, 8, 300_000).problems(100)) == 2


def test_the_table(tmp_path, monkeypatch, capsys):
    """Its rows, and an exit code that says whether everything fits."""
    item = Specialization("op 4x4", None, {}, {}, {"num_warps": 8})
    good, bad = Resources(64, 0, 2048), Resources(255, 40, 2048)
    for each, code in ((good, 0), (bad, 1)):
        rows = [("kernels.op", item, dict.fromkeys(SHARED_MEMORY, each))]
        monkeypatch.setattr(triton_resources, "measure", lambda rows=rows: rows)
        out = tmp_path / "table.md"
        assert triton_resources.main(["--out", str(out)]) == code
        cell = f"{each.registers} / {each.spilled} / 2.0"
        cells = " | ".join([cell] * len(SHARED_MEMORY))
        assert out.read_text().splitlines()[-1] == f"| kernels.op | op 4x4 | 8 | {cells} |"
    assert "op 4x4, sm_90: 40 bytes per thread spill" in capsys.readouterr().err
