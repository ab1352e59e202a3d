"""Compiles Triton kernels ahead of time, without a GPU, and says what registers and shared memory they take.

A module with Triton kernels offers ``specializations()``, a list of :class:`Specialization` (or plain tuples of its
fields; the label may be left out), and is then found by :func:`discover`: nothing is registered anywhere else.
"""

import importlib
import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

SHARED_MEMORY = {80: 101_376, 90: 232_448, 100: 232_448}
"""Most bytes of shared memory per block, by compute capability times ten (CUDA C++ Programming Guide, "Technical
Specifications per Compute Capability": 99 and 227 KiB). What is compiled for 8.0, which has 163, stands for 8.6 and
8.9 too: Triton gives a kernel as much there."""

REGISTERS = 255
"""Most registers per thread; beyond them values spill to memory."""

FEW_SPILLED_BYTES = 16
"""ptxas sets a value or two aside around a loop to fit one more block on a processor: harmless where registers are
left, and told apart from running out of them by that."""

_ROOTS = ("kernels", "runtime")


class Specialization(NamedTuple):
    """One compiled form of a kernel, as a launch would ask for it.

    Attributes:
        label: operation, shape and dtype in words.
        kernel: the function decorated with ``triton.jit``.
        signature: type of each argument: "*bf16", "i32", "fp32", "constexpr".
        constants: values of the constexprs.
        options: ``num_warps`` and ``num_stages``, where the launch sets them.
        least: compute capability times ten from which on GPUs have what it asks for.
    """

    label: str
    kernel: Any
    signature: dict[str, str]
    constants: dict[str, Any]
    options: Mapping[str, int] = MappingProxyType({})
    least: int = 80


@dataclass(frozen=True)
class Resources:
    """What one block takes: registers per thread; spilled bytes per thread; bytes of shared memory."""

    registers: int
    spilled: int
    shared: int

    def problems(self, arch: int) -> list[str]:
        """What is wrong with this on compute capability ``arch`` / 10, in words; empty if nothing is."""
        found = []
        if self.spilled > (FEW_SPILLED_BYTES if self.registers < REGISTERS else 0):
            found.append(f"{self.spilled} bytes per thread spill beside {self.registers} registers")
        if self.shared > SHARED_MEMORY[arch]:
            found.append(f"{self.shared} bytes of shared memory, of {SHARED_MEMORY[arch]}")
        return found


@dataclass(frozen=True)
class ModelHeads:
    """The attention of a model that kernels are compiled for; ``dtype`` is Triton's name, of queries and KV."""

    name: str
    heads: int
    kv_heads: int
    head_dim: int
    dtype: str

    @staticmethod
    def common() -> "list[ModelHeads]":
        """Llama-3.1-8B and Qwen3-4B have the same attention; wide heads in large groups; and the demo pair."""
        return [
            ModelHeads("Llama-3.1-8B and Qwen3-4B bf16", 32, 8, 128, "bf16"),
            ModelHeads("16/2x256 bf16", 16, 2, 256, "bf16"),
            ModelHeads("demo pair bf16", 4, 2, 64, "bf16"),
            ModelHeads("demo pair fp32", 4, 2, 64, "fp32"),
        ]


def normalise(item: tuple) -> Specialization:
    """A tuple of a specialization's fields, label present or not."""
    if isinstance(item[0], str):
        return Specialization(*item)
    constants = " ".join(f"{name}={value}" for name, value in item[2].items())
    return Specialization(f"{item[0].__name__.strip('_')} {constants}", *item)


def discover() -> Iterator[tuple[str, Specialization]]:
    """Name of the module and specialization, for every module of ours that offers some."""
    top = Path(__file__).resolve().parents[1]
    for root in _ROOTS:
        for path in sorted((top / root).rglob("*.py")):
            if re.search(r"^def specializations\(", path.read_text(), re.M):
                name = ".".join(path.relative_to(top).with_suffix("").parts)
                for item in importlib.import_module(f"fathom.{name}").specializations():
                    yield name, normalise(item)


NARROW_KV = ("fp8e4nv", "fp8e5")
"""Triton's names of the types of keys and values in ``store_kv.EIGHT_BITS``, in the same order."""


def least_for(dtype: str) -> int:
    """Compute capability times ten from which on GPUs have numbers of a type of Triton's."""
    return 89 if dtype == "fp8e4nv" else 80


def signature(kernel: Any, types: dict[str, str], constants: dict[str, Any]) -> dict[str, str]:
    """Type of each of the kernel's arguments: as given, "constexpr" for constants, "i32" for the rest."""
    return {name: "constexpr" if name in constants else types.get(name, "i32") for name in kernel.arg_names}


def compile_ahead(specialization: Specialization, arch: int) -> Resources:
    """Compile for compute capability ``arch`` / 10, as for a launch whose pointers and strides are divisible by 16.

    Raises:
        Exception: Triton's, for what does not compile.
        TypeError: when the process runs Triton's interpreter, whose kernels cannot be compiled.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    label, kernel, types, constants, options, _ = specialization
    if not isinstance(kernel, triton.runtime.JITFunction):
        raise TypeError(f"{label}: {type(kernel).__name__} cannot be compiled")
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, (name, kind) in enumerate(types.items())
        if (kind.startswith("*") or ("stride" in name and kind != "constexpr"))
        and not kernel.params[index].do_not_specialize
    }
    source = ASTSource(kernel, types, constants, aligned)
    compiled = triton.compile(
        source, target=GPUTarget("cuda", arch, 32), options={"enable_fp_fusion": True, **options}
    )
    return _resources(compiled.asm["cubin"], compiled.metadata.shared)


def _resources(cubin: bytes, shared: int) -> Resources:
    """Read the binary's own table; what a kernel without local arrays keeps on its stack has been spilled."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    usage = {name: int(value) for name, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", text)}
    return Resources(usage["REG"], usage["STACK"] + usage["LOCAL"], shared)
