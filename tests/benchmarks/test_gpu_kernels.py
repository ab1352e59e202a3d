"""The run on a GPU, without one: in Triton's interpreter, with planted errors, and with few packages."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fathom.benchmarks import gpu_attention, gpu_cases, gpu_kernels, gpu_timing
from fathom.benchmarks.gpu_inputs import Setting
from fathom.kernels import key_shares
from fathom.kernels.triton_aot import discover

ROOT = Path(__file__).resolve().parents[2]
# The same inputs in every run: a logit that is alone in its row and nearly 0 may be off by more than is allowed.
SMALL = ["--lengths", "24", "--batch", "2", "--dtype", "float32", "--seed", "1"]

# What PyTorch and Triton need of their own, and what a machine with nothing else has.
ALLOWED = """
import importlib, sys
from importlib.abc import MetaPathFinder

TORCH = "torch torchgen functorch sympy mpmath networkx jinja2 markupsafe filelock fsspec typing_extensions"
ALLOWED = {*sys.stdlib_module_names, *TORCH.split(), "triton", "numpy", "fathom"}
ALLOWED |= {"interpreter_pace", "interpreter_scans"}

class Refuse(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top not in ALLOWED and not top.startswith("_sysconfigdata"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Refuse())
"""

IMPORTS = """
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        print(name, error.name)
"""

# Notes which kernels are launched, by module and name, then does what it is asked.
LAUNCHES = """
import json
from triton.runtime.interpreter import InterpretedFunction
from fathom.benchmarks import gpu_kernels

# The interpreter runs one program after the other.
sys.path.append(sys.argv.pop(1))
import interpreter_pace, interpreter_scans
from fathom.kernels import key_shares, selector_scores, stable_top_k

interpreter_pace.install()
interpreter_scans.install()
key_shares.PIECES_PER_PROCESSOR = 0.5
selector_scores.PARTS = selector_scores.REFINERS = stable_top_k.PARTS = 2

launched, run = set(), InterpretedFunction.run

def noted(self, *arguments, **options):
    launched.add((self.fn.__module__, self.fn.__name__))
    return run(self, *arguments, **options)

InterpretedFunction.run = noted
status = gpu_kernels.main(sys.argv[2:])
with open(sys.argv[1], "w") as file:
    json.dump(sorted(launched), file)
sys.exit(status)
"""

# One number of decode attention is wrong; then the last request is not written at all; then a kernel fails.
PLANTED = """
import sys
from fathom.benchmarks import gpu_attention, gpu_cases, gpu_kernels

decode, pack = gpu_attention.paged_decode, gpu_cases.pack_segment

def wrong(*given):
    output, lse = decode(*given)
    output[0, -1, 3] += 0.01
    return output, lse

def half(*given):
    query, keys, values, table, rows, lengths, scale, pieces, output = given
    first = query[:-1], keys, values, table, rows[:-1], lengths[:-1]
    _, lse = decode(*first, scale, pieces, output[:-1])
    return output, gpu_attention.torch.cat((lse, lse[:1]))

def broken(*given):
    raise RuntimeError("no such instruction")

statuses = []
for planted in (wrong, half):
    gpu_attention.paged_decode = planted
    statuses.append(gpu_kernels.main(["--kernels", "paged_decode", *sys.argv[1:]]))
gpu_cases.pack_segment = broken
statuses.append(gpu_kernels.main(["--kernels", "pack_segment", "stable_top_k", *sys.argv[1:]]))
print(statuses)
"""


def run_python(code: str, *arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory):
    """A whole run in the interpreter: its result, what it printed, and the kernels that it launched."""
    folder = tmp_path_factory.mktemp("gpu")
    out, launched = folder / "out.json", folder / "launched.json"
    there = ROOT / "tests", launched
    done = run_python(ALLOWED + LAUNCHES, *there, *SMALL, "--out", out, TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stderr
    return json.loads(out.read_text()), done.stdout, json.loads(launched.read_text())


def test_every_triton_kernel_is_launched(interpreted):
    """Those that are compiled ahead of time are all there are: ``tests/kernels/test_compile.py``.

    But one that is for bfloat16 alone, which the interpreter multiplies wrongly.
    """
    kernels = {(item.kernel.__module__, item.kernel.__name__) for _, item in discover()}
    assert ("fathom.kernels.span_tables", "_span_tables") in kernels
    left = kernels - {tuple(each) for each in interpreted[2]}
    assert left == {("fathom.kernels.segments_by_warp", "_by_warp_kernel")}


def test_keys_and_values_of_8_bits_are_compared(tmp_path):
    out, kernels = tmp_path / "out.json", ["paged_decode", "pooled_max_scores", "store_kv"]
    there = ROOT / "tests", tmp_path / "launched.json"
    narrow = *SMALL, "--kv-dtype", "fp8_e4m3", "--kernels", *kernels, "--out", out
    done = run_python(ALLOWED + LAUNCHES, *there, *narrow, TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stderr
    rows, times = (json.loads(out.read_text())[name] for name in ("values", "times"))
    assert {(row["kernel"], row["kv_dtype"]) for row in rows} == {(name, "fp8_e4m3") for name in kernels}
    assert all(row["ok"] for row in rows)
    # Two requests of 24 entries, 2 KV heads of 16, keys and values of a byte; slots, queries, outputs and sums.
    kv, query = 48 * 2 * 2 * 16, 2 * 4 * (2 * 16 + 1) * 4 + 2 * 8
    assert times[0]["bytes"] == kv + query + 48 * 4


def test_values_are_right_and_compared_in_every_form(interpreted):
    result = interpreted[0]
    rows = result["values"]
    for operation in gpu_cases.OPERATIONS:
        own = [row for row in rows if row["kernel"] == operation.name]
        ragged = {(row["form"], row["shape"]) for row in own if not row["timed_shape"]}
        assert len(ragged) == 2 * len(operation.checked)
        timed = {row["form"] for row in own if row["timed_shape"]}
        assert timed == {form.label for form in operation.timed}
    assert all(row["ok"] and row["relative"] <= row["allowed"] for row in rows)
    assert result["failures"] == result["left_out"] == []


def test_the_result_says_what_was_run_and_claims_no_rates_without_a_gpu(interpreted):
    result, printed, _ = interpreted
    assert result["interpreted"] and result["limits"] == {} and "no GPU" in result["device"]["name"]
    assert (
        result["versions"]["torch"] == torch.__version__ and result["versions"]["cuda"] == torch.version.cuda
    )
    assert result["settings"]["lengths"] == [24] and "--batch 2" in result["command"]
    assert {row["kernel"] for row in result["times"]} == set(gpu_kernels.NAMES)
    for row in result["times"]:
        assert row["bytes"] > 0 and row["seconds"]["n"] == 1 and row["seconds"]["median"] > 0
        claims = ("gb_per_s", "share_of_copy", "tflop_per_s", "share_of_matmul", "bound", "share_of_bound")
        assert [row[key] for key in (*claims, "graph_seconds", "host_seconds")] == [None] * 8
    assert "## Times, float32, host time of the interpreter" in printed
    tables = [line for line in printed.splitlines() if line.startswith("| ")]
    assert len(tables) == 2 + sum(not row["timed_shape"] for row in result["values"]) + len(result["times"])


def test_planted_errors_are_found():
    done = run_python(PLANTED, *SMALL, TRITON_INTERPRET="1")
    assert done.stdout.splitlines()[-1] == "[1, 1, 1]", done.stderr
    found = [line for line in done.stderr.splitlines() if line.startswith("FAILED: ")]
    assert any(
        "paged_decode, pieces=1, 1/0/70, 4/2 heads of 16: output: relative error" in line for line in found
    )
    assert any(
        line.startswith("FAILED: paged_decode, pages of 1, 2 x 24") and "inf of a row" in line
        for line in found
    )
    broken = [line for line in found if "no such instruction" in line]
    assert len(broken) == 3 and all("pack_segment" in line for line in broken)
    assert "| stable_top_k |" in done.stdout.split("## Times")[-1]


def test_without_a_gpu_and_without_the_interpreter_it_refuses(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="2"):
        gpu_kernels.main([])
    assert "TRITON_INTERPRET=1" in capsys.readouterr().err
    monkeypatch.setattr(gpu_kernels, "INTERPRETED", True)
    with pytest.raises(SystemExit, match="2"):
        gpu_kernels.main(["--dtype", "bfloat16"])
    assert "multiplies bfloat16 wrongly" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        gpu_kernels.main(["--pieces", "0"])
    assert "--pieces must be at least 1, got 0" in capsys.readouterr().err


def test_nothing_is_begun_when_time_is_up(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu_kernels, "INTERPRETED", True)
    out = tmp_path / "out.json"
    few = [
        "--kernels",
        "span_tables",
        "--dtype",
        "float32",
        "--sizes",
        "tiny",
        "--lengths",
        "64",
        "--batch",
        "3",
    ]
    monkeypatch.setattr(key_shares, "PIECES_PER_PROCESSOR", 4)
    assert gpu_kernels.main([*few, "--seconds", "0", "--pieces", "6", "--out", str(out)]) == 1
    assert key_shares.PIECES_PER_PROCESSOR == 6
    left_out = json.loads(out.read_text())["left_out"]
    assert len(left_out) == 5 and left_out[-1] == "span_tables, 3 x 64, 4/2 heads of 16 (timed)"
    assert json.loads(out.read_text())["failures"] == ["no value was compared"]
    assert "Left out (5):" in capsys.readouterr().out


def test_errors_are_of_rows_and_see_what_is_not_finite():
    want = torch.tensor([[3.0, 4.0], [0.0, 0.0], [300.0, -math.inf]])
    assert gpu_kernels.errors(want.clone(), want) == (0, 0)
    got = want.clone()
    got[0, 1] = 4.5
    assert gpu_kernels.errors(got, want) == pytest.approx((0.5, 0.1))
    for row, column, value in (
        (1, 0, 1e-30),
        (0, 0, math.nan),
        (2, 1, math.inf),
        (2, 1, 0.0),
        (0, 0, -math.inf),
    ):
        got = want.clone()
        got[row, column] = value
        assert gpu_kernels.errors(got, want)[1] == math.inf
    nothing = torch.full((2, 3), math.nan)
    assert gpu_kernels.errors(nothing.clone(), nothing) == (0, 0)
    with pytest.raises(ValueError, match="the reference"):
        gpu_kernels.errors(want[:2], want)


def test_memory_is_poisoned():
    with gpu_kernels.poisoned_memory():
        assert torch.empty(3).isnan().all() and torch.zeros(2).new_empty(4, dtype=torch.float16).isnan().all()
        assert (torch.empty(3, dtype=torch.int32) == torch.iinfo(torch.int32).max).all()
    assert not torch.are_deterministic_algorithms_enabled()


def setting(lengths, dtype=torch.bfloat16):
    return Setting(8, 2, 16, 16, lengths, dtype, torch.device("cpu"), 0)


def test_bytes_and_operations_of_decode_attention():
    """Two requests of 3 and 5 entries; 8 query heads, 2 KV heads of 16, bfloat16."""
    problem = gpu_attention.decode(setting((3, 5)))
    kv, table = 8 * 2 * 2 * 16 * 2, 8 * 4
    query_and_output, lse, numbers = 2 * 2 * 8 * 16 * 2, 2 * 8 * 4, 2 * 2 * 4
    assert problem.bytes == kv + table + query_and_output + lse + numbers
    # A product and a sum per number of the key, likewise of the value.
    assert problem.flops == 8 * 8 * (2 * 16 + 2 * 16)


def test_bytes_and_operations_of_prefill():
    """Two new tokens over a prefix of 3 and one over none: 4 + 5 pairs, and 1."""
    problem = gpu_attention.extend(setting((5, 1), torch.float32), new=2)
    kv, table = 6 * 2 * 2 * 16 * 4, 3 * 4
    query_and_output, lse, numbers = 3 * 2 * 8 * 16 * 4, 3 * 8 * 4, (2 + 2 + 3) * 4
    assert problem.bytes == kv + table + query_and_output + lse + numbers
    assert problem.flops == 10 * 8 * (2 * 16 + 2 * 16)


def test_bytes_of_a_copy_and_rates():
    """A tenth of 40 entries in float32: read and written; each with the slots that it comes from and goes to."""
    problem = gpu_cases.compact(setting((40,), torch.float32))
    assert problem.bytes == 4 * (2 * 2 * 2 * 16 * 4 + 2 * 8 + 8) and problem.flops == 0
    limits = {"copy": {"bytes_per_s": 2e12}, "bfloat16": {"flops_per_s": 5e14}}
    row = {"seconds": {"median": 4e-3}, "graph_seconds": {"median": 2e-3}, "bytes": 3e9, "flops": 1e11}
    found = gpu_timing.rates(row, limits, "bfloat16")
    assert found["gb_per_s"] == pytest.approx(1500) and found["share_of_copy"] == pytest.approx(0.75)
    assert found["tflop_per_s"] == pytest.approx(50) and found["share_of_matmul"] == pytest.approx(0.1)
    assert found["bound"] == "bytes" and found["share_of_bound"] == pytest.approx(0.75)
    slow = gpu_timing.rates(row | {"graph_seconds": None, "flops": 1e12}, limits, "bfloat16")
    assert slow["bound"] == "operations" and slow["share_of_bound"] == pytest.approx(0.5)


# Kernels for CPUs that are not called so.
NUMBA = {f"fathom.kernels.{name}" for name in ("rms_norm", "rotary", "silu_and_mul")}


def test_what_a_gpu_needs_is_imported_with_few_packages():
    kernels = [path for path in (ROOT / "kernels").glob("*.py") if not path.stem.endswith("_cpu")]
    rooms = ("sfi", "fastkv", "specprefill", "draft", "kv")
    runtime = [path for room in rooms for path in (ROOT / "runtime" / room).glob("*.py")]
    runtime += [ROOT / "runtime" / f"{name}.py" for name in ("plan", "staircase", "retain", "decode")]
    assert len(kernels) > 15 and len(runtime) > 25
    names = [
        ".".join(("fathom", *path.relative_to(ROOT).with_suffix("").parts)) for path in kernels + runtime
    ]
    modules = "fathom.benchmarks.gpu_kernels", "fathom.benchmarks.gpu_refresh"
    done = run_python(ALLOWED + IMPORTS, *modules, *names)
    assert done.returncode == 0, done.stderr
    assert {tuple(line.split()) for line in done.stdout.splitlines()} == {(name, "numba") for name in NUMBA}
