"""The draft: a second model in the scheduler's process, with KV of its own for every token of its requests.

Its KV pool is indexed by the *virtual* slots of the target's allocator, the ones that SGLang's request table and
prefix cache hold. So what the target's prefix cache keeps or frees, the draft's KV keeps or frees with it, whatever
depth pages stand behind those slots for the target.
"""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from sglang.srt.layers.moe.utils import draft_model_build_scope
from sglang.srt.managers.tp_worker import TpModelWorker
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

from fathom.kernels.window_scores import pooled_max_scores, window_of
from fathom.runtime.cost import ModelShape
from fathom.runtime.kv.view import SpanView
from fathom.runtime.sglang_host import passes
from fathom.runtime.sglang_host.cpu_attention import CpuAttentionBackend
from fathom.runtime.sglang_host.span_attention import SpanAttentionBackend
from fathom.runtime.sglang_host.triton_attention import TritonAttentionBackend
from fathom.runtime.staging import send

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention

SCRATCH_SLOTS = 1024
"""Slots beyond the virtual ones, for look-ahead tokens that may never be anyone's."""


@dataclass
class Captured:
    """Queries after rotary embedding of chosen rows, layer by layer.

    Attributes:
        rows: [chosen] rows of the pass that is running.
        queries: per layer, one tensor [chosen, heads, head_dim] for each pass.
        scale: factor on the dot products.
    """

    rows: torch.Tensor
    queries: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    scale: float = 1.0


class DraftReads(SpanAttentionBackend):
    """Attention over virtual slots: one view for all layers, set before each pass."""

    view: SpanView
    captured: Captured | None = None

    @property
    def watched(self) -> bool:  # type: ignore[override]
        return self.captured is not None

    def span_of(self, layer_id: int) -> int:
        return 0

    def view_of(self, layer_id: int) -> SpanView:
        return self.view

    def forward_decode(
        self, q: torch.Tensor, k: Any, v: Any, layer: "RadixAttention", *args: Any, **kw: Any
    ) -> Any:
        self._capture(q, layer)
        return super().forward_decode(q, k, v, layer, *args, **kw)

    def forward_extend(
        self, q: torch.Tensor, k: Any, v: Any, layer: "RadixAttention", *args: Any, **kw: Any
    ) -> Any:
        self._capture(q, layer)
        return super().forward_extend(q, k, v, layer, *args, **kw)

    def _capture(self, q: torch.Tensor, layer: "RadixAttention") -> None:
        if self.captured is not None:
            rows = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)[self.captured.rows]
            self.captured.queries.setdefault(layer.layer_id, []).append(rows.clone())
            self.captured.scale = layer.scaling


class DraftAttentionBackend(DraftReads, CpuAttentionBackend):
    """The draft's attention on a CPU."""


class TritonDraftBackend(DraftReads, TritonAttentionBackend):
    """The draft's attention in Triton."""


class DraftWorker(TpModelWorker):
    """SGLang's worker for the draft, beside a target's worker.

    Args:
        target: the target's worker, its model loaded.
    """

    def __init__(self, target: TpModelWorker) -> None:
        with draft_model_build_scope():
            super().__init__(
                server_args=target.server_args,
                gpu_id=target.gpu_id,
                ps=replace(target.ps, pp_rank=0, pp_size=1),
                nccl_port=target.nccl_port,
                is_draft_worker=True,
                # The draft runs at the target's positions.
                context_length=target.model_config.context_len,
                random_seed=target.random_seed,
            )
        self.target = target

    def make_pool(self, virtual_slots: int) -> None:
        """The KV pool and the attention backend, when the target's allocator is there."""
        runner, target = self.model_runner, self.target.model_runner
        runner.req_to_token_pool = target.req_to_token_pool
        runner.token_to_kv_pool_allocator = target.token_to_kv_pool_allocator
        runner.max_running_requests = target.max_running_requests
        runner.max_total_num_tokens = virtual_slots
        runner.token_to_kv_pool = MHATokenToKVPool(
            virtual_slots + SCRATCH_SLOTS,
            page_size=runner.page_size,
            dtype=runner.kv_cache_dtype,
            head_num=self.model_config.get_num_kv_heads(self.ps.tp_size),
            head_dim=self.model_config.head_dim,
            layer_num=runner.layer_info.num_effective_layers,
            device=runner.device,
            enable_memory_saver=False,
            start_layer=runner.layer_info.start_layer,
            end_layer=runner.layer_info.end_layer,
        )
        runner._init_post_memory_pool_components()


def bytes_per_slot(worker: TpModelWorker) -> int:
    """KV bytes of one token over all layers of a loaded model."""
    config, runner = worker.model_config, worker.model_runner
    heads = config.get_num_kv_heads(worker.ps.tp_size)
    element = torch.empty((), dtype=runner.kv_cache_dtype).element_size()
    return 2 * runner.layer_info.num_effective_layers * heads * config.head_dim * element


@dataclass
class Read:
    """Tokens that the draft reads for one request.

    Attributes:
        slots: [length] slots of all its tokens, the new ones last.
        tokens: the new tokens.
    """

    slots: np.ndarray
    tokens: Sequence[int]


class DraftModel:
    """What the rest of the engine asks of the draft."""

    def __init__(self, worker: DraftWorker) -> None:
        self.runner, self.target_runner = worker.model_runner, worker.target.model_runner
        self.pool = self.runner.token_to_kv_pool
        self.backend: DraftReads = self.runner.attn_backend
        self.vocabulary = worker.target.model_config.vocab_size
        self.scratch = self.pool.size - SCRATCH_SLOTS + self.pool.page_size

    def step_cost(self) -> float:
        """A decode step's time as a share of the target's: by their layers, or by the bytes of their weights."""
        configs = [runner.model_config for runner in (self.runner, self.target_runner)]
        shares = [configs[0].num_hidden_layers / configs[1].num_hidden_layers]
        with contextlib.suppress(ValueError, KeyError):  # not every architecture's weights can be counted
            shapes = [ModelShape.from_config(config.hf_config.to_dict()) for config in configs]
            shares.append(shapes[0].step_weight_bytes / shapes[1].step_weight_bytes)
        return min(max(shares), 1.0)

    def read(
        self, reads: Sequence[Read], capture: Captured | None = None, every: bool = False
    ) -> torch.Tensor:
        """Compute the new tokens of each request.

        Args:
            capture: where to put the queries of each request's last token.
            every: give the logits of all new tokens, request after request.

        Returns:
            logits [requests, vocabulary] of each request's last token, or [new tokens, vocabulary].
        """
        counts = [len(read.tokens) for read in reads]
        tokens = [token for read in reads for token in read.tokens]
        places = [np.arange(len(read.slots) - len(read.tokens), len(read.slots)) for read in reads]
        self.backend.view = passes.segments([read.slots for read in reads], counts)
        wanted = np.arange(len(tokens)) if every else np.cumsum(counts) - 1
        batch = passes.prepare(self.runner, tokens, np.concatenate(places), wanted, len(tokens) == len(reads))
        if capture is not None:
            capture.rows = send(wanted, self.runner.device)
        self.backend.captured = capture
        try:
            logits = passes.run(self.runner, batch).float()
        finally:
            self.backend.captured = None
        # Models that share a vocabulary may pad their tables to different sizes.
        missing = self.vocabulary - logits.shape[1]
        return torch.nn.functional.pad(logits, (0, missing), value=float("-inf"))

    def copy(self, source: np.ndarray, target: np.ndarray) -> None:
        """Copy the KV of slots [n] to others."""
        device = self.runner.device
        here, there = (send(slots, device, torch.int64) for slots in (source, target))
        for buffers in (self.pool.k_buffer, self.pool.v_buffer):
            for buffer in buffers:
                buffer[there] = buffer[here]

    def scratch_slots(self, request: int, count: int) -> np.ndarray:
        """[count] slots that belong to nobody, for the request-th of a group of look-aheads."""
        first = self.scratch + request * count
        assert (request + 1) * count <= SCRATCH_SLOTS, "too many look-ahead tokens at once"
        return np.arange(first, first + count)

    def scores(
        self,
        captured: dict[int, torch.Tensor],
        rows: Sequence[int],
        prompts: Sequence[np.ndarray],
        scale: float,
    ) -> torch.Tensor:
        """SpecPrefill's token scores (section 3.2), streamed over the layers.

        Args:
            captured: per layer the queries [total rows, heads, head_dim], request after request.
            rows: query rows of each request; prompts: slots of its prompt.

        Returns:
            [total rows, longest prompt] float32.
        """
        width = max(len(slots) for slots in prompts)
        table = np.zeros((len(prompts), width), np.int64)
        for line, slots in zip(table, prompts, strict=True):
            line[: len(slots)] = slots
        window = window_of(
            rows, [len(slots) for slots in prompts], send(table, self.runner.device), causal=False
        )
        out = None
        for layer, query in sorted(captured.items()):
            out = pooled_max_scores(query, self.pool.get_key_buffer(layer), window, scale, out=out)
        assert out is not None
        return out
