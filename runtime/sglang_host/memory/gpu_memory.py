"""What Fathom keeps on a GPU beside the target's KV, told to SGLang before it gives that all the memory there is.

On a CPU memory that nobody has written to is not taken; on a GPU it is, so the compact buffers and the evidence of
slow-fast decoding, FastKV's waiting hidden states, page tables, FlashInfer's workspaces, the draft's KV and what
its captured steps leave have to be counted.
"""

from dataclasses import dataclass
from typing import Any

from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator
from sglang.srt.model_executor.pool_configurator import DefaultPoolConfigurator
from sglang.srt.runtime_context import get_schedule

from fathom.kernels.span_tables import BLOCK
from fathom.runtime.decode import Shape
from fathom.runtime.plan import choose_span
from fathom.runtime.sfi.refresh import RING_SLOTS
from fathom.runtime.sglang_host.attention import flashinfer_prefill
from fathom.runtime.sglang_host.attention.triton_attention import SHARED
from fathom.runtime.sglang_host.draft.draft_model import SCRATCH_SLOTS, bytes_per_slot
from fathom.runtime.sglang_host.machine import devices
from fathom.runtime.sglang_host.memory.kv_pool import LAYOUT
from fathom.runtime.sglang_host.step.decode_graphs import captured_rows
from fathom.runtime.sglang_host.step.slow_fast import SETTINGS, gpu_bytes

MOST_REQUESTS = 4096
"""Request rows that SGLang makes at most where it is not told how many."""

_cell_size = DefaultPoolConfigurator._compute_cell_size
_available_bytes = KVCacheConfigurator._profile_available_bytes


@dataclass(frozen=True)
class Reserve:
    """Bytes beside the target's KV.

    Attributes:
        fixed: whatever the size of the pool.
        per_token: for each token that the pool holds at all depths.
    """

    fixed: int
    per_token: int


def reserve_of(worker: Any, draft: Any | None) -> Reserve:
    """What a target's worker and its draft's need, their models loaded.

    A token of the pool has a physical slot per span, and some virtual ones. With pages of one token each physical
    one has ``SHARED`` entries per span in the lists of a step, and one in a private table; a virtual one has an
    entry per span in the shared map, and a slot of the draft's. Entries have 4 bytes. Private tables and shared map
    lie twice on the device while there come to be more blocks (``kv/mirror.py``): 4 · spans · (SHARED · spans +
    2 · (1 + virtual)) a token. So does the directory of the blocks: 8 · spans · request rows · blocks of a context.
    """
    config, runner = worker.model_config, worker.model_runner
    layers = runner.layer_info.num_effective_layers
    span = choose_span(layers, LAYOUT.span)
    shape = Shape(
        layers,
        span,
        *devices.heads_of(config, worker.ps.tp_size),
        config.head_dim,
        config.v_head_dim,
        runner.kv_cache_dtype,
        config.context_len,
        rows=0,
        memory=gpu_bytes(runner),
    )
    waiting = 2 * LAYOUT.propagation_buffer * config.hidden_size * config.dtype.itemsize
    fixed = shape.buffer_bytes(SETTINGS.options) + shape.evidence_bytes(SETTINGS.options, RING_SLOTS)
    fixed += 0 if LAYOUT.tsp_layer is None else waiting
    spans = layers // span
    virtual = LAYOUT.virtual_slots(spans, draft is not None)
    fixed += flashinfer_prefill.reserved_bytes(runner, spans)
    rows = get_schedule().max_running_requests or MOST_REQUESTS
    fixed += 8 * spans * rows * -(-config.context_len // BLOCK)
    tables = 4 * spans * (SHARED * spans + 2 * (1 + virtual))
    if draft is None:
        return Reserve(fixed, tables)
    slot, lists = bytes_per_slot(draft), 4 * SHARED
    fixed += flashinfer_prefill.reserved_bytes(draft.model_runner, 1)
    fixed += captured_rows() * captured_row_bytes(config, draft)
    return Reserve(fixed + SCRATCH_SLOTS * slot, tables + virtual * (slot + lists))


def captured_row_bytes(target: Any, draft: Any) -> int:
    """What the draft's captured steps leave of a row: queries of all layers, and logits.

    Where the vocabulary is the target's, its buffer of logits serves.
    """
    config = draft.model_config
    layers = draft.model_runner.layer_info.num_effective_layers
    heads, _ = devices.heads_of(config, draft.ps.tp_size)
    queries = layers * heads * config.head_dim * config.dtype.itemsize
    return queries + (0 if config.vocab_size == target.vocab_size else 4 * config.vocab_size)


def install(reserve: Reserve) -> None:
    """Put the functions in SGLang's places, for this process's only target."""

    def compute_cell_size(self: Any, kvc: Any, num_layers: int) -> int:
        return _cell_size(self, kvc, num_layers) + reserve.per_token

    def profile_available_bytes(self: Any, pre_model_load_memory: int) -> int:
        # On several GPUs the pools are of one size, as SGLang's are; what is reserved follows from the GPU.
        left = devices.least(_available_bytes(self, pre_model_load_memory) - reserve.fixed)
        if left <= 0:
            needed = f"{reserve.fixed >> 20} MiB are needed beside it"
            raise ValueError(
                f"no GPU memory is left for KV: {needed}; set --sfi-buffer-mib, --sfi-evidence-mib or "
                "--propagation-buffer lower, or --mem-fraction-static higher"
            )
        return left

    DefaultPoolConfigurator._compute_cell_size = compute_cell_size
    KVCacheConfigurator._profile_available_bytes = profile_available_bytes
