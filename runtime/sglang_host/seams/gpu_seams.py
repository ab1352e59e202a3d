"""The seams of depth pages on a GPU: the platform, the options that are asked for, the size of the pool.

They are looked at on every machine, so that one without a GPU finds out when SGLang has changed.
"""

import inspect

from fathom.runtime.sglang_host.seams.seam import (
    SCHEDULER,
    SERVER,
    Seam,
    reads_attributes,
    reads_global,
    relies_on,
)

_GRAPHS = "model_executor.runner.decode_cuda_graph_runner:DecodeCudaGraphRunner"

GPU_SEAMS: tuple[Seam, ...] = (
    relies_on(
        SERVER,
        "configs.hybrid_arch:mambaish_config",
        "call",
        "tells a model with a recurrent state before it is loaded",
        "model_config",
    ),
    relies_on(
        SERVER,
        "configs.model_config:AttentionArch",
        "read",
        "tells a model with latent attention before it is loaded",
        check=lambda c: hasattr(c, "MLA"),
    ),
    relies_on(
        f"{SERVER} {SCHEDULER}",
        "platforms.cuda:CudaDeviceMixin",
        "subclass",
        "our platform for GPUs is SGLang's in all that concerns the device",
        check=lambda c: (
            {
                "get_device_total_memory",
                "is_pin_memory_available",
                "get_torch_distributed_backend_str",
            }
            <= set(vars(c))
        ),
    ),
    relies_on(
        f"{SERVER} {SCHEDULER}",
        "platforms:_resolve_platform",
        "register",
        "our plugin is asked before SGLang looks for a GPU itself",
        "",
        lambda f: {"load_plugins_by_group", "_is_cuda_available"} <= set(f.__code__.co_names),
    ),
    relies_on(
        SERVER,
        "arg_groups.choices:add_attention_backend_choices",
        "call",
        "--attention-backend takes the name of ours",
        check=lambda add: add.__name__ == "extend" and "torch_native" in add.__self__,
    ),
    relies_on(
        SERVER,
        "server_args:ServerArgs.resolve_once",
        "call",
        "what was asked for is checked as it will be, not as it was written",
        "",
    ),
    relies_on(
        SERVER,
        "arg_groups.model_override_base:resolved_view",
        "call",
        "reads arguments as they were resolved",
        "server_args",
    ),
    relies_on(
        SCHEDULER,
        "utils.common:support_triton",
        "read",
        "helpers launch SGLang's Triton kernels for our backend on a GPU",
        "backend",
        lambda f: f("fathom_triton"),
    ),
    *(
        relies_on(SCHEDULER, target, "read", why, check=reads_global("support_triton"))
        for target, why in (
            (
                "mem_cache.allocation:write_cache_indices",
                "fills the request table without waiting for the device",
            ),
            (
                "model_executor.forward_batch_info:compute_position",
                "positions of a prefill batch, on the device",
            ),
        )
    ),
    relies_on(
        SCHEDULER,
        "model_executor.model_runner_components.cuda_graph_setup:capture_decode_graph",
        "read",
        "captures decode steps with the runner that the platform names",
        check=lambda f: {"get_graph_runner_cls", "check_cuda_graph_backend"} <= set(f.__code__.co_names),
    ),
    relies_on(
        SCHEDULER,
        "model_executor.model_runner:ModelRunner._forward_raw",
        "read",
        "asks the runner of captured steps before it computes a decode step",
        None,
        reads_attributes("decode_cuda_graph_runner can_run_graph execute"),
    ),
    relies_on(
        SCHEDULER,
        f"{_GRAPHS}.__init__",
        "override",
        "captures at the end of it, in sizes of capture_bs what attention_graph_variants says",
        "model_runner attn_backend speculative_num_steps speculative_num_draft_tokens record_nolora_graph",
        reads_attributes(
            "attention_graph_variants capture_bs init_cuda_graph_state get_cuda_graph_seq_len_fill_value"
        ),
    ),
    relies_on(
        SCHEDULER,
        f"{_GRAPHS}.capture_one_shape",
        "override",
        "requests that alternate are captured too, and passes over several tokens of each; not in all sizes",
        "size forward stream_idx variant_label attention_variant",
        reads_attributes("init_forward_metadata_out_graph capture_one"),
    ),
    relies_on(
        SCHEDULER,
        f"{_GRAPHS}.can_run_graph",
        "override",
        "some steps are not replayed, such as those that choose at random",
        "forward_batch",
        reads_attributes("max_bs"),
    ),
    relies_on(
        SCHEDULER,
        f"{_GRAPHS}.load_batch",
        "read",
        "fills a batch up, and has the backend's buffers filled before a replay; of a batch that is said to be "
        "ready it takes tokens and positions alone",
        "forward_batch pp_proxy_tensors",
        reads_attributes(
            "_pad_to_bucket init_forward_metadata_out_graph _resolve_attention_variant needs_forward_metadata_init "
            "raw_num_token input_ids positions"
        ),
    ),
    relies_on(
        SCHEDULER,
        "model_executor.forward_batch_info:ForwardBatch.mark_forward_metadata_ready",
        "call",
        "a batch whose requests are each a token longer is replayed with what the backend has prepared itself",
        "replan_equivalent",
        reads_attributes("forward_metadata_ready"),
    ),
    relies_on(
        SCHEDULER,
        "model_executor.model_runner:ModelRunner.forward",
        "call",
        "runs that batch; its logits are in logits_output",
        "forward_batch skip_attn_backend_init pp_proxy_tensors reinit_attn_backend split_forward_count",
    ),
    relies_on(
        SCHEDULER,
        "model_executor.model_runner:ModelRunner.sample",
        "call",
        "samples what follows; a seed's draw is told by the batch's positions",
        "logits_output forward_batch",
        reads_attributes("sampling_info positions"),
    ),
    relies_on(
        SCHEDULER,
        "sampling.penaltylib.repetition_penalty:apply_scaling_penalties",
        "replace",
        "a repetition penalty is not compiled in the middle of a request",
        "logits scaling_penalties",
    ),
    relies_on(
        SCHEDULER,
        "sampling.sampling_batch_info:SamplingBatchInfo._apply_pre_grammar_logits_transforms",
        "read",
        "takes that function from its module",
        "logits",
        reads_global("apply_scaling_penalties"),
    ),
    relies_on(
        SCHEDULER,
        "model_executor.runner.base_runner:BaseRunner._dummy_run",
        "read",
        "runs requests that nobody made, to tune kernels at start; they have no rids",
        "batch_size run_ctx forward_mode_override buffers extend_num_tokens_per_req",
        lambda f: (
            "init_forward_metadata" in f.__code__.co_names
            and not any("rids" in names for names in f.__code__.co_consts if isinstance(names, tuple))
        ),
    ),
    relies_on(
        SCHEDULER,
        "model_executor.forward_batch_info:ForwardBatch",
        "read",
        "rids are the names of a batch's requests",
        check=lambda c: "rids" in c.__dataclass_fields__,
    ),
    relies_on(
        SCHEDULER,
        "model_executor.runner.decode_cuda_graph_runner:build_replay_fb_view",
        "read",
        "says how many requests are made up, and their lengths on the host",
        "forward_batch buffers bs raw_bs num_tokens seq_len_fill_value capture_forward_mode is_encoder_decoder",
        reads_attributes("num_padding seq_lens_cpu"),
    ),
    relies_on(
        SCHEDULER,
        f"{_GRAPHS}.execute",
        "override",
        "counts replays; the scheduler may write to its tables once the buffers are filled; timed by device_timer",
        "forward_batch pp_proxy_tensors",
        reads_attributes("_resolve_shared_read_ends _publish_read_done replay device_timer"),
    ),
    relies_on(
        SCHEDULER,
        "model_executor.model_runner:ModelRunner.__init__",
        "read",
        "the stream of steps is made before ours takes its place, and read by the scheduler after that",
        None,
        reads_attributes("forward_stream"),
    ),
    relies_on(
        SCHEDULER,
        "managers.tp_worker:TpModelWorker.get_worker_info",
        "read",
        "tells the scheduler the stream of steps",
        "",
        reads_attributes("forward_stream"),
    ),
    relies_on(
        SCHEDULER,
        "model_executor.runner_utils.pool:get_or_create_global_graph_capture_stream",
        "read",
        "steps are captured on the stream of this name",
        "",
        lambda f: {"get_stream", "_CAPTURE_STREAM_NAME"} <= set(f.__code__.co_names),
    ),
    relies_on(
        SCHEDULER,
        "runtime_context:set_stream",
        "call",
        "a stream of ours under a name of SGLang's",
        "name stream",
    ),
    relies_on(
        SCHEDULER,
        "layers.attention.base_attn_backend:SharedReadEnds",
        "read",
        "a replayed step reads the scheduler's tables before its replay only",
        check=lambda c: "PRE_REPLAY" in c.__members__,
    ),
    *(
        relies_on(
            SCHEDULER,
            f"layers.attention.base_attn_backend:AttentionBackend.{name}",
            "override",
            "the buffers that captured steps read",
            parameters,
        )
        for name, parameters in (
            ("init_cuda_graph_state", "max_bs max_num_tokens"),
            ("init_forward_metadata_out_graph", "forward_batch in_capture"),
            ("shared_read_ends", "fm"),
            ("get_cuda_graph_seq_len_fill_value", ""),
        )
    ),
    *(
        relies_on(
            SCHEDULER,
            f"layers.{layer}.{forward}",
            "call",
            "our platform's layers are SGLang's CUDA kernels for 16-bit types, PyTorch's operations for float32",
            parameters,
        )
        for layer, parameters in (
            ("layernorm:RMSNorm", "x residual post_residual_addition quant_linear"),
            ("activation:SiluAndMul", "x"),
        )
        for forward in ("forward_cuda", "forward_native")
    ),
    relies_on(
        SCHEDULER,
        "layers.rotary_embedding.base:RotaryEmbedding.forward_cuda",
        "call",
        "rotates in place with the head sizes that its kernel takes",
        "positions query key offsets fused_set_kv_buffer_arg",
    ),
    relies_on(
        SCHEDULER,
        "models.utils:enable_fused_set_kv_buffer",
        "replace",
        "models leave writing keys and values to the backend: the slots that they know are virtual",
        "forward_batch",
    ),
    relies_on(
        SCHEDULER,
        "managers.scheduler:Scheduler.event_loop_normal",
        "read",
        "without overlap a step's result is processed before the next batch is composed",
        "",
        lambda f: (
            {"get_next_batch_to_run", "run_batch", "process_batch_result"}
            <= set(inspect.unwrap(f).__code__.co_names)
        ),
    ),
    relies_on(
        SCHEDULER,
        "managers.scheduler:Scheduler.event_loop_overlap",
        "read",
        "with overlap a launched step waits in result_queue, and is processed once, in order",
        "",
        lambda f: (
            {"result_queue", "get_next_batch_to_run", "is_disable_overlap_for_batch", "_apply_war_barrier"}
            <= set(inspect.unwrap(f).__code__.co_names)
        ),
    ),
    relies_on(
        SCHEDULER,
        "managers.scheduler:Scheduler.get_next_batch_to_run",
        "override",
        "the last result is processed first where the next batch follows from it; an empty batch is not full",
        "running_batch last_batch",
    ),
    relies_on(
        SCHEDULER,
        "managers.scheduler:Scheduler._get_new_batch_prefill_raw",
        "override",
        "lets nobody in where batch_is_full says so; who was taken out for nobody comes back",
        "prefill_delayer_single_pass running_batch",
        reads_attributes("batch_is_full preempt_list can_run_list"),
    ),
    relies_on(
        SCHEDULER,
        "managers.scheduler:Scheduler.run_batch",
        "override",
        "counts the steps that are launched before the last result is processed; profiles change before it",
        "batch pp_proxy_tensors",
        lambda f: reads_attributes("_profile_batch_predicate forward_ct")(inspect.unwrap(f)),
    ),
    relies_on(
        SCHEDULER,
        "managers.overlap_utils:resolve_forward_inputs",
        "read",
        "a step's tokens are on the device before the worker is given its batch: what slow-fast steps read follows",
        "batch future_map",
        reads_attributes("input_ids output_tokens_buf mix_running_indices"),
    ),
    relies_on(
        SCHEDULER,
        "server_args:ServerArgs",
        "read",
        "how many decode steps follow each other before the scheduler is asked again",
        check=lambda c: hasattr(c, "num_continuous_decode_steps"),
    ),
    relies_on(
        SCHEDULER,
        "managers.schedule_batch:ScheduleBatch.prepare_for_decode",
        "read",
        "what a further decode step moves on: lengths, and where the new tokens go",
        "",
        reads_attributes("seq_lens seq_lens_cpu orig_seq_lens seq_lens_sum out_cache_loc"),
    ),
    relies_on(
        SCHEDULER,
        "managers.scheduler:Scheduler.is_disable_overlap_for_batch",
        "override",
        "a grammar knows all tokens before a step that judges proposals",
        "batch last_batch",
    ),
    relies_on(
        SCHEDULER,
        "managers.scheduler:Scheduler._apply_war_barrier",
        "read",
        "later writes to the request table wait for the event that a step's last look at it leaves",
        "",
        reads_attributes("shared_read_done_event last_shared_read_runner"),
    ),
    relies_on(
        SCHEDULER,
        "managers.tp_worker:TpModelWorker.forward_batch_generation",
        "read",
        "samples at once where overlap is off for a step that judges proposals",
        None,
        reads_attributes("enable_overlap"),
    ),
    relies_on(
        SCHEDULER,
        "managers.utils:GenerationBatchResult",
        "read",
        "a step's result says when it has arrived, and takes the step's account along",
        check=lambda c: "copy_done" in c.__dataclass_fields__ and not hasattr(c, "__slots__"),
    ),
    relies_on(
        SCHEDULER,
        "model_executor.pool_configurator:DefaultPoolConfigurator._compute_cell_size",
        "replace",
        "the draft's KV counts in the bytes of a token",
        "kvc num_layers",
    ),
    relies_on(
        SCHEDULER,
        "model_executor.pool_configurator:DefaultPoolConfigurator.__init__",
        "read",
        "takes the bytes of a token from there",
        "kvc",
        reads_attributes("_compute_cell_size"),
    ),
    relies_on(
        SCHEDULER,
        "mem_cache.kv_cache_configurator:KVCacheConfigurator._profile_available_bytes",
        "replace",
        "what lies beside the pool is taken off its budget",
        "pre_model_load_memory",
    ),
)
