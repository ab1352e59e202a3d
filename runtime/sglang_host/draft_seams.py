"""The seams of the draft model, of speculative decoding and of several tokens per step."""

from fathom.runtime.sglang_host.seam import (
    SCHEDULER,
    SERVER,
    Seam,
    reads_attributes,
    reads_global,
    relies_on,
)

PROCESSOR = "managers.scheduler_components.batch_result_processor:SchedulerBatchResultProcessor"

DRAFT_SEAMS: tuple[Seam, ...] = (
    # --- the draft model ---
    relies_on(
        SCHEDULER,
        "managers.tp_worker:TpModelWorker.__init__",
        "call",
        "loads the draft beside the target",
        "server_args gpu_id ps nccl_port is_draft_worker req_to_token_pool token_to_kv_pool_allocator "
        "memory_pool_config is_multi_layer_eagle context_length draft_attention_backend random_seed",
    ),
    relies_on(
        SCHEDULER,
        "managers.tp_worker:TpModelWorker._init_model_config",
        "read",
        "a draft worker loads the model of --speculative-draft-model-path",
        "",
        reads_attributes("is_draft_worker speculative_draft_model_path"),
    ),
    relies_on(
        SCHEDULER,
        "layers.moe.utils:draft_model_build_scope",
        "call",
        "keeps what the draft's construction decides away from the target",
        "",
    ),
    relies_on(
        SCHEDULER,
        "model_executor.model_runner:ModelRunner._init_post_memory_pool_components",
        "call",
        "what follows the pools, which the draft makes itself",
        "",
    ),
    relies_on(
        SCHEDULER,
        "model_executor.model_runner:ModelRunner.init_attention_backends",
        "read",
        "the attention backend is made after the pools",
        "",
        reads_attributes("attn_backend"),
    ),
    relies_on(
        SCHEDULER,
        "managers.tp_worker:TpModelWorker.init_cuda_graphs",
        "override",
        "the draft makes its runner of eager passes, and that of captured steps itself",
        "capture_decode_cuda_graph",
    ),
    relies_on(
        SCHEDULER,
        "model_executor.runner.decode_cuda_graph_runner:DecodeCudaGraphRunner",
        "subclass",
        "captures and replays the draft's decode steps, of batches that we compose",
        check=lambda c: (
            {"capture_one_shape", "can_run_graph", "execute", "load_batch"} <= set(vars(c))
            and reads_attributes("fill_from needs_forward_metadata_init")(c.load_batch)
        ),
    ),
    relies_on(
        SCHEDULER,
        "model_executor.graph_shared_output:GraphSharedOutput.get_logits_buffer",
        "read",
        "every runner's logits lie in one buffer by size of the vocabulary, so that the draft's are copied out",
        "vocab_size rows",
        reads_attributes("_logits_buffers max_rows"),
    ),
    relies_on(
        SCHEDULER,
        "model_executor.graph_shared_output:GraphSharedOutput.create_for_model_runner",
        "read",
        "takes a buffer that is there, ours, if it has rows enough",
        "model_runner",
        reads_attributes("_process_shared max_rows"),
    ),
    relies_on(
        SCHEDULER,
        "model_executor.cuda_graph_config:CudaGraphConfig",
        "read",
        "says how large a captured step may be, before it is captured",
        check=lambda c: {"backend", "bs"} <= set(c().decode.__dataclass_fields__),
    ),
    relies_on(
        SCHEDULER,
        "layers.logits_processor:LogitsProcessor._get_pruned_states",
        "read",
        "the logits of a pass are those of each request's last row",
        "hidden_states hidden_states_before_norm aux_hidden_states logits_metadata",
        reads_attributes("extend_seq_lens extend_return_logprob"),
    ),
    relies_on(
        SCHEDULER,
        "model_executor.forward_context:forward_context",
        "call",
        "names the backend of a pass",
        "ctx",
    ),
    # --- the prefix cache keeps what both models have read ---
    relies_on(
        SCHEDULER,
        "managers.schedule_batch:Req.effective_kv_committed_len",
        "replace",
        "ends where the draft has read to",
        "",
    ),
    relies_on(
        SCHEDULER,
        "mem_cache.common:_release_overallocated_kv_indices",
        "replace",
        "frees what the draft has not read",
        "req start_p end_p tree_cache",
    ),
    relies_on(
        SCHEDULER,
        "mem_cache.common:release_kv_cache",
        "read",
        "asks both of these",
        "req tree_cache is_insert",
        lambda f: (
            reads_global("_release_overallocated_kv_indices")(f)
            and reads_attributes("effective_kv_committed_len")(f)
        ),
    ),
    # --- several tokens per step ---
    relies_on(
        SCHEDULER,
        "managers.scheduler:Scheduler.init_batch_result_processor",
        "override",
        "puts our processor of results in SGLang's place",
        "",
        reads_attributes("batch_result_processor"),
    ),
    relies_on(
        SCHEDULER,
        f"{PROCESSOR}._normalize_decode_outputs",
        "override",
        "a list of tokens per request",
        "batch result logits_output next_token_ids",
    ),
    relies_on(
        SCHEDULER,
        f"{PROCESSOR}._apply_decode_logprobs",
        "override",
        "log-probabilities of several tokens",
        "req i batch next_token_id next_token_logprobs logits_output",
    ),
    relies_on(
        SCHEDULER,
        f"{PROCESSOR}.process_batch_result_decode",
        "read",
        "puts out lists of tokens and looks for an end in all of them",
        "batch result",
        reads_attributes("_normalize_decode_outputs extend update_finish_state _accept_grammar_tokens"),
    ),
    relies_on(
        SCHEDULER,
        f"{PROCESSOR}.process_batch_result_prefill",
        "override",
        "a prompt's first tokens may be several; until a chunk before its last is processed, the request says so",
        "batch result",
        reads_attributes("output_ids append update_finish_state inflight_middle_chunks"),
    ),
    relies_on(SCHEDULER, f"{PROCESSOR}._accept_grammar_tokens", "call", "takes several tokens", "req tokens"),
    relies_on(
        SCHEDULER,
        f"{PROCESSOR}._maybe_update_reasoning_tokens",
        "call",
        "takes several tokens",
        "req next_token_id",
    ),
    relies_on(
        SCHEDULER,
        "managers.schedule_batch:Req.update_finish_state",
        "replace",
        "looks at all tokens of a first burst",
        "new_accepted_len",
    ),
    relies_on(
        SCHEDULER,
        "session.session_controller:Session._concat_token_arrays",
        "replace",
        "a session's next turn goes on from all that its last answer put out",
        "last_req req session_params",
        reads_attributes("output_ids"),
    ),
    relies_on(
        SCHEDULER,
        "managers.scheduler:Scheduler._relay_forward_payload",
        "read",
        "the next step starts from the result's last tokens",
        "batch future_indices batch_result",
        reads_attributes("next_token_ids"),
    ),
    relies_on(
        SCHEDULER,
        "layers.sampler:Sampler.forward",
        "read",
        "log-probabilities of drafted tokens before the temperature, where those of others are",
        None,
        reads_global("SGLANG_RETURN_ORIGINAL_LOGPROB"),
    ),
    relies_on(
        SCHEDULER,
        "constrained.base_grammar_backend:BaseGrammarObject.rollback",
        "call",
        "takes drafted tokens back; what does not define it is not drafted for",
        "k",
    ),
    relies_on(
        SCHEDULER,
        "constrained.reasoner_grammar_backend:ReasonerGrammarObject.rollback",
        "read",
        "stands before another grammar, which takes its own tokens back",
        "k",
        reads_attributes("grammar rollback"),
    ),
    # --- what a selection must keep ---
    relies_on(
        SERVER,
        "entrypoints.openai.serving_chat:OpenAIServingChat._process_messages",
        "replace",
        "makes the prompt of the chat, responses, messages and tokenize routes",
        "request is_multimodal",
    ),
    relies_on(
        SERVER,
        "entrypoints.openai.serving_chat:OpenAIServingChat._render_and_encode_chat_template",
        "replace",
        "renders the conversation as it has become",
        "messages tools template_kwargs encode_kwargs use_cache",
    ),
)
