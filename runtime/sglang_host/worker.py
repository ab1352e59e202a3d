"""The tensor-parallel worker that owns the engine step."""

import dataclasses
import logging
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import numpy as np
import torch
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.managers.tp_worker import TpModelWorker
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.platforms import current_platform
from sglang.srt.runtime_context import get_disagg, get_schedule, get_serving, get_spec

from fathom.runtime import flow
from fathom.runtime.decode import SlowFast
from fathom.runtime.decode_chain import Chain
from fathom.runtime.decode_step import Later, Outcome
from fathom.runtime.kv.pages import pages_of
from fathom.runtime.ledger import Account, Held, Launched, Part, RequestLedger
from fathom.runtime.plan import SCORED, tokens_per_span
from fathom.runtime.sglang_host.attention import attention_layers
from fathom.runtime.sglang_host.attention.triton_attention import TritonAttentionBackend, most_prefilled
from fathom.runtime.sglang_host.draft import draft_cache
from fathom.runtime.sglang_host.draft.draft_model import DraftModel, DraftWorker
from fathom.runtime.sglang_host.draft.draft_side import DraftSide
from fathom.runtime.sglang_host.draft.speculation import (
    Proposal,
    VerifyForward,
    propose,
    propose_ahead,
    settle,
)
from fathom.runtime.sglang_host.machine import devices, gpu_streams
from fathom.runtime.sglang_host.memory import gpu_memory, request_table
from fathom.runtime.sglang_host.memory.hidden_buffer import HiddenBuffer
from fathom.runtime.sglang_host.memory.kv_allocator import DepthAllocator
from fathom.runtime.sglang_host.memory.kv_pool import LAYOUT, DepthKvPool
from fathom.runtime.sglang_host.memory.kv_tree import tree_of
from fathom.runtime.sglang_host.memory.tails import Tail, Tails
from fathom.runtime.sglang_host.models import heads, language_models, rope_scaling, split_prefill, windows
from fathom.runtime.sglang_host.platform import FathomCpuPlatform, FathomCudaPlatform
from fathom.runtime.sglang_host.requests import is_judged, policy_of, prompt_tokens, propagation_skipped
from fathom.runtime.sglang_host.scheduling import kv_schedule
from fathom.runtime.sglang_host.scheduling.continuous import Continuous
from fathom.runtime.sglang_host.step import compression, decode_graphs, passes, slow_fast
from fathom.runtime.sglang_host.step.bursts import with_runs
from fathom.runtime.sglang_host.step.compression import Compression, CompressionStep, Job
from fathom.runtime.sglang_host.step.kept_prefill import KeptForward
from fathom.runtime.sglang_host.step.spans import SpanForward

logger = logging.getLogger(__name__)

UNCHUNKED = 1 << 30


class FathomWorker(TpModelWorker):
    """SGLang's worker with the step handed to ``runtime/flow.py``."""

    ledger: RequestLedger
    compression: Compression
    slow_fast: SlowFast | None = None
    outcomes: dict[Req, Outcome | Later]  # of this step: the requests that decode slow and fast
    draft_worker: DraftWorker | None = None
    draft_side: DraftSide | None = None
    tails: Tails
    continuous: Continuous | None = None
    room: Sequence[Tail] = ()  # of this step: for the tokens of those that follow it
    chain: Chain | None  # of this step and those that follow it, where some request decodes slow and fast
    chained: dict[Req, list[Outcome | None]]  # of this step and those that follow it, by request
    proposals: list[Proposal]
    launched: Launched  # the last step
    enable_overlap: bool
    _accounts: list[Account]  # of this step: of its requests
    _complete: dict[Req, Job]  # of this step: requests whose prompt FastKV has compressed
    _began: float  # of this step: time.perf_counter() in seconds
    _draft_seconds: float  # of this step: what the draft took of it

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        heads.register()
        if get_disagg().language_model_only:
            language_models.register()
        super().__init__(*args, **kwargs)
        if isinstance(current_platform, FathomCudaPlatform):
            gpu_streams.put_steps_first(self.model_runner)
        if get_spec().speculative_draft_model_path is not None:
            self.draft_worker = DraftWorker(self)

    def alloc_memory_pool(self, *args: Any, **kwargs: Any) -> None:
        if isinstance(current_platform, FathomCudaPlatform):
            gpu_memory.install(gpu_memory.reserve_of(self, self.draft_worker))
        elif isinstance(current_platform, FathomCpuPlatform):
            request_table.install()
        super().alloc_memory_pool(*args, **kwargs)
        self.ledger = RequestLedger()
        if isinstance(self.allocator, DepthAllocator):
            split_prefill.install(self.model_runner.model)
            rope_scaling.settle(self.model_runner.model, self.model_config)
            windows.settle(self.model_runner.model, self.model_config)
            lifetime = kv_schedule.install(self.allocator, self.model_runner.req_to_token_pool)
            lifetime.closed.append(self.ledger.let_go)
            if not self.lacks_slow_fast():
                self.slow_fast = slow_fast.build(self.model_runner, self.tokenizer)
                lifetime.closed.append(self.slow_fast.drop)
            self.compression = Compression(self.allocator.memory, self._hidden_buffer())
            pool, config = self.model_runner.token_to_kv_pool, self.model_config
            heads = devices.heads_of(config, self.ps.tp_size)[0]
            compression.warm_up(pool.get_key_buffer(0), pool.get_value_buffer(0), heads, config.dtype)
        if self.draft_worker is not None:
            if not isinstance(self.allocator, DepthAllocator):
                raise ValueError(
                    "--draft-model-path needs KV in depth pages, which this machine's platform has not"
                )
            self.draft_worker.make_pool(self.allocator.virtual_tokens)

    def _hidden_buffer(self) -> HiddenBuffer | None:
        tokens, config = LAYOUT.propagation_buffer, self.model_config
        if LAYOUT.tsp_layer is None or tokens == 0:
            return None
        return HiddenBuffer(tokens, config.hidden_size, config.dtype, self.model_runner.device)

    def init_attention_backends(self) -> None:
        super().init_attention_backends()
        if isinstance(self.allocator, DepthAllocator):
            self.tails = Tails(self.allocator, self.model_runner.req_to_token_pool.req_to_token)
            self.continuous = Continuous(self.tails, self._steps_together())
        if self.draft_worker is not None:
            self.draft_worker.init_attention_backends()
            rows = self.model_runner.req_to_token_pool.req_to_token
            self.draft_side = DraftSide(DraftModel(self.draft_worker), rows)
            draft_cache.install(self.draft_side)

    def _steps_together(self) -> int:
        """Decode steps between two looks of the scheduler, as far as this model and its options allow any."""
        asked = get_schedule().num_continuous_decode_steps
        if asked > 1 and (not self._splits or get_serving().enable_streaming_session):
            logger.warning(
                "--num-continuous-decode-steps has no effect with pipeline stages, streaming sessions, images "
                "or sound"
            )
            return 1
        return asked

    def init_cuda_graphs(self, *args: Any, **kwargs: Any) -> None:
        if isinstance(backend := self.model_runner.attn_backend, TritonAttentionBackend):
            backend.slow_fast, backend.several = self.slow_fast, self.draft_worker is not None
            if backend.several:
                decode_graphs.share_logits(self.model_runner.device)
        runner = self.model_runner
        # It sizes the buffer of a batch's tokens, and shallow prompts may be more tokens than fit at all depths.
        fits, runner.max_total_num_tokens = runner.max_total_num_tokens, self._longest_batch()
        super().init_cuda_graphs(*args, **kwargs)
        runner.max_total_num_tokens = fits
        if self.draft_worker is not None:
            self.draft_worker.init_cuda_graphs()

    def _longest_batch(self) -> int:
        """Tokens of a prefill batch at most."""
        longest, schedule = self.model_runner.max_total_num_tokens, get_schedule()
        if not isinstance(self.allocator, DepthAllocator) or (schedule.chunked_prefill_size or 0) > 0:
            return longest
        most = most_prefilled(self.model_config.context_len)
        return max(longest, min(most, self.allocator.virtual_tokens))

    @property
    def allocator(self) -> Any:
        """SGLang's token allocator; ours where KV is in depth pages."""
        return self.model_runner.token_to_kv_pool_allocator

    def lacks_slow_fast(self) -> str:
        """Why requests cannot decode slow and fast; "" where they can."""
        depth_pages = isinstance(self.allocator, DepthAllocator)
        return slow_fast.why_not(self.model_runner, self.tokenizer, depth_pages, self.ps)

    def get_worker_info(self) -> tuple[Any, ...]:
        info = list(super().get_worker_info())
        if isinstance(self.allocator, DepthAllocator):
            # A shallow prompt may be longer than the dense tokens that fit; each prompt is checked by its pages.
            longest = min(self.model_config.context_len, self.allocator.virtual_tokens)
            info[4:6] = longest - 1, longest - 6
        return tuple(info)

    def forward_batch_generation(
        self, batch: ScheduleBatch | None, *args: Any, **kwargs: Any
    ) -> GenerationBatchResult:
        if batch is None:  # an inner forward of SGLang's own, not a scheduled step
            return super().forward_batch_generation(batch, *args, **kwargs)
        backend = self.model_runner.attn_backend
        backend.rows = batch.req_pool_indices_cpu
        try:
            result = flow.step(self, batch, **kwargs)
        finally:
            backend.rows = None
        result.launched = self.launched
        return result

    # --- flow.StepHost ---

    def open_accounts(self, batch: ScheduleBatch) -> list[Account]:
        self._complete = {}
        self._began, self._draft_seconds = time.perf_counter(), 0.0
        self._accounts = [self.ledger.open(request, policy_of(request)) for request in batch.reqs]
        return self._accounts

    def draft(self, batch: ScheduleBatch) -> None:
        self.proposals, self.chain, self.chained = [], None, {}
        self.room = () if self.continuous is None else self.continuous.room(batch)
        if self.draft_side is None:
            return
        if batch.forward_mode.is_extend():
            began = time.perf_counter()
            reads = self.draft_side.read_prefill(batch)
            self.proposals = propose_ahead(batch, self.draft_side, self.tails)
            self._draft_seconds = time.perf_counter() - began if reads else 0.0
        elif batch.forward_mode.is_decode():
            stretches = slow_fast.stretches(self.slow_fast, batch)
            self.proposals = propose(batch, self.draft_side, self.tails, stretches)
            self.draft_side.catch_up(batch)
        for request, account in zip(batch.reqs, self._accounts, strict=True):
            if (state := self.draft_side.states.get(request)) is not None:
                account.draft_read_tokens = state.read_in_all

    @contextmanager
    def phases(self, batch: ScheduleBatch) -> Iterator[None]:
        with self._room_behind(self.room[0].count if self.room else 0), self._phases(batch):
            yield

    @contextmanager
    def _room_behind(self, tokens: int) -> Iterator[None]:
        self.model_runner.attn_backend.beyond = tokens
        try:
            yield
        finally:
            self.model_runner.attn_backend.beyond = 0

    @contextmanager
    def _phases(self, batch: ScheduleBatch) -> Iterator[None]:
        verified = self.proposals if batch.forward_mode.is_decode() else []
        drafted = {proposal.index: len(proposal.tokens) for proposal in verified}
        if self.room and self.chain is None and self.slow_fast is not None and slow_fast.concerns(batch):
            self.chain = Chain(self.slow_fast)
        given = self.slow_fast, batch, self.model_runner, drafted, self.chain
        with slow_fast.phases(*given) as self.outcomes:
            yield

    def forward(self, batch: ScheduleBatch, **options: Any) -> GenerationBatchResult:
        return super().forward_batch_generation(batch, **options)

    def follow(
        self, batch: ScheduleBatch, result: GenerationBatchResult, **options: Any
    ) -> GenerationBatchResult:
        if not self.room:
            return result
        assert self.continuous is not None

        def forward(batch: ScheduleBatch) -> GenerationBatchResult:
            return self.forward(batch, **options)

        def again(tokens: torch.Tensor) -> torch.Tensor | None:
            runner = self.model_runner.decode_cuda_graph_runner
            moved = runner.moved_on(tokens) if isinstance(runner, decode_graphs.DecodeGraphRunner) else None
            if moved is None:
                return None
            return self.model_runner.sample(self.model_runner.forward(moved).logits_output, moved)

        @contextmanager
        def within(behind: int) -> Iterator[None]:
            with self._room_behind(behind), self._phases(batch):
                yield

        result, self.chained = self.continuous.go_on(
            batch, result, self.room, self.chain, within, forward, again
        )
        self.model_runner.shared_read_done_event = None  # as in `_settled`
        return result

    def proposed(self) -> bool:
        return bool(self.proposals)

    def verify(self, batch: ScheduleBatch, **options: Any) -> GenerationBatchResult:
        assert self.draft_side is not None
        forward = VerifyForward(self.model_runner, batch, self.proposals)
        result = self._step_around(forward, batch, **options)
        return self._settled(batch, result, forward.logits)

    def _settled(
        self, batch: ScheduleBatch, result: GenerationBatchResult, logits: dict[int, torch.Tensor]
    ) -> GenerationBatchResult:
        assert self.draft_side is not None
        runs = settle(batch, self.proposals, logits, self.draft_side, self.tails)
        # Slots were given back on this stream after the step's last look at the tables: the scheduler's stream is
        # to wait for that too.
        self.model_runner.shared_read_done_event = None
        for proposal in self.proposals:
            account = self._accounts[proposal.index]
            self.ledger.drafted(account, len(proposal.tokens), len(runs[proposal.index].tokens) - 1)
        return with_runs(result, runs)

    def narrows(self, batch: ScheduleBatch) -> bool:
        if not batch.forward_mode.is_extend() or not isinstance(self.allocator, DepthAllocator):
            return False
        if not all(self.allocator.plan_of(request).dense for request in batch.reqs):
            return True
        rows, logits = sum(batch.extend_lens), len(batch.reqs)
        whole = bool(self.proposals) or batch.input_embeds is not None or not self._splits
        return not whole and passes.ends_early(self.model_runner, rows, logits)

    @cached_property
    def _splits(self) -> bool:
        """Whether a batch of any requests may run a few layers at a time."""
        config = self.model_config
        return config.is_generation and not config.is_multimodal and self.ps.pp_size == 1

    @cached_property
    def _windowed(self) -> frozenset[int]:
        return attention_layers.windowed(self.model_runner.model)

    def climb(self, batch: ScheduleBatch, **options: Any) -> GenerationBatchResult:
        forward = self._stairs(batch)
        forward.compression = CompressionStep(
            self.compression,
            forward.works,
            batch.reqs,
            self.model_runner.token_to_kv_pool.span,
            self._entered,
            self._windowed,
        )
        result = self._step_around(forward, batch, **options)
        if isinstance(forward, KeptForward) and forward.idle:
            assert self.draft_side is not None
            # The next chunk may be composed while the draft still computes this one.
            self.model_runner.shared_read_done_event = self.draft_side.model.read_done
        self._settle(batch, forward.compression)
        if isinstance(forward, KeptForward) and self.proposals:
            return self._settled(batch, result, forward.drafted_logits)
        return result

    def _step_around(self, forward: Any, batch: ScheduleBatch, **options: Any) -> GenerationBatchResult:
        """SGLang's own step, from its input buffers to its sampler, around another forward of the model."""
        model, backend = self.model_runner.model, self.model_runner.attn_backend
        model.forward, backend.replaced = forward, True
        # Where steps overlap, SGLang's worker puts sampling with a grammar off until the last result is known.
        overlaps, self.enable_overlap = self.enable_overlap, self.enable_overlap and not self.proposals
        try:
            return super().forward_batch_generation(batch, **options)
        finally:
            self.enable_overlap = overlaps
            del model.forward
            backend.replaced, backend.taps = False, {}

    def _entered(self, request: Req) -> np.ndarray | None:
        """Positions of a complete prompt that the draft let into the target; None for all."""
        if self.draft_side is None or not is_judged(request):
            return None
        selection = self.draft_side.state(request).selection
        return None if selection is None else selection.tokens.cpu().numpy()

    def _settle(self, batch: ScheduleBatch, step: CompressionStep) -> None:
        """Prompts whose kept entries are in place hold nothing else from here on."""
        for job in step.finish():
            request = batch.reqs[job.index]
            self._complete[request] = job
            self._accounts[job.index].hold(*self._held([request]))
            step.settle(job)
            if job.compacted and tree_of(batch.tree_cache) is None:
                table = self.model_runner.req_to_token_pool.req_to_token
                self.allocator.uncover(table[request.kv.req_pool_idx, : prompt_tokens(request)])

    def _stairs(self, batch: ScheduleBatch) -> SpanForward:
        if self.draft_side is None:
            return SpanForward(self.model_runner, batch, self.allocator)
        chunk = get_schedule().chunked_prefill_size or UNCHUNKED
        chunk = chunk if chunk > 0 else UNCHUNKED
        return KeptForward(self.model_runner, batch, self.allocator, self.draft_side, chunk, self.proposals)

    def close_accounts(self, batch: ScheduleBatch, accounts: list[Account]) -> None:
        prefill, decode = batch.forward_mode.is_extend(), batch.forward_mode.is_decode()
        self.launched = launched = Launched(self._began, self._draft_seconds if prefill else None)
        extends = batch.extend_lens if prefill else [0] * len(accounts)
        decoding = set(batch.decoding_reqs or ()) if batch.forward_mode.is_mixed() else ()
        for request, account, tokens, held in zip(
            batch.reqs, accounts, extends, self._held(batch.reqs), strict=True
        ):
            self.ledger.holding[request.kv.req_pool_idx] = held
            if decode or request in decoding:
                steps = self.chained.get(request, [self.outcomes.get(request)])
                share = 1 / len(steps)
                for each in steps:
                    part = Part(request, account, held, outcome=each, timed=decode, share=share)
                    launched.parts.append(part)
            elif prefill:
                launched.parts.append(Part(request, account, held, prompt_tokens=tokens))
                self._note_plan(request, account)

    def settle_accounts(self, launched: Launched) -> None:
        """Write down a step whose result has arrived, but for requests that had ended before it."""
        stands = [
            self._known(part) if isinstance(part.outcome, Later) else part
            for part in launched.parts
            if not (part.request.finished() or part.request.is_retracted)
        ]
        self.ledger.settle(dataclasses.replace(launched, parts=stands), time.perf_counter())

    def _known(self, part: Part) -> Part:
        assert self.slow_fast is not None and isinstance(part.outcome, Later)
        return part._replace(outcome=slow_fast.known(self.slow_fast, part.request, part.outcome))

    @property
    def puts_out_bursts(self) -> bool:
        """Whether a step may put out several tokens of a request."""
        continuous = self.continuous is not None and self.continuous.most > 1
        return continuous or self.draft_side is not None

    def goes_on(self, requests: Collection[Req]) -> bool:
        """Whether decode steps of these requests follow each other before the scheduler is asked again."""
        return self.continuous is not None and self.continuous.takes(requests)

    def foresees(self, requests: Collection[Req]) -> bool:
        """Whether the next decode step of these requests may be launched before its last tokens are known."""
        return slow_fast.foresees(self.slow_fast, requests)

    def _note_plan(self, request: Req, account: Account) -> None:
        if not isinstance(self.allocator, DepthAllocator):
            return
        plan, prompt = self.allocator.plan_of(request), prompt_tokens(request)
        account.propagation_skipped = propagation_skipped(request)
        if job := self._complete.get(request):
            account.climbed(job.present_in, job.kept_in)
            account.propagated_tokens = None if job.selected is None else len(job.selected)
            self.ledger.scored(account, job.scoring_seconds)
            return
        if plan.dense or plan.retention is not None or plan.propagation is not None:
            return
        selection = None if self.draft_side is None else self.draft_side.state(request).selection
        if selection is None:
            per_span = tokens_per_span(plan, prompt)
        else:
            lower = sum(step.kind == SCORED for step in map(plan.step_of_span, range(plan.spans)) if step)
            kept = len(selection.tokens)
            per_span = [kept] * lower + [min(kept, 1 + plan.anchored_above(1))] * (plan.spans - lower)
        account.climbed(per_span, per_span)

    def _held(self, requests: Sequence[Req]) -> list[Held]:
        size, dense_bytes, page_bytes = self._page
        dense = [pages_of(request.kv.kv_allocated_len, size) * dense_bytes for request in requests]
        if page_bytes is None:
            return list(map(Held, dense, dense))
        pages = self.allocator.held_pages(requests)
        return [Held(count * page_bytes, at_all) for count, at_all in zip(pages, dense, strict=True)]

    @cached_property
    def _page(self) -> tuple[int, int, int | None]:
        """Tokens of a page, their bytes at all depths, and those of a depth page, None where there are none."""
        pool = self.model_runner.token_to_kv_pool
        depth = pool.bytes_per_page * self.ps.tp_size if isinstance(self.allocator, DepthAllocator) else None
        return pool.page_size, pool.page_size * self.kv_bytes_per_token, depth

    @cached_property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of all layers, on all devices."""
        pool = self.model_runner.token_to_kv_pool
        total = int(sum(pool.get_kv_size_bytes())) * self.ps.tp_size
        spans = pool.spans if isinstance(pool, DepthKvPool) else 1
        return total * spans // (pool.size + pool.page_size)
