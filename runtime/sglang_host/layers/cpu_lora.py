"""LoRA adapters without a GPU: SGLang's layers over a backend in plain PyTorch.

SGLang's own backend for PyTorch pins what it keeps on the host, which needs an accelerator, and takes the rows of a
prefill for those of its output matrix. Ours has SGLang's name for it, as the attention backend has.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
from sglang.srt.lora.backend.base_backend import BaseLoRABackend
from sglang.srt.lora.backend.lora_registry import register_lora_backend
from sglang.srt.lora.utils import get_lm_head_pruned_lens
from sglang.srt.model_executor.model_runner import ModelRunner
from torch.overrides import TorchFunctionMode

from fathom.runtime.sglang_host.engine_args import CPU_LORA_BACKEND

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

_init_lora_manager = ModelRunner.init_lora_manager


@dataclass(frozen=True)
class Adapter:
    """An adapter's rows in a pass.

    Attributes:
        slot: its place in SGLang's weight buffers; rank, scale: its own.
        rows: a slice where they are one run, else [rows] int64.
    """

    slot: int
    rank: int
    scale: float
    rows: slice | torch.Tensor

    def of(self, x: torch.Tensor) -> torch.Tensor:
        """Its rows of x [all rows, ...]."""
        return x[self.rows]

    def add(self, output: torch.Tensor, low: torch.Tensor, up: torch.Tensor) -> None:
        """Add ``scale * low @ up.T`` ([rows, rank], [out, rank]) to its rows of output [all rows, out]."""
        if isinstance(self.rows, slice):
            output[self.rows].addmm_(low, up.T, alpha=self.scale)
        else:
            output.index_add_(0, self.rows, low @ up.T, alpha=self.scale)


@dataclass
class AdapterRows:
    """Whose the rows of a pass are: what SGLang's layers know as a batch info.

    Attributes:
        adapters: those that have rows; rows without an adapter are the model's alone.
        expected_tokens: all rows.
    """

    adapters: list[Adapter]
    expected_tokens: int
    has_active_lora: bool = True
    use_cuda_graph: bool = field(default=False, init=False)


def adapter_rows(
    slots: Sequence[int], counts: Sequence[int], ranks: Sequence[int], scales: Sequence[float]
) -> AdapterRows:
    """Rows in runs.

    Args:
        slots: of each run the adapter; counts: its rows.
        ranks, scales: by adapter; rank 0 for none.
    """
    runs: dict[int, list[slice]] = defaultdict(list)
    begin = 0
    for slot, count in zip(slots, counts, strict=True):
        if ranks[slot] > 0 and count > 0:
            if (mine := runs[slot]) and mine[-1].stop == begin:
                mine[-1] = slice(mine[-1].start, begin + count)
            else:
                mine.append(slice(begin, begin + count))
        begin += count
    adapters = [
        Adapter(slot, ranks[slot], scales[slot], mine[0] if len(mine) == 1 else rows_in(mine))
        for slot, mine in runs.items()
    ]
    return AdapterRows(adapters, begin)


def rows_in(runs: Sequence[slice]) -> torch.Tensor:
    """The rows of several runs: [rows] int64."""
    return torch.from_numpy(np.concatenate([np.arange(run.start, run.stop) for run in runs]))


class CpuLoRABackend(BaseLoRABackend):
    """Two thin matrix products for each adapter that has rows, however its rows lie.

    Weights are SGLang's: of an adapter of rank r, projection i of several in one matrix has rows ``i * r`` to
    ``(i + 1) * r`` of ``a`` [slots, projections * most, in], and its own outputs' rows of ``b`` [slots, out, most],
    of which the first r columns count.
    """

    name = CPU_LORA_BACKEND
    skip_inactive_lora_batches = True
    """Steps in which nobody has an adapter are the model's own."""

    def __init__(self, max_loras_per_batch: int, device: torch.device, **_: Any) -> None:
        super().__init__(max_loras_per_batch, device)

    def validate_lora_targets(self, base_model: torch.nn.Module, target_modules: set[str]) -> None:
        """ValueError for experts that adapters would change: SGLang's layer for them launches Triton kernels."""
        experts = any(isinstance(module, FusedMoE) for module in base_model.modules())
        if experts and {"gate_up_proj", "down_proj"} <= target_modules:
            raise ValueError(
                "adapters that change a model's experts (gate_proj, up_proj, down_proj) need a GPU; those of its "
                "attention do not"
            )

    def prepare_lora_batch(
        self,
        forward_batch: "ForwardBatch",
        weight_indices: list[int],
        lora_ranks: list[int],
        scalings: list[float],
        use_cuda_graph: bool = False,
        use_prefill_cuda_graph: bool = False,
    ) -> None:
        """Note whose the rows of a pass are, and those of its logits."""
        decode = forward_batch.forward_mode.is_decode()
        counts = [1] * len(weight_indices) if decode else forward_batch.extend_seq_lens_cpu
        self.batch_info = adapter_rows(weight_indices, counts, lora_ranks, scalings)
        self.lm_head_batch_info, self.lm_head_pass_batch_infos = None, None
        if (wanted := get_lm_head_pruned_lens(forward_batch)) is None:
            return
        self.lm_head_batch_info = adapter_rows(weight_indices, wanted, lora_ranks, scalings)
        if passes := self._get_lm_head_pass_segments(weight_indices, wanted):
            self.lm_head_pass_batch_infos = [
                adapter_rows(slots, counts, lora_ranks, scalings) for slots, counts in passes
            ]

    def _adapters(self, pruned: AdapterRows | None = None) -> Iterator[Adapter]:
        return iter((self.batch_info if pruned is None else pruned).adapters)

    def run_lora_a_embedding(
        self, input_ids: torch.Tensor, weights: torch.Tensor, vocab_size: int, **_: Any
    ) -> torch.Tensor:
        """[rows] token ids to [rows, most]: their columns of the adapters' ``a`` [slots, most, vocabulary]."""
        low = weights.new_zeros(len(input_ids), weights.shape[1])
        for adapter in self._adapters():
            low[adapter.rows, : adapter.rank] = weights[adapter.slot, : adapter.rank, adapter.of(input_ids)].T
        return low

    def run_lora_a_sgemm(
        self, x: torch.Tensor, weights: torch.Tensor, pruned_batch_info: AdapterRows | None = None, **_: Any
    ) -> torch.Tensor:
        """[rows, in] to [rows, most], of one projection."""
        low = x.new_zeros(len(x), weights.shape[1])
        for adapter in self._adapters(pruned_batch_info):
            low[adapter.rows, : adapter.rank] = adapter.of(x) @ weights[adapter.slot, : adapter.rank].T
        return low

    def run_lora_b_sgemm(
        self,
        x: torch.Tensor,
        weights: torch.Tensor,
        base_output: torch.Tensor,
        pruned_batch_info: AdapterRows | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """What comes of ``x`` [rows, most], added to ``base_output`` [rows, out]."""
        for adapter in self._adapters(pruned_batch_info):
            low = adapter.of(x)[:, : adapter.rank]
            adapter.add(base_output, low, weights[adapter.slot, :, : adapter.rank])
        return base_output

    def run_qkv_lora(
        self,
        x: torch.Tensor,
        qkv_lora_a: torch.Tensor,
        qkv_lora_b: torch.Tensor,
        output_offset_cpu: torch.Tensor,
        base_output: torch.Tensor,
        **_: Any,
    ) -> torch.Tensor:
        """Both products of several projections in one matrix, added to ``base_output`` [rows, out].

        Args:
            output_offset_cpu: [projections + 1] where each one's outputs begin.
        """
        edges = output_offset_cpu.tolist()
        for adapter in self._adapters():
            rank, slot = adapter.rank, adapter.slot
            low = adapter.of(x) @ qkv_lora_a[slot, : rank * (len(edges) - 1)].T
            for i, (begin, end) in enumerate(pairwise(edges)):
                mine, up = low[:, i * rank : (i + 1) * rank], qkv_lora_b[slot, begin:end, :rank]
                adapter.add(base_output[:, begin:end], mine, up)
        return base_output

    def run_gate_up_lora(
        self,
        x: torch.Tensor,
        gate_up_lora_a: torch.Tensor,
        gate_up_lora_b: torch.Tensor,
        output_offset_cpu: torch.Tensor,
        base_output: torch.Tensor,
        **_: Any,
    ) -> torch.Tensor:
        """As :meth:`run_qkv_lora`, of two projections."""
        return self.run_qkv_lora(x, gate_up_lora_a, gate_up_lora_b, output_offset_cpu, base_output)


class Unpinned(TorchFunctionMode):
    """Within it, memory that would be pinned is made without."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.pin_memory:
            return args[0]
        return func(*args, **{name: value for name, value in (kwargs or {}).items() if name != "pin_memory"})


def init_lora_manager(self: ModelRunner) -> None:
    """SGLang's, whose layers keep a few numbers in pinned memory, which only a machine with an accelerator has."""
    with Unpinned():
        _init_lora_manager(self)


def register() -> None:
    """Put backend and manager in SGLang's places."""
    register_lora_backend(CPU_LORA_BACKEND)(lambda: CpuLoRABackend)
    ModelRunner.init_lora_manager = init_lora_manager
