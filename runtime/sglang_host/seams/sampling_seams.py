"""The seams of sampling: seeds, penalties, log-probabilities, logits that are no numbers."""

import inspect

from fathom.runtime.sglang_host.seams.seam import SCHEDULER, Seam, reads_attributes, reads_global, relies_on

SAMPLING_SEAMS: tuple[Seam, ...] = (
    relies_on(
        SCHEDULER,
        "sampling.sampling_batch_info:SamplingBatchInfo.adjusted_from_schedule_batch",
        "replace",
        "a request's seed counts, and its neighbours do not scale log-probabilities of one without chance",
        "batch vocab_size",
    ),
    relies_on(
        SCHEDULER,
        "sampling.sampling_batch_info:SamplingBatchInfo.merge_batch",
        "replace",
        "rows without a seed survive the merge with seeded ones",
        "other",
        lambda f: "sampling_seed" in str(f.__code__.co_consts),
    ),
    *(
        relies_on(
            SCHEDULER,
            f"sampling.penaltylib:Batched{name}Penalizer._prepare",
            "replace",
            "what a request said before it was taken out counts",
            "",
            reads_attributes(attributes),
        )
        for name, attributes in (
            ("Frequency", "frequency_penalties cumulated_frequency_penalties"),
            ("Presence", "presence_penalties cumulated_presence_penalties"),
            ("Repetition", "repetition_penalties cumulated_repetition_penalties"),
            ("MinNewTokens", "len_output_tokens stop_token_penalties"),
        )
    ),
    relies_on(
        SCHEDULER,
        "sampling.penaltylib:BatchedPenalizerOrchestrator.__init__",
        "replace",
        "penalties are added first and scaled by then, in every process",
        "vocab_size batch penalizers",
        reads_attributes("penalizers"),
    ),
    relies_on(
        SCHEDULER,
        "layers.sampler:register_sampler_backend",
        "register",
        "our sampler takes the slots pytorch and flashinfer: seeds beside min-p, and beside FlashInfer's draws",
        "backend factory",
    ),
    relies_on(
        SCHEDULER,
        "layers.sampler:Sampler.forward",
        "read",
        "takes log-probabilities from logits in deterministic mode",
        None,
        reads_attributes("enable_deterministic log_softmax"),
    ),
    relies_on(
        SCHEDULER,
        "layers.sampler:Sampler.forward",
        "override",
        "marks rows whose logits are no numbers, or of which a grammar allows none",
        "logits_output sampling_info return_logprob top_logprobs_nums token_ids_logprobs positions",
        reads_attributes("next_token_logits"),
    ),
    relies_on(
        SCHEDULER,
        "managers.utils:GenerationBatchResult.copy_to_cpu",
        "replace",
        "takes those marks along to the host",
        "return_logprob return_hidden_states",
        lambda f: reads_attributes("logits_output copy_done")(inspect.unwrap(f)),
    ),
    relies_on(
        SCHEDULER,
        "managers.utils:_async_d2h",
        "call",
        "copies to the host without a wait",
        "t",
    ),
    relies_on(
        SCHEDULER,
        "managers.schedule_batch:Req.update_finish_state",
        "read",
        "ends a request for the reason in to_finish, before any other",
        "new_accepted_len",
        reads_attributes("to_finish finished_reason"),
    ),
    relies_on(
        SCHEDULER,
        "mem_cache.common:release_kv_cache",
        "read",
        "puts nothing into the prefix cache where skip_radix_cache_insert says so",
        check=reads_attributes("skip_radix_cache_insert"),
    ),
    relies_on(
        SCHEDULER,
        "layers.sampler:Sampler._sample_from_probs",
        "override",
        "draws a batch with seeds as the backend pytorch does, whatever its rows ask for",
        "probs sampling_info positions simple_sampling_case",
        reads_global("top_k_top_p_min_p_sampling_from_probs_torch"),
    ),
    relies_on(
        SCHEDULER,
        "layers.sampler:top_k_top_p_min_p_sampling_from_probs_torch",
        "replace",
        "a seed's noise belongs to token ids, also beside min-p; on a CPU nothing sorts the vocabulary",
        "probs top_ks top_ps min_ps need_min_p_sampling sampling_seed positions return_filtered_probs",
    ),
    relies_on(
        SCHEDULER,
        "layers.sampler:sampling_from_probs_torch",
        "replace",
        "a draw on a CPU needs one random number, not one for each token",
        "probs sampling_seed positions",
    ),
    relies_on(
        SCHEDULER,
        "runtime_context:_ConfigBag.override",
        "call",
        "SGLang's sampler asks for the backend's name itself",
        "kwargs",
    ),
    relies_on(
        SCHEDULER,
        "layers.sampler:murmur_hash32",
        "replace",
        "seeded sampling on a CPU without sgl_kernel",
        "seed positions col_indices",
    ),
    relies_on(
        SCHEDULER,
        "layers.sampler:multinomial_with_seed",
        "replace",
        "a seeded draw is not compiled in the middle of a request",
        "logprobs seed positions",
    ),
    *(
        relies_on(
            SCHEDULER,
            f"managers.schedule_batch:Req.{name}",
            "replace",
            "a text that ends an answer is found, and not streamed, where characters span tokens",
            parameters,
            reads_attributes(attributes),
        )
        for name, parameters, attributes in (
            ("_stop_match_tail_len", "new_accepted_len", "stop_str_max_len output_ids"),
            ("tail_str", "new_accepted_len", "_stop_match_tail_len tokenizer decode output_ids"),
            ("check_match_stop_str_prefix", "", "stop_strs tail_str"),
        )
    ),
    relies_on(
        SCHEDULER,
        "managers.detokenizer_manager:DetokenizerManager._clamp_decode_ids",
        "call",
        "stops are looked for in the text that clients get, also of tokens that the tokenizer does not know",
        "ids vocab_size",
    ),
    relies_on(
        SCHEDULER,
        "managers.schedule_batch:Req._locate_str_stop_finished_len",
        "read",
        "counts the tokens of the answer in the window that is looked at",
        "new_accepted_len stop_str stop_regex",
        reads_attributes("_stop_match_tail_len"),
    ),
    relies_on(
        SCHEDULER,
        "managers.scheduler_components.output_streamer:DEFAULT_FORCE_STREAM_INTERVAL",
        "read",
        "after so many tokens the text of an answer without a stream is sent, and then stays in it",
        check=lambda tokens: isinstance(tokens, int) and tokens > 0,
    ),
)
