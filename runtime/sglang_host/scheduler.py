"""Fathom's scheduler: SGLang's, with our worker, our reports, and an honest account of what is running."""

import dataclasses
import logging
import os
from typing import Any

import numpy as np
import sglang
import torch
from sglang.srt.managers.io_struct import (
    AbortReq,
    GetInternalStateReq,
    GetInternalStateReqOutput,
    PauseGenerationReqInput,
)
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.scheduler_components.batch_result_processor import SchedulerBatchResultProcessor
from sglang.srt.platforms import current_platform
from sglang.srt.runtime_context import get_lora, get_serving
from sglang.utils import TypeBasedDispatcher

from fathom.runtime.config import DRAFTED, without_draft
from fathom.runtime.ledger import Launched
from fathom.runtime.sglang_host.attention import attention_layers
from fathom.runtime.sglang_host.machine import devices
from fathom.runtime.sglang_host.memory.kv_allocator import DepthAllocator
from fathom.runtime.sglang_host.memory.kv_check import DepthInvariantChecker
from fathom.runtime.sglang_host.memory.kv_pool import LAYOUT, DepthKvPool
from fathom.runtime.sglang_host.memory.kv_tree import tree_of
from fathom.runtime.sglang_host.models import split_prefill
from fathom.runtime.sglang_host.reports import log_lines, redact
from fathom.runtime.sglang_host.reports.engine_metrics import EngineMetrics, KvState, span_names
from fathom.runtime.sglang_host.reports.profiles import FathomProfiles, one_by_one
from fathom.runtime.sglang_host.reports.streamer import FathomOutputStreamer
from fathom.runtime.sglang_host.requests import (
    alternates,
    decides_its_next_step,
    separate_cache_key,
    uses_draft,
)
from fathom.runtime.sglang_host.sampling import beams, grammars, unsound
from fathom.runtime.sglang_host.scheduling import aborts, between_chunks, kv_schedule, priorities
from fathom.runtime.sglang_host.scheduling.adapter_turns import Adapter, Late, Turns
from fathom.runtime.sglang_host.scheduling.control import GuardedDispatcher
from fathom.runtime.sglang_host.scheduling.kv_schedule import DepthPrefillAdder
from fathom.runtime.sglang_host.scheduling.sessions import FathomSessions
from fathom.runtime.sglang_host.scheduling.short_prompts import Beside
from fathom.runtime.sglang_host.seams import seams
from fathom.runtime.sglang_host.step import bursts
from fathom.runtime.sglang_host.step.compression import judging_layer
from fathom.runtime.sglang_host.worker import FathomWorker

logger = logging.getLogger(__name__)

BACKEND_COUNTS = (
    *("packed_weights", "wide_weights", "joined_layers", "joined_steps"),
    *("ended_rows", "looked_up_steps", "moved_steps"),
)
"""What the attention backends count, each some of it."""


def _name(obj: object) -> str:
    cls = type(obj)
    return f"{cls.__module__}.{cls.__qualname__}"


def ignored_window(config: Any, applied: int | None) -> str:
    """What to tell of a model whose layers should look back over a window, where SGLang lets them see everything.

    Args:
        config: SGLang's of the model.
        applied: the window that the model's layers have, in tokens; None where they have none.
    """
    text = config.hf_text_config
    window, kinds = getattr(text, "sliding_window", None), getattr(text, "layer_types", None)
    wanted = bool(window) and (kinds is None or "sliding_attention" in kinds)
    if applied or not wanted or config.context_len <= window:
        return ""
    name = config.hf_config.architectures[0]
    return (
        f"the model's config asks for a sliding window of {window} tokens, and SGLang's {name} has none: "
        f"all of a longer prompt is attended to, which the model was not trained for; --context-length {window} "
        "keeps requests within it"
    )


class FathomScheduler(Scheduler):
    """SGLang's scheduler, event loop and all, running :class:`FathomWorker`."""

    batch_result_processor: SchedulerBatchResultProcessor
    chunked_req: Req | None
    engine_metrics: EngineMetrics | None = None
    lora_drainer: Turns | None
    _request_dispatcher: Any
    overlapped_steps = 0  # launched before the result of the step before was processed
    _taken: Any = None  # a result that was processed before its turn

    def init_tp_model_worker(self) -> None:
        self.tp_worker = FathomWorker(
            server_args=self.server_args, gpu_id=self.ps.gpu_id, ps=self.ps, nccl_port=self.nccl_port
        )
        runner = self.tp_worker.model_runner
        notice = ignored_window(runner.model_config, attention_layers.window_of(runner))
        if notice and self.ps.tp_rank == 0:
            logger.warning(notice)

    def init_running_status(self) -> None:
        super().init_running_status()
        self.session_controller = FathomSessions(self.tree_cache)
        DepthPrefillAdder.beside = Beside(self)

    def init_lora_drainer(self) -> None:
        self.lora_drainer = None
        if self.enable_lora and (seconds := get_lora().lora_drain_wait_threshold) > 0:
            manager: Any = self.tp_worker.model_runner.lora_manager

            def pinned(adapter: Adapter) -> bool:
                return adapter is not None and bool(manager.lora_refs[adapter].pinned)

            self.lora_drainer = Turns(seconds, manager.validate_lora_batch, pinned, lambda: self.chunked_req)

    def _take_turns(self, told: Late) -> None:
        assert self.lora_drainer is not None
        self.lora_drainer.late = told.adapters

    def init_grammar_manager(self) -> None:
        super().init_grammar_manager()
        grammars.install(self.grammar_manager)

    def init_request_dispatcher(self) -> None:
        super().init_request_dispatcher()
        self._request_dispatcher += TypeBasedDispatcher([(Late, self._take_turns)])
        self._request_dispatcher = GuardedDispatcher(self._request_dispatcher, self)

    def init_profiler(self) -> None:
        super().init_profiler()
        self.profiler_manager.__class__ = FathomProfiles

    def get_output_streamer_class(self) -> type[FathomOutputStreamer]:
        return FathomOutputStreamer

    def init_output_streamer(self) -> None:
        super().init_output_streamer()
        self.output_streamer.ledger = self.tp_worker.ledger

    def init_beam_coordinator(self) -> None:
        super().init_beam_coordinator()
        beams.install(self.beam_coordinator)

    def init_batch_result_processor(self) -> None:
        super().init_batch_result_processor()
        if self.tp_worker.puts_out_bursts:
            self.batch_result_processor = bursts.install(self.batch_result_processor)

    def init_metrics_reporter(self, *args: Any) -> None:
        super().init_metrics_reporter(*args)
        if self.metrics_reporter.current_scheduler_metrics_enabled:
            priorities.install(self.metrics_collector)
        if status := self.metrics_reporter.scheduler_status_logger:
            log_lines.write_as(log_lines.BARE, status.loggers)
        if self.metrics_reporter.current_scheduler_metrics_enabled and self.ps.attn_tp_rank == 0:
            pool = self.tp_worker.model_runner.token_to_kv_pool
            spans = pool.spans if isinstance(pool, DepthKvPool) else 1
            self.engine_metrics = EngineMetrics(span_names(pool.start_layer, pool.layer_num, spans))

    def get_next_batch_to_run(self, running_batch: Any, last_batch: Any) -> Any:
        self._take_early(running_batch.reqs)
        if running_batch.is_empty():
            # SGLang would look for room again once somebody leaves it.
            running_batch.batch_is_full = False
        came = last_batch.reqs if last_batch and last_batch.forward_mode.is_extend() else []
        begun = (req for req in (*running_batch.reqs, *came) if req is not self.chunked_req)
        self._some_decode = any(not (req.finished() or req.is_prefill_only) for req in begun)
        return super().get_next_batch_to_run(running_batch, last_batch)

    def _should_defer_prefill(self) -> bool:
        # A step without a batch would have the host wait for the chunk before it. Ranks of DP attention ask as one.
        return (self._some_decode or self.require_mlp_sync) and super()._should_defer_prefill()

    def _get_new_batch_prefill_raw(self, *args: Any, running_batch: Any, **kwargs: Any) -> Any:
        before = list(running_batch.reqs)
        batch, running_batch = super()._get_new_batch_prefill_raw(
            *args, running_batch=running_batch, **kwargs
        )
        if batch is None and len(running_batch.reqs) < len(before):
            # SGLang takes a request out for a more urgent one before it knows whether that fits, and where it does
            # not, nobody has it any more.
            stay = set(running_batch.reqs)
            for req in before:
                if req not in stay and not req.finished():
                    self._add_request_to_queue(req)
        return batch, running_batch

    def update_running_batch(self, batch: Any) -> Any:
        between_chunks.make_room(self, batch)
        return super().update_running_batch(batch)

    def _take_early(self, running: list[Req]) -> None:
        """Where steps overlap: process the last result before the next batch is composed, if that follows from it.

        Usually a step is launched while the one before it runs.
        """
        queue = self.result_queue if self.enable_overlap else None
        if queue and self._next_follows_from(queue[-1][0], running):
            self.take_last()

    def take_last(self) -> bool:
        """Process the last result before its turn, if it is still to be processed."""
        if not (self.enable_overlap and self.result_queue) or self.result_queue[-1][1] is self._taken:
            return False
        batch, result = self.result_queue[-1]
        self.process_batch_result(batch, result)
        self._taken = result
        return True

    def _next_follows_from(self, batch: Any, running: list[Req]) -> bool:
        """Whether the host has to know the tokens of a step before it composes the next one.

        Those of a request that drafts decide what its next step does; several steps that follow each other begin
        behind a known token; and where the device cannot tell what slow-fast decoding reads, the host has to.
        """
        if any(map(decides_its_next_step, batch.reqs)):
            return True
        together = {*running, *batch.reqs}
        put_out = [req for req in batch.reqs if not req.inflight_middle_chunks]
        if put_out and self.tp_worker.goes_on(together):
            return True
        return any(map(alternates, put_out)) and not self.tp_worker.foresees(together)

    def process_input_requests(self, recv_reqs: list[Any]) -> None:
        for together in one_by_one(recv_reqs):
            super().process_input_requests(together)

    def run_batch(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        if self.enable_overlap and self.result_queue:
            self.overlapped_steps += self.result_queue[-1][1] is not self._taken
        self.profiler_manager.before_step(batch)
        return super().run_batch(batch, *args, **kwargs)

    def is_disable_overlap_for_batch(self, batch: Any, last_batch: Any) -> bool:
        if super().is_disable_overlap_for_batch(batch, last_batch):
            return True
        # Proposals are judged in the step itself, by masks of grammars that have to know all tokens.
        grammars = batch is not None and batch.has_grammar and any(map(uses_draft, batch.reqs))
        return grammars and len(self.result_queue) > 0

    def process_batch_result(self, batch: Any, result: Any) -> None:
        if result is self._taken:
            self._taken = None
            return
        if (copied := getattr(result, "copy_done", None)) is not None:
            copied.synchronize()
        if isinstance(launched := getattr(result, "launched", None), Launched):
            self.tp_worker.settle_accounts(launched)
        output = getattr(result, "logits_output", None)
        if output is not None and (chosen := output.next_token_token_ids_logprobs_val):
            # SGLang has a list for a request that named no ids, and takes it for a tensor.
            output.next_token_token_ids_logprobs_val = [torch.as_tensor(values) for values in chosen]
        unsound.end(batch, output)
        if batch.is_prefill_only:
            for req in batch.reqs:
                req.grammar = None  # SGLang sampled nothing, and would ask it for token 0
        super().process_batch_result(batch, result)
        if self.engine_metrics is not None and self.engine_metrics.due:
            self.engine_metrics.write(self._kv_state(), self.tp_worker.ledger.totals)

    def on_idle(self) -> None:
        if self.engine_metrics is not None:  # first: SGLang's may sleep until the next request
            self.engine_metrics.write(self._kv_state(), self.tp_worker.ledger.totals)
        super().on_idle()

    def _record_scheduler_state_for_paused_engine(self) -> None:
        super()._record_scheduler_state_for_paused_engine()
        self.maybe_sleep_on_idle()  # SGLang would ask for requests without a pause

    def _poll_timeout_aborts(self) -> list[Any]:
        """Asked of one process, whose clock counts; the others get what it says with the requests that came in."""
        turns = self.lora_drainer
        late = turns.news(self.waiting_queue, self.running_batch.reqs) if turns is not None else []
        return [*super()._poll_timeout_aborts(), *self.session_controller.over(), *late]

    def abort_request(self, recv_req: AbortReq) -> None:
        if not (recv_req.abort_all or recv_req.rid):
            return  # every id begins with none
        queued = [*self.waiting_queue, *self.grammar_manager.grammar_queue]
        requests = {*queued, *self.collect_inflight_reqs(), *filter(None, [self.chunked_req])}
        with aborts.alone(recv_req, requests):
            super().abort_request(recv_req)

    def pause_generation(self, recv_req: PauseGenerationReqInput) -> None:
        if recv_req.mode == "retract":
            self.process_pending_chunked_abort()  # else forgotten with the chunk, and the request would run again
        super().pause_generation(recv_req)

    def _release_aborted_request(self, req: Req) -> None:
        super()._release_aborted_request(req)
        self.tp_worker.ledger.drop(req)
        self.session_controller.forget(req)

    def stash_chunked_request(self, req: Req) -> None:
        super().stash_chunked_request(req)
        if req.skip_radix_cache_insert:
            # SGLang returns before it notes how far the prompt got, and computes its first chunk for ever.
            row = self.req_to_token_pool.req_to_token[req.kv.req_pool_idx]
            req.prefix_indices = row[: len(req.get_fill_ids())].to(dtype=torch.int64, copy=True)

    def init_invariant_checker(self) -> None:
        super().init_invariant_checker()
        if isinstance(self.token_to_kv_pool_allocator, DepthAllocator):
            stock: Any = vars(self)["invariant_checker"]
            fields = {item.name: getattr(stock, item.name) for item in dataclasses.fields(stock)}
            self.invariant_checker = DepthInvariantChecker(**fields)

    def _abort_on_queued_limit(self, recv_req: Req) -> bool:
        if recv_req.time_stats.wait_queue_entry_time:
            return False  # it was let in before, and taken back
        with priorities.spared(recv_req, [req for req in self.waiting_queue if req.retraction_count]):
            if not super()._abort_on_queued_limit(recv_req):
                return False
        self._release_aborted_request(recv_req)
        self.beam_coordinator.retire_group(recv_req)
        return True

    def init_req_max_new_tokens(self, req: Req) -> None:
        params, allocator = req.sampling_params, self.token_to_kv_pool_allocator
        paged = isinstance(allocator, DepthAllocator)
        if paged and get_serving().allow_auto_truncate:
            kv_schedule.truncate(allocator, req, self.max_req_input_len)
        separate_cache_key(req)
        wanted, least = params.max_new_tokens, params.min_new_tokens
        super().init_req_max_new_tokens(req)
        if paged and not (plan := allocator.plan_of(req)).dense:
            prompt = len(req.origin_input_ids)
            room = min(self.max_req_len - 1, kv_schedule.most_tokens(allocator, plan, prompt)) - prompt
            if self.max_new_tokens_limit is not None and self.max_new_tokens_limit > 0:
                room = min(room, self.max_new_tokens_limit)
            params.max_new_tokens = max(0, room if wanted is None else min(room, wanted))
            params.min_new_tokens = min(least, params.max_new_tokens)

    def get_init_info(self) -> dict[str, Any]:
        return super().get_init_info() | {"fathom": self.fathom_state()}

    def get_internal_state(self, recv_req: GetInternalStateReq) -> GetInternalStateReqOutput:
        output = super().get_internal_state(recv_req)
        output.internal_state = redact.arguments(output.internal_state)
        output.internal_state["fathom"] = self.fathom_state()
        return output

    def fathom_state(self) -> dict[str, Any]:
        """What this process runs, told by its own objects (JSON-safe)."""
        runner = self.tp_worker.model_runner
        backend = runner.attn_backend
        flashinfer = getattr(backend, "flashinfer", None)
        return {
            "pid": os.getpid(),
            "scheduler": _name(self),
            "worker": _name(self.tp_worker),
            "attention_backend": _name(backend),
            "bfloat16_products": getattr(backend, "bfloat16_products", False),
            "amx": getattr(backend, "amx", False),
            **{name: getattr(backend, name, 0) for name in BACKEND_COUNTS},
            "overlapped_steps": self.overlapped_steps,
            "steps_that_followed": getattr(self.tp_worker.continuous, "steps", 0),
            "grown_tables": getattr(getattr(backend, "tables", None), "grown", 0),
            "prefill_attention": getattr(backend, "prefill_attention", None),
            "flashinfer_plans": getattr(flashinfer, "plans", 0),
            "gathered_plans": getattr(flashinfer, "gathered_plans", 0),
            "replayed_steps": getattr(runner.decode_cuda_graph_runner, "replayed", {}),
            "output_streamer": _name(self.output_streamer),
            "platform": _name(current_platform),
            "device": devices.name_of(runner.device),
            **devices.numbers_of(runner),
            "sglang": sglang.__version__,
            "seams": len(seams.rows("scheduler")),
            "lacking": self._lacking(),
            "kv_pool": self._kv_pool(),
            "draft": None if (side := self.tp_worker.draft_side) is None else side.report(),
            "fastkv": self._fastkv(),
            "slow_fast": None if (state := self.tp_worker.slow_fast) is None else state.report(),
            "steps": dict(self.tp_worker.ledger.totals),
            "open_accounts": len(self.tp_worker.ledger),
            "waiting_requests": len(self.waiting_queue),
        }

    def _lacking(self) -> dict[str, str]:
        """Mechanisms that this model or machine cannot run, with the reason."""
        config, runner = self.model_config, self.tp_worker.model_runner
        reasons = {
            "KV is not in depth pages on this machine": not isinstance(
                self.token_to_kv_pool_allocator, DepthAllocator
            ),
            "the layers of this model cannot be run a few at a time": not split_prefill.possible(
                runner.model
            ),
            "streaming sessions are on": get_serving().enable_streaming_session,
            "the model is spread over pipeline stages": self.ps.pp_size > 1,
            "the model takes images or sound, and --language-model-only was not given": config.is_multimodal,
        }
        found = [reason for reason, holds in reasons.items() if holds]
        draft = self.tp_worker.draft_worker
        lacking = {} if draft else without_draft()
        if draft is not None and not attention_layers.has_whole_layer(draft.model_runner.model):
            lacking["SpecPrefill"] = "the draft model has sliding windows in all its layers"
        lacking |= dict.fromkeys(("SPEED", *DRAFTED), "; ".join(found)) if found else {}
        lacking |= {"SFI": reason} if (reason := self.tp_worker.lacks_slow_fast()) else {}
        found += [reason] if (reason := devices.why_not(config, self.ps.tp_size)) else []
        if (layer := LAYOUT.tsp_layer) and judging_layer(layer, attention_layers.windowed(runner.model)) < 0:
            found.append(f"all layers below --tsp-layer {layer} have sliding windows")
        return lacking | ({"FastKV": "; ".join(found)} if found else {})

    def _fastkv(self) -> dict[str, Any] | None:
        """The layer of the selection, and the hidden states that wait for it."""
        if not isinstance(self.token_to_kv_pool_allocator, DepthAllocator):
            return None
        buffer = self.tp_worker.compression.buffer
        state = {"tsp_layer": LAYOUT.tsp_layer, "buffer_tokens": 0}
        if buffer is not None:
            state |= {"buffer_tokens": buffer.tokens, "buffer_bytes": buffer.nbytes}
            state |= {"buffer_used": buffer.used, "buffer_peak": buffer.peak}
        return state

    def _kv_pool(self) -> dict[str, Any]:
        """The KV pool: in tokens as SGLang counts them, and in pages."""
        pool = self.tp_worker.model_runner.token_to_kv_pool
        allocator, tree = self.token_to_kv_pool_allocator, self.tree_cache
        state = {
            "tokens": self.max_total_num_tokens,
            "page_size": pool.page_size,
            "layers": pool.layer_num,
            "free": allocator.available_size(),
            "cached": tree.evictable_size(),
            "held": self.max_total_num_tokens - allocator.available_size() - tree.evictable_size(),
            "bytes_per_token": self.tp_worker.kv_bytes_per_token,
        }
        if isinstance(allocator, DepthAllocator):
            depth_tree = tree_of(tree)
            found = allocator.audit(depth_tree.cached_slots() if depth_tree else None)
            state["depth_pages"] = dataclasses.asdict(found) | {
                "span": pool.span,
                "page_bytes": pool.bytes_per_page * self.ps.tp_size,
                "evictable": depth_tree.evictable_pages if depth_tree else 0,
                "open_rows": len(allocator.memory.tables),
            }
        return state

    def _kv_state(self) -> KvState:
        """The KV pool as metrics have it: counts that are kept anyway, nothing is walked through."""
        allocator, tree = self.token_to_kv_pool_allocator, self.tree_cache
        if not isinstance(allocator, DepthAllocator):
            size, spare = self.page_size, tree.evictable_size()
            held = self.max_total_num_tokens - allocator.available_size() - spare
            whole = held * self.tp_worker.kv_bytes_per_token
            return KvState([held // size], [spare // size], self.max_total_num_tokens // size, whole, whole)
        pool = allocator.memory.pool
        cached = (
            depth_tree.evictable_per_span if (depth_tree := tree_of(tree)) else np.zeros_like(pool.in_use)
        )
        holding = self.tp_worker.ledger.holding.values()
        return KvState(
            (pool.in_use - cached).tolist(),
            cached.tolist(),
            pool.total,
            sum(held.bytes for held in holding),
            sum(held.dense for held in holding),
        )
