"""The seams of the engine process: who runs, the step, and a machine without a GPU."""

import inspect

from fathom.runtime.sglang_host.seams.seam import (
    SCHEDULER,
    SERVER,
    Seam,
    reads_attributes,
    reads_global,
    relies_on,
)

ENGINE_SEAMS: tuple[Seam, ...] = (
    # --- who runs ---
    relies_on(
        SCHEDULER,
        "managers.scheduler:run_scheduler_process",
        "call",
        "runs whatever class its module calls Scheduler, which is how ours gets to run",
        "server_args port_args gpu_id tp_rank attn_cp_rank moe_dp_rank moe_ep_rank pp_rank dp_rank pipe_writer "
        "display_tp_rank display_dp_rank display_moe_ep_rank",
        reads_global("Scheduler"),
    ),
    relies_on(
        SCHEDULER, "managers.scheduler:Scheduler", "replace", "ours takes its name", check=inspect.isclass
    ),
    relies_on(
        SCHEDULER,
        "managers.scheduler:Scheduler.init_model_worker",
        "read",
        "calls the hook that builds the worker",
        "",
        reads_global("init_tp_model_worker"),
    ),
    relies_on(
        SCHEDULER, "managers.scheduler:Scheduler.init_tp_model_worker", "override", "builds our worker", ""
    ),
    relies_on(
        SCHEDULER,
        "managers.scheduler:Scheduler.init_output_streamer",
        "override",
        "hands the ledger to our streamer",
        "",
        reads_global("get_output_streamer_class"),
    ),
    relies_on(
        SCHEDULER,
        "managers.scheduler:Scheduler.get_output_streamer_class",
        "override",
        "names our streamer",
        "",
    ),
    relies_on(
        SCHEDULER, "managers.scheduler:Scheduler.get_init_info", "override", "reports what runs, at start", ""
    ),
    relies_on(
        SCHEDULER,
        "managers.scheduler:Scheduler.get_internal_state",
        "override",
        "reports what runs, over HTTP",
        "recv_req",
    ),
    relies_on(
        SCHEDULER,
        "managers.scheduler:Scheduler.init_metrics_reporter",
        "override",
        "creates our metrics once it is known whether this process has any",
        "tp_rank pp_rank dp_rank",
        reads_global("SchedulerMetricsReporter"),
    ),
    relies_on(
        SCHEDULER,
        "managers.scheduler_components.metrics_reporter:SchedulerMetricsReporter.__post_init__",
        "read",
        "whether this process has metrics",
        None,
        reads_attributes("current_scheduler_metrics_enabled"),
    ),
    relies_on(
        SCHEDULER,
        "managers.scheduler:Scheduler.process_batch_result",
        "override",
        "writes our metrics after a step; before, log-probabilities of ids are tensors, as SGLang takes them to be",
        "batch result",
    ),
    relies_on(
        SCHEDULER,
        "managers.scheduler:Scheduler.on_idle",
        "override",
        "writes our metrics when nothing is left to do",
        "",
    ),
    relies_on(
        SCHEDULER,
        "managers.scheduler:Scheduler._release_aborted_request",
        "override",
        "closes the account of a request that is aborted while it waits, and takes it from its session",
        "req",
    ),
    relies_on(
        SCHEDULER,
        "managers.scheduler:Scheduler._record_scheduler_state_for_paused_engine",
        "override",
        "all that a step of a paused engine does; it sleeps where an idle one does",
        "",
    ),
    relies_on(
        SCHEDULER,
        "managers.scheduler:Scheduler.maybe_sleep_on_idle",
        "call",
        "waits for the next request, for a second at most",
        "",
        reads_attributes("idle_sleeper maybe_sleep"),
    ),
    relies_on(
        SCHEDULER,
        "managers.scheduler:Scheduler._poll_timeout_aborts",
        "override",
        "the first process says whose time is over",
        "",
    ),
    relies_on(
        SCHEDULER,
        "managers.scheduler:Scheduler.ingest_requests",
        "read",
        "all processes are told what the first one says",
        "",
        lambda f: reads_attributes("_poll_timeout_aborts recv_requests process_input_requests")(
            inspect.unwrap(f)
        ),
    ),
    # --- the step ---
    relies_on(
        SCHEDULER,
        "managers.tp_worker:TpModelWorker.forward_batch_generation",
        "override",
        "the engine step",
        "batch forward_batch pp_proxy_tensors is_verify skip_attn_backend_init capture_hidden_mode",
    ),
    relies_on(
        SCHEDULER,
        "managers.tp_worker:TpModelWorker.alloc_memory_pool",
        "override",
        "the moment from which the size of the KV cache is known",
        "memory_pool_config req_to_token_pool token_to_kv_pool_allocator",
    ),
    relies_on(
        SCHEDULER,
        "managers.tp_worker:TpModelWorker.init_attention_backends",
        "override",
        "the draft's backend, and what needs the pools of both models, come with the target's",
        "",
    ),
    relies_on(
        SCHEDULER,
        "managers.schedule_batch:ReqKvInfo",
        "read",
        "KV slots a request holds",
        check=lambda c: "kv_allocated_len" in c.__dataclass_fields__,
    ),
    relies_on(
        SCHEDULER,
        "managers.scheduler_components.output_streamer:SchedulerOutputStreamer.stream_output",
        "override",
        "sees each step's tokens: time of the first one; holds back what may become a stop",
        "reqs return_logprob skip_req",
    ),
    relies_on(
        SCHEDULER,
        "managers.scheduler_components.output_streamer:SchedulerOutputStreamer.build_additional_customized_info",
        "override",
        "sends the report with the last tokens",
        "reqs",
    ),
    relies_on(
        SCHEDULER,
        "managers.scheduler_components.output_streamer:SchedulerOutputStreamer.has_additional_customized_info",
        "override",
        "whether there is a report is asked only where this is true",
        check=lambda default: default is False,
    ),
    # --- a machine without a GPU ---
    relies_on(
        SCHEDULER,
        "layers.attention.attention_registry:ATTENTION_BACKENDS",
        "register",
        "our CPU backend takes the slot torch_native",
        check=lambda registry: "torch_native" in registry,
    ),
    relies_on(
        SCHEDULER,
        "utils.common:support_triton",
        "read",
        "helpers must stay on PyTorch for the slot torch_native",
        "backend",
        lambda f: not f("torch_native"),
    ),
    relies_on(
        SCHEDULER,
        "layers.attention.base_attn_backend:AttentionBackend.init_forward_metadata",
        "override",
        "the step's plan is made here",
        "forward_batch",
    ),
    relies_on(
        SCHEDULER,
        "layers.attention.base_attn_backend:AttentionBackend.forward_decode",
        "override",
        "decode attention",
        "q k v layer forward_batch save_kv_cache kwargs",
    ),
    relies_on(
        SCHEDULER,
        "layers.attention.base_attn_backend:AttentionBackend.forward_extend",
        "override",
        "prefill attention",
        "q k v layer forward_batch save_kv_cache kwargs",
    ),
    relies_on(
        SCHEDULER,
        "mem_cache.memory_pool:MHATokenToKVPool.set_kv_buffer",
        "call",
        "stores new keys and values",
        "layer loc_info cache_k cache_v k_scale v_scale layer_id_override dcp_kv_mask",
    ),
    relies_on(
        SCHEDULER,
        "mem_cache.memory_pool:MHATokenToKVPool.get_kv_size_bytes",
        "call",
        "size of the KV cache",
        "",
    ),
    relies_on(
        SCHEDULER,
        "mem_cache.allocator.paged:PagedTokenToKVPoolAllocator.alloc_extend",
        "override",
        "allocation without Triton",
        "prefix_lens prefix_lens_cpu seq_lens seq_lens_cpu last_loc extend_num_tokens num_new_pages",
    ),
    relies_on(
        SCHEDULER,
        "mem_cache.allocator.paged:PagedTokenToKVPoolAllocator.alloc_decode",
        "override",
        "allocation without Triton",
        "seq_lens seq_lens_cpu last_loc",
    ),
    *(
        relies_on(SCHEDULER, f"platforms.interface:SRTPlatform.{method}", "override", why, "")
        for method, why in (
            ("get_default_attention_backend", "names the CPU's attention backend"),
            ("get_mha_kv_pool_cls", "names the KV pool of an out-of-tree platform"),
            ("get_paged_allocator_cls", "names the allocator of an out-of-tree platform"),
            ("get_graph_runner_cls", "captures decode steps over depth pages"),
            ("support_cuda_graph", "an out-of-tree platform without it captures no step"),
        )
    ),
    *(
        relies_on(
            f"{SERVER} {SCHEDULER}", f"platforms.device_mixin:DeviceMixin.{method}", "override", why, ""
        )
        for method, why in (
            ("get_torch_profiler_activity", "what a profile of the engine's steps records"),
            ("get_torch_profiler_activity_str", "the same by name"),
        )
    ),
    relies_on(
        f"{SERVER} {SCHEDULER}",
        "platforms.device_mixin:DeviceMixin._enum",
        "override",
        "says that a platform is another's",
        check=lambda default: hasattr(type(default), "OOT"),
    ),
    relies_on(
        f"{SERVER} {SCHEDULER}",
        "platforms.device_mixin:DeviceMixin.is_out_of_tree",
        "read",
        "the platform is asked for the classes above where `_enum` says that a platform is another's",
        "",
        reads_attributes("_enum OOT"),
    ),
    relies_on(
        f"{SERVER} {SCHEDULER}",
        "utils.hf_transformers.common:get_rope_config",
        "read",
        "a model's rotations are those of `rope_parameters`",
        "config",
    ),
)
