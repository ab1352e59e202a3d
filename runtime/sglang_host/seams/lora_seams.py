"""The seams of LoRA adapters: SGLang's layers and registry, with our backend where there is no GPU."""

from fathom.runtime.sglang_host.seams.seam import SCHEDULER, SERVER, Seam, reads_attributes, relies_on

LORA_SEAMS: tuple[Seam, ...] = (
    relies_on(
        SCHEDULER,
        "lora.lora_manager:LoRAManager.prepare_lora_batch",
        "call",
        "rows that we chose have adapters too",
        "forward_batch",
        reads_attributes("batch_size lora_ids forward_mode lora_backend"),
    ),
    relies_on(
        SCHEDULER,
        "lora.utils:generate_sequence_lengths",
        "read",
        "takes the rows of each request from what we set",
        "forward_batch device",
        reads_attributes("extend_seq_lens extend_seq_lens_cpu batch_size"),
    ),
    relies_on(
        SCHEDULER,
        "managers.schedule_batch:Req.__init__",
        "read",
        "puts an adapter's id at the end of the prefix cache's key, from where we move it",
        None,
        reads_attributes("lora_id extra_key"),
    ),
    relies_on(
        SCHEDULER,
        "lora.lora_config:LoRAConfig.__init__",
        "replace",
        "an adapter's config says what cannot be served; one rank and one scale for all matrices",
        "path config_dict added_tokens_config base_vocab_size",
        reads_attributes("hf_config r lora_alpha"),
    ),
    relies_on(
        SCHEDULER,
        "lora.lora:LoRAAdapter._process_weight",
        "replace",
        "only factors, and of layers that there are",
        "name loaded_weight",
        reads_attributes("layers embedding_layers"),
    ),
    relies_on(
        SCHEDULER,
        "lora.lora:LoRAAdapter._normalize_weights",
        "replace",
        "matrices that are missing from a stack are zeros; shapes are the model's",
        "",
        reads_attributes("normalize_qkv_proj normalize_gate_up_proj layers weights"),
    ),
    relies_on(SCHEDULER, "lora.lora:LoRAAdapter._is_non_gated_moe_weight", "call", "the same", "weight_name"),
    relies_on(
        SCHEDULER,
        "lora.mem_pool:LoRAMemoryPool.load_lora_weight_to_buffer",
        "replace",
        "nothing of the adapter that had the place before",
        None,
        reads_attributes("_clear_buffer_slot_for_base config r scaling"),
    ),
    relies_on(
        SCHEDULER,
        "layers.linear:QKVParallelLinear.__init__",
        "read",
        "outputs of q, k and v",
        None,
        reads_attributes("total_num_heads total_num_kv_heads head_size v_head_size"),
    ),
    *(
        relies_on(SCHEDULER, f"lora.utils:{name}", "call", "the model's shapes", parameters)
        for name, parameters in (
            ("get_hidden_dim", "module_name config base_model layer_idx lora_added_vocab_size"),
            ("get_stacked_multiply", "module_name base_model"),
            ("get_target_module_name", "full_module_name target_modules"),
            ("get_normalized_target_modules", "target_modules"),
            ("auto_detect_lora_target_modules", "model"),
        )
    ),
    relies_on(
        SERVER,
        "managers.tokenizer_manager:TokenizerManager.init_lora",
        "override",
        "who uses an adapter is known by what has not ended, not by a count",
        "",
        reads_attributes("lora_registry LoRARegistry lora_paths"),
    ),
    relies_on(
        SERVER,
        "lora.lora_registry:LoRARegistry.wait_for_unload",
        "override",
        "the same",
        "lora_id",
        reads_attributes("_counters"),
    ),
    relies_on(SERVER, "lora.lora_registry:LoRARegistry.release", "override", "the same", "lora_id"),
    relies_on(
        SERVER,
        "lora.lora_registry:LoRARegistry.acquire",
        "override",
        "no adapter goes between its look-up and its use",
        "lora_name",
        reads_attributes("_registry_lock _counters"),
    ),
    relies_on(
        SERVER,
        "lora.lora_registry:LoRARegistry.get_unregistered_loras",
        "call",
        "which adapters are loaded; those are used last",
        "lora_name",
        reads_attributes("_registry move_to_end"),
    ),
    relies_on(
        SERVER,
        "lora.lora_registry:LoRARegistry.lru_lora_name",
        "override",
        "an adapter that nobody asks for makes room first",
        "exclude_pinned",
        reads_attributes("_registry pinned"),
    ),
    relies_on(
        SERVER,
        "managers.tokenizer_control_mixin:TokenizerControlMixin.load_lora_adapter",
        "override",
        "a client that leaves does not end a loading half way",
        "obj _",
        reads_attributes("lora_update_lock update_lora_adapter_communicator register lru_lora_name"),
    ),
    relies_on(
        SERVER,
        "managers.tokenizer_control_mixin:TokenizerControlMixin.unload_lora_adapter",
        "override",
        "requests may bring back what was unloaded, in whose place another is loaded",
        "obj _",
        reads_attributes("lora_update_lock _unload_lora_adapter_locked"),
    ),
    relies_on(
        SERVER,
        "managers.io_struct:LoadLoRAAdapterFromTensorsReqInput.to_ref",
        "read",
        "an adapter of tensors, which cannot be loaded again, is known by this path",
        "",
        reads_attributes("__tensor__"),
    ),
    relies_on(
        SERVER,
        "managers.tokenizer_control_mixin:TokenizerControlMixin._unload_lora_adapter_locked",
        "read",
        "no new request finds an adapter that waits for its unloading",
        "obj",
        reads_attributes("unregister wait_for_unload"),
    ),
    relies_on(
        SERVER,
        "managers.tokenizer_manager:TokenizerManager._resolve_lora_path",
        "override",
        "`lora_path` may be set by us, names are those of `lora_ref_cache`; requests load one after the other",
        "obj",
        reads_attributes("lora_path lora_ref_cache load_lora_adapter acquire"),
    ),
    relies_on(
        SCHEDULER,
        "lora.backend.lora_registry:register_lora_backend",
        "register",
        "adapters are multiplied by our backend under SGLang's name",
        "name",
    ),
    relies_on(
        SCHEDULER,
        "model_executor.model_runner:ModelRunner.init_lora_manager",
        "replace",
        "SGLang's layers for adapters pin memory, which only an accelerator allows",
        "",
    ),
    relies_on(
        SCHEDULER,
        "lora.backend.base_backend:BaseLoRABackend",
        "subclass",
        "a backend has these methods, and layers ask whether a pass has adapters at all",
        check=lambda c: (
            {"validate_lora_targets", "reset_batch_state", "_get_lm_head_pass_segments"} <= set(dir(c))
            and c.skip_inactive_lora_batches is False
        ),
    ),
    *(
        relies_on(
            SCHEDULER, f"lora.backend.base_backend:BaseLoRABackend.{method}", "override", why, parameters
        )
        for method, why, parameters in (
            (
                "prepare_lora_batch",
                "whose the rows of a pass are",
                "forward_batch weight_indices lora_ranks scalings use_cuda_graph use_prefill_cuda_graph",
            ),
            (
                "run_lora_a_embedding",
                "an adapter of the embedding",
                "input_ids weights vocab_size extra_embeddings args kwargs",
            ),
            ("run_lora_a_sgemm", "an adapter's first product", "x weights args kwargs"),
            ("run_lora_b_sgemm", "and its second", "x weights args kwargs"),
            ("run_qkv_lora", "both of three projections", "x qkv_lora_a qkv_lora_b args kwargs"),
            ("run_gate_up_lora", "both of two", "x gate_up_lora_a gate_up_lora_b args kwargs"),
        )
    ),
    relies_on(
        SCHEDULER,
        "lora.layers:BaseLayerWithLoRA.lora_active",
        "read",
        "a pass without adapters is the model's own",
        check=lambda p: reads_attributes("batch_info skip_inactive_lora_batches")(p.fget),
    ),
    relies_on(
        SCHEDULER,
        "lora.layers:BaseLayerWithLoRA.__init__",
        "read",
        "the layer beneath is packed",
        "base_layer lora_backend",
    ),
    *(
        relies_on(
            SCHEDULER,
            f"lora.layers:{layer}WithLoRA.forward",
            "read",
            "multiplies by its weight as the layer beneath does",
            None,
            reads_attributes("quant_method apply base_layer"),
        )
        for layer in ("ColumnParallelLinear", "RowParallelLinear")
    ),
    relies_on(
        SCHEDULER,
        "lora.utils:get_lm_head_pruned_lens",
        "call",
        "which rows the output matrix gets",
        "forward_batch",
    ),
    relies_on(
        SCHEDULER,
        "managers.scheduler:Scheduler.init_lora_drainer",
        "override",
        "adapters get their places in a batch in turn",
        "",
        reads_attributes("lora_drain_wait_threshold lora_drainer"),
    ),
    relies_on(
        SCHEDULER,
        "managers.scheduler:Scheduler._get_new_batch_prefill_raw",
        "read",
        "asks who may have a place, after it has looked whose turn it is",
        None,
        reads_attributes("lora_drainer update_draining_state can_schedule_lora_req"),
    ),
    relies_on(
        SCHEDULER,
        "managers.scheduler:Scheduler.can_schedule_lora_req",
        "read",
        "the same",
        "req running_loras",
        reads_attributes("lora_drainer can_schedule validate_lora_batch"),
    ),
    relies_on(
        SCHEDULER,
        "lora.lora_manager:LoRAManager.validate_lora_batch",
        "call",
        "which adapters fit into one batch",
        "lora_ids",
        reads_attributes("lora_refs pinned"),
    ),
    relies_on(
        SCHEDULER,
        "managers.scheduler:Scheduler.unload_lora_adapter",
        "call",
        "lets an adapter go that other processes of the model could not load",
        "recv_req",
    ),
    *(
        relies_on(
            SCHEDULER,
            f"managers.io_struct:{answer}",
            "read",
            "says whether a process could load what it was asked to",
            check=lambda c: "success" in c.__struct_fields__,
        )
        for answer in ("LoRAUpdateOutput", "UpdateWeightFromDiskReqOutput")
    ),
)
