"""Every Triton operation on this machine's GPU: its values against the references, its time against the card's.

Needs PyTorch, Triton and NumPy alone. Values come first: ragged lengths at every head shape and at an odd one;
then, at every shape that is timed, those of the last request. Times are between CUDA events around one call, behind
a read that empties the L2 cache, and once more for the call captured in a CUDA graph, which leaves out the host.
Bytes and floating-point operations are counted from shapes; a copy and a matrix product are the card's limits.

Without a GPU, TRITON_INTERPRET=1 runs the same at tiny shapes in Triton's interpreter: then only the values count.
The exit status is 1 where a value is wrong, an operation fails, or nothing was compared.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import math
import platform
import shlex
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton

from fathom.benchmarks.gpu_cases import OPERATIONS, Operation
from fathom.benchmarks.gpu_inputs import Problem, Setting
from fathom.benchmarks.gpu_timing import Clock, limits, rates
from fathom.benchmarks.paper_shapes import SIZES, sized
from fathom.kernels import key_shares
from fathom.kernels.dispatch import INTERPRETED
from fathom.kernels.store_kv import EIGHT_BITS
from fathom.runtime.sglang_host.engine_args import NARROW

SCHEMA = 1
NAMES = [operation.name for operation in OPERATIONS]
KV_DTYPES = dict(zip(NARROW, EIGHT_BITS, strict=True))
ODD = (6, 2, 80, 48)
"""Query heads, KV heads, width of keys and of values: no power of two, values narrower than keys."""
RAGGED, RAGGED_INTERPRETED = (1, 0, 4097, 777, 64), (1, 0, 70)
"""KV entries of each request whose values are compared in full."""
VALUE_COLUMNS = ["kernel", "form", "shape", "result", "max abs error", "relative", "allowed", ""]
TIME_COLUMNS = [
    *("kernel", "form", "shape", "ms", "graph ms", "launch (host, µs)", "GB/s", "of the copy", "TFLOP/s"),
    *("of the product", "bound by", "of the bound", "relative error"),
]


def parser(interpreted: bool) -> argparse.ArgumentParser:
    """Every flag with its default, which is small in the interpreter."""
    p = argparse.ArgumentParser(prog="python -m fathom.benchmarks.gpu_kernels", description=__doc__)
    add, default = p.add_argument, "default: %(default)s"
    sizes = ["tiny"] if interpreted else ["llama-3.1-8b", "qwen3-4b", "tiny"]
    lengths, batch = ([96], [2]) if interpreted else ([8192, 32768, 131072], [1, 16])
    dtype, repeats = ("float32", 1) if interpreted else ("bfloat16", 20)
    add("--sizes", nargs="+", choices=SIZES, default=sizes, help=default)
    add("--lengths", nargs="+", type=int, default=lengths, help=f"KV entries per request ({default})")
    add("--batch", nargs="+", type=int, default=batch, help=f"requests ({default})")
    add("--dtype", choices=["bfloat16", "float16", "float32"], default=dtype, help=default)
    add("--kv-dtype", choices=KV_DTYPES, help="of keys and values (default: --dtype)")
    add("--kernels", nargs="+", choices=NAMES, default=NAMES, metavar="NAME", help=", ".join(NAMES))
    pieces = "programs of a decode launch for each multiprocessor; slow steps have their own"
    add("--pieces", type=int, help=f"{pieces} (default: the engine's)")
    add("--repeats", type=int, default=repeats, help=f"of what is timed ({default})")
    add("--seconds", type=float, default=480.0, help=f"no row is begun later ({default})")
    add("--seed", type=int, default=time.time_ns() % 2**31, help="of the inputs; another one in every run")
    add("--out", type=Path, help="JSON, written anew after every row")
    return p


@contextlib.contextmanager
def poisoned_memory() -> Iterator[None]:
    """What is allocated and not initialised, scratch included, holds NaN, or the largest integer."""
    # torch.use_deterministic_algorithms, which calls this, imports the whole compiler as well.
    switch: Any = torch._C._set_deterministic_algorithms
    before = torch.are_deterministic_algorithms_enabled()
    warn = torch.is_deterministic_algorithms_warn_only_enabled()
    filled = torch._C._get_deterministic_fill_uninitialized_memory()
    switch(True, warn_only=True)
    torch._C._set_deterministic_fill_uninitialized_memory(True)
    try:
        yield
    finally:
        switch(before, warn_only=warn)
        torch._C._set_deterministic_fill_uninitialized_memory(filled)


def errors(got: torch.Tensor, want: torch.Tensor) -> tuple[float, float]:
    """Largest absolute error, and largest ‖got − want‖ / ‖want‖ of a row along the last dimension.

    Equal infinities and NaN in the same places are no error; any other number that is not finite is one without
    bound.

    Raises:
        ValueError: for different shapes.
    """
    if got.shape != want.shape:
        raise ValueError(f"the result is {list(got.shape)}, the reference {list(want.shape)}")
    if not got.numel():
        return 0.0, 0.0
    got, want = got.double(), want.double()
    same = (got == want) | (got.isnan() & want.isnan())
    off = torch.where(same, 0.0, got - want).abs().nan_to_num(nan=math.inf)
    wrong, size = off.norm(dim=-1), torch.where(want.isfinite(), want, 0.0).norm(dim=-1)
    return float(off.max()), float(torch.where(wrong == 0, 0.0, wrong / size).max())


class Run:
    """One run: what was compared, timed, left out and found wrong."""

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        self.args, self.device, self.dtype = args, device, getattr(torch, args.dtype)
        self.begun, self.rows, self.alive = time.monotonic(), 0, True
        self.values: list[dict[str, Any]] = []
        self.times: list[dict[str, Any]] = []
        self.left_out: list[str] = []
        self.failures: list[str] = []
        self.limits: dict[str, Any] = {}
        self.clock = Clock(device, args.repeats)

    def run(self, heads: dict[tuple[int, int, int, int], str]) -> None:
        """Everything, values first; ``heads`` names the head shapes."""
        chosen = [operation for operation in OPERATIONS if operation.name in self.args.kernels]
        ragged = RAGGED_INTERPRETED if INTERPRETED else RAGGED
        print(f"\n## Values, {self.args.dtype}\n")
        print_header(VALUE_COLUMNS)
        for shape in (*heads, ODD):
            for operation in chosen:
                for arguments in operation.checked:
                    label = " ".join(f"{key}={value}" for key, value in arguments.items())
                    self.attempt(operation, label, shape, ragged, arguments, timed=False)
        self.limits = limits(self.clock, self.dtype) if self.alive else {}
        print(f"\n## Times, {self.args.dtype}, {self.result()['clock']}\n")
        for name, limit in self.limits.items():
            rate = limit.get("bytes_per_s", 0) / 1e9 or limit["flops_per_s"] / 1e12
            print(f"{name}: {rate:,.0f} {'GB/s' if name == 'copy' else 'TFLOP/s'}\n")
        print_header(TIME_COLUMNS)
        for shape in heads:
            for batch in self.args.batch:
                for length in self.args.lengths:
                    for operation in chosen:
                        if operation.single and batch != min(self.args.batch):
                            continue
                        requests = 1 if operation.single else batch
                        for form in operation.timed:
                            if requests > 1 or not form.several:
                                lengths = form.lengths(length, requests)
                                self.attempt(
                                    operation, form.label, shape, lengths, form.arguments, timed=True
                                )

    def attempt(
        self,
        operation: Operation,
        form: str,
        shape: tuple[int, int, int, int],
        lengths: tuple[int, ...],
        arguments: dict[str, Any],
        timed: bool,
    ) -> None:
        """A row, unless time is up. One that fails must not hide the others."""
        self.rows += 1
        kv_dtype = KV_DTYPES.get(self.args.kv_dtype)
        setting = Setting(*shape, lengths, self.dtype, self.device, self.args.seed + self.rows, kv_dtype)
        name = ", ".join(filter(None, (operation.name, form, setting.shape())))
        if not self.alive or time.monotonic() - self.begun > self.args.seconds:
            self.left_out.append(f"{name}{' (timed)' if timed else ''}")
            return
        row = {"kernel": operation.name, "form": form, "shape": setting.shape(), "dtype": self.args.dtype}
        row |= {"kv_dtype": self.args.kv_dtype} if kv_dtype else {}
        try:
            problem = operation.build(setting, **arguments)
            relative = self.check(row, name, problem, timed)
            if timed:
                self.time(row, problem, relative)
        except torch.OutOfMemoryError:
            self.left_out.append(f"{name} (out of memory)")
        except NotImplementedError as reason:
            self.left_out.append(f"{name} ({reason})")
        except Exception as error:
            traceback.print_exc()
            self.fail(f"{name}: {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}")
            self.alive = self.answers()
        if self.device.type == "cuda" and self.alive:
            torch.cuda.empty_cache()
        self.write()

    def check(self, row: dict[str, Any], name: str, problem: Problem, timed: bool) -> float:
        """Compare one call with the reference, where it is timed that of its last request; the largest error."""
        problem.poison()
        with poisoned_memory():
            got = problem.call()
        largest = 0.0
        with torch.device(self.device):
            for result, mine, reference, allowed in problem.pairs(got, timed):
                absolute, relative = errors(mine, reference)
                largest, ok = max(largest, relative), relative <= allowed
                found = {
                    "result": result,
                    "max_abs": absolute,
                    "relative": relative,
                    "allowed": allowed,
                    "ok": ok,
                }
                self.values.append(row | {"timed_shape": timed} | found)
                if not timed:
                    cells = [*map(row.get, ("kernel", "form", "shape")), result, absolute, relative, allowed]
                    print_row([*cells, "ok" if ok else "WRONG"])
                if not ok:
                    self.fail(
                        f"{name}: {result}: relative error {relative:.2e} of a row, allowed {allowed:.0e}"
                    )
        return largest

    def time(self, row: dict[str, Any], problem: Problem, relative: float) -> None:
        """Time a call and note it with its rates."""
        timed = row | self.clock.measure(problem.call) | {"bytes": problem.bytes, "flops": problem.flops}
        timed |= rates(timed, self.limits, self.args.dtype)
        self.times.append(timed)
        call, graph, host = (timed[f"{kind}seconds"] for kind in ("", "graph_", "host_"))
        shown = f"{call['median'] * 1e3:.3f} [{call['min'] * 1e3:.3f}–{call['max'] * 1e3:.3f}]"
        replay = f"{graph['median'] * 1e3:.3f}" if graph else timed["no_graph"]
        launch = f"{host['median'] * 1e6:.0f}" if host else "–"
        cells = [*map(row.get, ("kernel", "form", "shape")), shown, replay, launch]
        numbers = ("gb_per_s", "share_of_copy", "tflop_per_s", "share_of_matmul", "bound", "share_of_bound")
        print_row([*cells, *("–" if timed[key] is None else timed[key] for key in numbers), relative])

    def answers(self) -> bool:
        """Whether the device still works after a failure; what follows an illegal access would fail as well."""
        if self.device.type != "cuda":
            return True
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:
            self.fail(f"the device no longer answers: {str(error).strip().partition(chr(10))[0]}")
            return False
        return True

    def fail(self, line: str) -> None:
        """Note what is wrong, at once."""
        self.failures.append(line)
        print(f"FAILED: {line}", file=sys.stderr, flush=True)

    def result(self) -> dict[str, Any]:
        """What the JSON holds."""
        return {
            "schema": SCHEMA,
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "command": shlex.join(["python", "-m", "fathom.benchmarks.gpu_kernels", *self.args.given]),
            "device": describe(self.device),
            "versions": versions(),
            "interpreted": INTERPRETED,
            "clock": "CUDA events" if self.device.type == "cuda" else "host time of the interpreter",
            "settings": {key: value for key, value in vars(self.args).items() if key not in ("out", "given")},
            "limits": self.limits,
            "values": self.values,
            "times": self.times,
            "left_out": self.left_out,
            "failures": self.failures,
            "run_seconds": time.monotonic() - self.begun,
        }

    def write(self) -> None:
        """The JSON, whole at any time."""
        write_json(self.args.out, self.result())


def write_json(file: Path | None, result: dict[str, Any]) -> None:
    """The result as a file, if there is to be one."""
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(finite(result), indent=1, allow_nan=False) + "\n")


def finite(value: Any) -> Any:
    """The same without numbers that JSON does not have: they become words."""
    if isinstance(value, dict):
        return {key: finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite(each) for each in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def describe(device: torch.device) -> dict[str, Any]:
    """The card, or what stands in for one."""
    if device.type != "cuda":
        return {"name": f"Triton's interpreter on {platform.machine()}, no GPU"}
    found = torch.cuda.get_device_properties(device)
    return {
        "name": found.name,
        "capability": [found.major, found.minor],
        "multiprocessors": found.multi_processor_count,
        "memory_bytes": found.total_memory,
        "l2_bytes": found.L2_cache_size,
    }


def versions() -> dict[str, str | None]:
    """Of what a run needs."""
    own = {"python": platform.python_version(), "torch": torch.__version__, "triton": triton.__version__}
    return own | {"numpy": np.__version__, "cuda": torch.version.cuda}


def print_row(cells: list[Any]) -> None:
    """One line of a Markdown table, at once."""
    shown = [f"{cell:.3g}" if isinstance(cell, float) else str(cell) for cell in cells]
    print("| " + " | ".join(shown) + " |", flush=True)


def print_header(columns: list[str]) -> None:
    """A table's head."""
    print_row(columns)
    print("|" + ":--|" * len(columns), flush=True)


def main(argv: list[str]) -> int:
    """Check, time, print, write; 1 where something is wrong."""
    p = parser(INTERPRETED)
    args = p.parse_args(argv, argparse.Namespace(given=argv))
    cuda = torch.cuda.is_available() and not INTERPRETED
    if not cuda and not INTERPRETED:
        p.error("there is no GPU here; TRITON_INTERPRET=1 runs the kernels in Triton's interpreter")
    if INTERPRETED and args.dtype == "bfloat16":
        p.error("Triton's interpreter multiplies bfloat16 wrongly; use --dtype float32 or float16")
    args.pieces = key_shares.PIECES_PER_PROCESSOR if args.pieces is None else args.pieces
    if args.pieces <= 0:
        p.error(f"--pieces must be at least 1, got {args.pieces}")
    key_shares.PIECES_PER_PROCESSOR = args.pieces
    torch.set_float32_matmul_precision("highest")
    heads: dict[tuple[int, int, int, int], str] = {}
    for name in args.sizes:
        size = sized(name)
        shape = size.heads, size.kv_heads, size.head_dim, size.head_dim
        heads[shape] = f"{heads[shape]}, {name}" if shape in heads else name
    run = Run(args, torch.device("cuda" if cuda else "cpu"))
    print(f"{describe(run.device)['name']}; {versions()}; seed {args.seed}\n")
    for shape, names in heads.items():
        print(f"{names}: {shape[0]} query heads, {shape[1]} KV heads of {shape[2]}")
    run.run(heads)
    wrong, compared = len(run.failures), len(run.values)
    print(f"\n{compared} comparisons, {wrong} failures, {len(run.times)} timed rows.")
    if not compared:
        run.fail("no value was compared")
    if run.left_out:
        print(f"Left out ({len(run.left_out)}):", *run.left_out, sep="\n- ")
    run.write()
    return int(bool(run.failures))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
