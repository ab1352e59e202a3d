"""The draft: a second model in the scheduler's process, with KV of its own for every token of its requests.

Its KV pool is indexed by the *virtual* slots of the target's allocator, the ones that SGLang's request table and
prefix cache hold. So what the target's prefix cache keeps or frees, the draft's KV keeps or frees with it, whatever
depth pages stand behind those slots for the target.
"""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from sglang.srt.layers.moe.utils import draft_model_build_scope
from sglang.srt.managers.tp_worker import TpModelWorker
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

from fathom.kernels.dispatch import runs_triton
from fathom.kernels.window_scores import pooled_max_scores, window_of
from fathom.runtime.cost import ModelShape
from fathom.runtime.kv.lists import ListView, SlotLists
from fathom.runtime.sglang_host.draft.draft_attention import Captured, DraftReads, TritonDraftBackend
from fathom.runtime.sglang_host.draft.draft_graphs import DraftGraphRunner
from fathom.runtime.sglang_host.machine import devices
from fathom.runtime.sglang_host.models import rope_scaling, split_prefill, windows
from fathom.runtime.sglang_host.step import passes
from fathom.runtime.sglang_host.step.decode_graphs import DecodeGraphRunner
from fathom.runtime.staging import send

SCRATCH_SLOTS = 1024
"""Slots beyond the virtual ones, for look-ahead tokens that may never be anyone's."""


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

    def _init_model_config(self) -> None:
        super()._init_model_config()
        # Of a checkpoint's own heads for drafting there may be so many, beside its layers.
        self.model_config.num_nextn_predict_layers = None

    def make_pool(self, virtual_slots: int) -> None:
        """The KV pool and the attention backend, when the target's allocator is there."""
        runner, target = self.model_runner, self.target.model_runner
        split_prefill.distrust(runner.model)
        rope_scaling.settle(runner.model, self.model_config)
        windows.settle(runner.model, self.model_config)
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

    def init_cuda_graphs(self, capture_decode_cuda_graph: bool = True) -> None:
        """Capture the draft's decode steps where the target's are captured."""
        super().init_cuda_graphs(capture_decode_cuda_graph=False)
        if isinstance(self.target.model_runner.decode_cuda_graph_runner, DecodeGraphRunner):
            self.model_runner.decode_cuda_graph_runner = DraftGraphRunner(self.model_runner)


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
        which: the list of the request's slots.
        length: how many tokens the request then has, the new ones last.
        tokens: the new tokens.
    """

    which: int
    length: int
    tokens: Sequence[int]


class DraftModel:
    """What the rest of the engine asks of the draft."""

    def __init__(self, worker: DraftWorker) -> None:
        self.runner, self.target_runner = worker.model_runner, worker.target.model_runner
        self.pool = self.runner.token_to_kv_pool
        self.backend: DraftReads = self.runner.attn_backend
        self.vocabulary = worker.target.model_config.vocab_size
        self.last_id = worker.model_config.vocab_size - 1
        self.scratch = self.pool.size - SCRATCH_SLOTS + self.pool.page_size
        scratch = torch.arange(SCRATCH_SLOTS, dtype=torch.int32, device=self.runner.device)
        self._scratch = scratch + self.scratch
        if runs_triton(self.pool.get_key_buffer(0)):
            self._warm_up(devices.heads_of(worker.model_config, worker.ps.tp_size)[0])

    def _warm_up(self, heads: int) -> None:
        """Compile what looks at the look-ahead's queries, so that no request waits for it (cached on disk)."""
        keys = self.pool.get_key_buffer(0)
        dtype = self.runner.model_config.dtype
        query = torch.zeros(1, heads, keys.shape[2], dtype=dtype, device=keys.device)
        slots = torch.zeros(1, 1, dtype=torch.int64, device=keys.device)
        pooled_max_scores(query, keys, window_of([1], [1], slots, causal=False), 1.0)

    def step_cost(self) -> float:
        """A decode step's time as a share of the target's: by their layers, or by the bytes of their weights."""
        configs = [runner.model_config for runner in (self.runner, self.target_runner)]
        shares = [configs[0].num_hidden_layers / configs[1].num_hidden_layers]
        with contextlib.suppress(ValueError, KeyError):  # not every architecture's weights can be counted
            shapes = [ModelShape.from_config(config.hf_config.to_dict()) for config in configs]
            shares.append(shapes[0].step_weight_bytes() / shapes[1].step_weight_bytes())
        return min(max(shares), 1.0)

    @property
    def graphs(self) -> DraftGraphRunner | None:
        """Decode steps that are replayed, where there are any."""
        runner = self.runner.decode_cuda_graph_runner
        return runner if isinstance(runner, DraftGraphRunner) else None

    @property
    def placed_lists(self) -> int:
        """How often lists of slots were written on a device."""
        return self.backend.tables.placed if isinstance(self.backend, TritonDraftBackend) else 0

    @property
    def read_done(self) -> Any:
        """Event of a GPU after which the last pass does not look at SGLang's request table any more."""
        return getattr(self.backend, "read_done", None)

    def read(
        self,
        lists: SlotLists,
        reads: Sequence[Read],
        capture: Captured | None = None,
        every: bool = False,
    ) -> torch.Tensor:
        """Compute the new tokens of each request.

        Args:
            lists: of the requests' slots, placed once for all passes over them.
            capture: where to put the queries of each request's last token.
            every: give the logits of all new tokens, request after request.

        Returns:
            logits [requests, vocabulary] float32 of each request's last token, or [new tokens, vocabulary].
        """
        counts, lengths = [len(read.tokens) for read in reads], [read.length for read in reads]
        # The target may have ids behind the draft's last one, where tables are padded: the draft reads that one.
        tokens = [min(token, self.last_id) for read in reads for token in read.tokens]
        places = [np.arange(end - count, end) for end, count in zip(lengths, counts, strict=True)]
        positions, rows = np.concatenate(places), np.arange(len(tokens))
        wanted = rows if every else np.cumsum(counts) - 1
        self.backend.read(ListView(lists, [read.which for read in reads], lengths, counts), capture)
        try:
            if self.graphs is not None and self.graphs.takes_view():
                logits = self.graphs.logits(passes.prepare(self.runner, tokens, positions, rows, decode=True))
                if len(wanted) < len(rows):
                    logits = logits[send(wanted, self.runner.device)]
            else:
                decode = len(tokens) == len(reads)
                batch = passes.prepare(self.runner, tokens, positions, wanted, decode)
                if capture is not None:
                    capture.rows = send(wanted, self.runner.device)
                if not decode and passes.ends_early(self.runner, len(rows), len(wanted)):
                    ends = ListView(lists, [read.which for read in reads], lengths, [1] * len(reads))
                    logits = passes.run_ending(
                        self.runner, batch, wanted, lambda: self._look_at(ends, capture)
                    )
                else:
                    logits = passes.run(self.runner, batch).next_token_logits
        finally:
            self.backend.captured = None
        # Models that share a vocabulary may pad their tables to different sizes.
        missing = self.vocabulary - logits.shape[1]
        logits = logits.float()
        return torch.nn.functional.pad(logits, (0, missing), value=float("-inf")) if missing else logits

    def _look_at(self, ends: ListView, capture: Captured | None) -> None:
        """Only each request's last token is computed from here on."""
        if capture is not None:
            capture.rows = torch.arange(len(ends.query) - 1, device=self.runner.device)
        self.backend.read(ends, capture)

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy the KV of slots [n] int32 to others."""
        here, there = source.long(), target.long()
        for buffers in (self.pool.k_buffer, self.pool.v_buffer):
            for buffer in buffers:
                buffer[there] = buffer[here]

    def scratch_slots(self, request: int, count: int) -> torch.Tensor:
        """[count] int32 slots that belong to nobody, for the request-th of a group of look-aheads."""
        assert (request + 1) * count <= SCRATCH_SLOTS, "too many look-ahead tokens at once"
        return self._scratch[request * count : (request + 1) * count]

    def scores(
        self,
        captured: dict[int, torch.Tensor],
        rows: Sequence[int],
        prompts: Sequence[torch.Tensor],
        scale: float,
    ) -> torch.Tensor:
        """SpecPrefill's token scores (section 3.2), streamed over the layers; the same on all devices.

        Args:
            captured: per layer the queries [total rows, heads, head_dim], request after request.
            rows: query rows of each request; prompts: [tokens] int32 slots of its prompt.

        Returns:
            [total rows, longest prompt] float32.
        """
        table = torch.nn.utils.rnn.pad_sequence([slots.long() for slots in prompts], batch_first=True)
        window = window_of(rows, [len(slots) for slots in prompts], table, causal=False)
        out = None
        for layer, query in sorted(captured.items()):
            out = pooled_max_scores(query, self.pool.get_key_buffer(layer), window, scale, out=out)
        assert out is not None
        return devices.largest(out)
