"""The seams of who runs next: admission by pages, allocation, chunks, and the spans of a forward."""

from inspect import unwrap

from fathom.runtime.sglang_host.seams.seam import SCHEDULER, Seam, reads_attributes, reads_global, relies_on

ADMISSION_SEAMS: tuple[Seam, ...] = (
    *(
        relies_on(
            SCHEDULER,
            f"mem_cache.allocation:{function}",
            "replace",
            "physical pages are taken with the virtual ones, before the forward",
            parameters,
        )
        for function, parameters in (
            ("alloc_for_extend", "batch"),
            ("alloc_for_decode", "batch token_per_req"),
        )
    ),
    *(
        relies_on(
            SCHEDULER,
            f"managers.schedule_batch:ScheduleBatch.{method}",
            "read",
            "takes its allocation from its module",
            "",
            reads_global(function),
        )
        for method, function in (
            ("prepare_for_extend", "alloc_for_extend"),
            ("prepare_for_decode", "alloc_for_decode"),
        )
    ),
    *(
        relies_on(SCHEDULER, f"managers.schedule_policy:PrefillAdder.{method}", "override", why, parameters)
        for method, why, parameters in (
            ("add_one_req", "a prompt costs its pages", "req has_chunked_req truncation_align_size"),
            ("add_chunked_req", "a chunk costs its pages", "req"),
            (
                "_update_prefill_budget",
                "a prompt is charged its pages",
                "prefix_len extend_input_len max_new_tokens retracted_stain mamba_gap_reserve "
                "is_chunked_continuation compute_charge",
            ),
        )
    ),
    *(
        relies_on(
            SCHEDULER,
            f"managers.schedule_policy:PrefillAdder.{name}",
            "override",
            "a property: what is left for prompts, in tokens at all depths",
            check=lambda found: isinstance(found, property),
        )
        for name in ("rem_total_tokens", "cur_rem_tokens")
    ),
    relies_on(
        SCHEDULER,
        "managers.schedule_policy:PrefillAdder._select_prefill_admission",
        "read",
        "compares a request's tokens with rem_total_tokens",
        "req total_tokens host_hit_length swa_host_hit_length truncation_align_size",
        reads_attributes("rem_total_tokens rem_chunk_tokens"),
    ),
    relies_on(
        SCHEDULER,
        "managers.schedule_policy:AddReqResult",
        "read",
        "a prompt whose hidden states do not fit yet waits for the next batch",
        check=lambda result: hasattr(result, "OTHER"),
    ),
    relies_on(
        SCHEDULER,
        "managers.scheduler:Scheduler._get_new_batch_prefill_raw",
        "read",
        "takes PrefillAdder from its module",
        None,
        reads_global("PrefillAdder"),
    ),
    relies_on(
        SCHEDULER,
        "managers.scheduler:Scheduler._get_new_batch_prefill_raw",
        "read",
        "adds the next chunk of a long prompt before it goes through the queue, whose first ones fit beside it",
        None,
        reads_attributes("add_chunked_req waiting_queue batch_is_full"),
    ),
    relies_on(
        SCHEDULER,
        "managers.scheduler:Scheduler._should_defer_prefill",
        "override",
        "after a prefill whoever decodes goes first for some steps, which wait for nobody where nobody does",
        "",
        reads_attributes("_prefill_decode_interval_remaining"),
    ),
    relies_on(
        SCHEDULER,
        "managers.scheduler:Scheduler.get_num_allocatable_reqs",
        "call",
        "how many requests a step may take",
        "running_bs beam_width running_batch",
    ),
    relies_on(
        SCHEDULER,
        "managers.schedule_policy:PrefillAdder.add_chunked_req",
        "read",
        "a chunk is as long as rem_chunk_tokens",
        "req",
        reads_attributes("rem_chunk_tokens"),
    ),
    relies_on(
        SCHEDULER,
        "managers.scheduler:Scheduler.update_running_batch",
        "override",
        "where a decode step does not fit, a prompt between two chunks is among those of whom some are taken back",
        "batch",
        reads_attributes("check_decode_mem retract_decode increment_retracted_reqs _add_request_to_queue"),
    ),
    *(
        relies_on(SCHEDULER, target, "call", why, parameters)
        for target, why, parameters in (
            (
                "managers.schedule_batch:ScheduleBatch.check_decode_mem",
                "whether these can take a step",
                "selected_indices",
            ),
            ("managers.schedule_batch:ScheduleBatch._get_decode_retraction_order", "who goes first", "reqs"),
            ("beam_search.batch_tail:beam_retraction_order", "beams stay", "sorted_indices reqs"),
            ("beam_search.batch_tail:num_beam_member_rows", "rows that beams leave", "reqs"),
            (
                "managers.scheduler_components.new_token_ratio_tracker:NewTokenRatioTracker"
                ".estimate_new_token_ratio_after_retract",
                "who comes back is let in with more care",
                "reqs",
            ),
            ("managers.schedule_batch:Req.set_extend_range", "a parked prompt has no chunk", "start end"),
        )
    ),
    relies_on(
        SCHEDULER,
        "managers.scheduler:Scheduler.get_next_batch_to_run",
        "read",
        "keeps nothing of a prompt in chunks that has computed nothing",
        None,
        lambda method: reads_attributes("extend_range prefix_indices stash_chunked_request")(unwrap(method)),
    ),
    relies_on(
        SCHEDULER,
        "managers.schedule_policy:PrefillAdder.add_chunked_req",
        "read",
        "a prompt that comes back as it is, and is not in the batch, is next in the following one",
        "req",
        reads_attributes("is_hybrid_swa can_run_list"),
    ),
    relies_on(
        SCHEDULER,
        "managers.scheduler:Scheduler.pause_generation",
        "override",
        "forgets a prompt between two chunks, which may be one to abort",
        "recv_req",
        reads_attributes("chunked_req"),
    ),
    relies_on(
        SCHEDULER,
        "managers.scheduler:Scheduler.process_pending_chunked_abort",
        "call",
        "ends a prompt between two chunks that is to be aborted",
        "",
        reads_attributes("_pending_chunked_abort_req chunked_req"),
    ),
    relies_on(
        SCHEDULER,
        "managers.schedule_policy:PrefillAdder.preempt_to_schedule",
        "override",
        "who may take a running request's place; ours may take that of a prompt between two chunks, and nobody's "
        "where it has to wait for the last of them, or does not fit then",
        "req",
        reads_attributes(
            "priority priority_scheduling_preemption_threshold rem_total_tokens rem_total_token_offset "
            "preempt_list _get_running_request_total_token_offset CLIP_MAX_NEW_TOKENS"
        ),
    ),
    relies_on(
        SCHEDULER,
        "managers.schedule_policy:PrefillAdder._get_running_request_total_token_offset",
        "override",
        "where a running request may be taken out, what it holds counts too",
        "req",
    ),
    relies_on(
        SCHEDULER,
        "managers.schedule_batch:Req.init_next_round_input",
        "call",
        "how much of a waiting prompt is not in the cache; may be asked again",
        "tree_cache cow_mamba",
        reads_attributes("full_untruncated_fill_ids prefix_indices"),
    ),
    relies_on(
        SCHEDULER,
        "managers.scheduler:validate_input_length",
        "replace",
        "a prompt that can never fit is refused by its pages",
        "req max_req_input_len allow_auto_truncate",
    ),
    relies_on(
        SCHEDULER,
        "managers.scheduler:Scheduler.init_req_max_new_tokens",
        "override",
        "a shallow request may be longer than the dense tokens that fit; a prompt is cut before it is looked at",
        "req",
        reads_attributes("max_new_tokens_limit max_req_len"),
    ),
    relies_on(
        SCHEDULER,
        "managers.scheduler:Scheduler._abort_on_queued_limit",
        "override",
        "a full queue refuses nobody who was let in before, and ends nobody who has run",
        "recv_req",
        reads_attributes("waiting_queue priority"),
    ),
    relies_on(
        SCHEDULER,
        "managers.scheduler_components.output_streamer:_GenerationStreamAccumulator.accept",
        "read",
        "sends what a request has from a stream interval's beginning on",
        None,
        reads_attributes("stream_interval send_token_offset"),
    ),
    relies_on(
        SCHEDULER,
        "managers.tp_worker:TpModelWorker.get_worker_info",
        "override",
        "the longest request, in fifth and sixth place",
        "",
        reads_attributes("max_context_len forward_stream random_seed"),
    ),
    relies_on(
        SCHEDULER,
        "managers.tp_worker:TpModelWorker.forward_batch_generation",
        "read",
        "samples nothing where no request wants a token",
        None,
        reads_attributes("is_prefill_only"),
    ),
    relies_on(
        SCHEDULER,
        "model_executor.runner.eager_runner:EagerRunner.__init__",
        "read",
        "has room for as many tokens of one batch",
        "model_runner",
        reads_attributes("max_total_num_tokens"),
    ),
    relies_on(
        SCHEDULER,
        "managers.scheduler:Scheduler.stash_chunked_request",
        "override",
        "a prompt in chunks gets on although beams keep it out of the prefix cache",
        "req",
    ),
    relies_on(
        SCHEDULER,
        "managers.scheduler:Scheduler.init_beam_coordinator",
        "override",
        "the coordinator of beams becomes ours",
        "",
        reads_global("BeamCoordinator"),
    ),
    relies_on(
        SCHEDULER,
        "beam_search.coordinator:BeamCoordinator.validate_and_init",
        "override",
        "a beam search has an account of its policy",
        "req recv_req",
        reads_global("neutral_member_sampling_params"),
    ),
    relies_on(
        SCHEDULER,
        "beam_search.coordinator:BeamCoordinator.retire_group",
        "call",
        "no step looks after a search that was refused",
        "req",
    ),
    relies_on(
        SCHEDULER,
        "beam_search.coordinator:BeamCoordinator._free_member_rows",
        "call",
        "frees the rows and the KV of all beams but the first",
        "group",
        reads_attributes("_reclaim_orphans"),
    ),
    relies_on(
        SCHEDULER,
        "beam_search.beam_group:BeamGroup.__init__",
        "call",
        "a beam search that was taken back begins anew",
        "beam_width length_penalty stop_token_ids max_new_tokens num_return device",
    ),
    relies_on(
        SCHEDULER,
        "managers.schedule_batch:release_req",
        "replace",
        "a beam search that is taken back keeps no rows",
        "req remaing_req_count req_to_token_pool token_to_kv_pool_allocator tree_cache hisparse_coordinator "
        "offload_kv",
    ),
    *(
        relies_on(
            SCHEDULER,
            f"managers.schedule_batch:{function}",
            "read",
            "takes the function from its module",
            None,
            reads_global("release_req"),
        )
        for function in ("retract_all", "ScheduleBatch.release_req")
    ),
    relies_on(
        SCHEDULER,
        "mem_cache.common:maybe_cache_unfinished_req",
        "read",
        "returns before the cache could note how far such a prompt is",
        "req tree_cache kwargs",
        reads_attributes("cache_unfinished_req"),
    ),
)
