"""The seams of depth pages: memory, prefix cache, and the check of an idle engine."""

from fathom.runtime.sglang_host.seams.seam import SCHEDULER, Seam, reads_attributes, reads_global, relies_on

KV_SEAMS: tuple[Seam, ...] = (
    # --- memory ---
    relies_on(
        SCHEDULER,
        "mem_cache.memory_pool:MHATokenToKVPool.__init__",
        "override",
        "buffers of one span stand for those of all spans",
        "size page_size dtype head_num head_dim layer_num device enable_memory_saver v_head_dim swa_head_num "
        "swa_head_dim swa_v_head_dim start_layer end_layer enable_alt_stream enable_kv_cache_copy kv_cache_layout "
        "quant_method post_capture_active allocation_label",
    ),
    *(
        relies_on(
            SCHEDULER,
            f"mem_cache.memory_pool:MHATokenToKVPool._get_{kind}_buffer",
            "override",
            "a layer finds its buffer by its number, and keys and values of 8 bits a view that stays the same",
            "layer_id",
            reads_attributes(f"{kind[0]}_buffer start_layer store_dtype dtype"),
        )
        for kind in ("key", "value")
    ),
    relies_on(
        SCHEDULER,
        "mem_cache.kv_cache_configurator:KVCacheConfigurator._build_oot_mha_kv_pool",
        "read",
        "the platform's pool is made with these numbers",
        "max_total_num_tokens",
        reads_attributes("get_mha_kv_pool_cls num_effective_layers"),
    ),
    relies_on(
        SCHEDULER,
        "mem_cache.allocator.paged:PagedTokenToKVPoolAllocator._release_page_ids",
        "override",
        "every free of virtual pages passes here, and the free ones are one list, of which the first go first",
        "page_ids",
        reads_attributes("need_sort free_pages"),
    ),
    *(
        relies_on(
            SCHEDULER,
            f"mem_cache.allocator.paged:PagedTokenToKVPoolAllocator.{method}",
            "read",
            "frees end in _release_page_ids",
            parameters,
            reads_attributes("_release_page_ids"),
        )
        for method, parameters in (
            ("free", "free_index"),
            ("free_page_ids", "page_ids"),
            ("free_group_end", ""),
        )
    ),
    relies_on(
        SCHEDULER,
        "mem_cache.allocator.paged:PagedTokenToKVPoolAllocator.clear",
        "override",
        "physical pages are forgotten with the virtual ones, of which there are num_pages",
        "",
        reads_attributes("num_pages free_pages"),
    ),
    relies_on(
        SCHEDULER,
        "mem_cache.allocator.paged:PagedTokenToKVPoolAllocator.available_size",
        "override",
        "how many tokens fit at all depths: what SGLang shows, and compares with what it needs",
        "",
    ),
    relies_on(
        SCHEDULER,
        "mem_cache.memory_pool:MHATokenToKVPool.move_kv_cache",
        "override",
        "moves slots as if each layer had all of them: refused",
        "tgt_loc src_loc",
    ),
    relies_on(
        SCHEDULER,
        "mem_cache.allocator.base:BaseTokenToKVPoolAllocator.check_decode_capacity",
        "override",
        "whether a decode step fits, in pages",
        "num_tokens tree_cache requests spec_algorithm",
    ),
    relies_on(
        SCHEDULER,
        "mem_cache.memory_pool:ReqToTokenPool.attach_aux_cache",
        "call",
        "private tables are closed with their row",
        "aux_cache",
    ),
    relies_on(
        SCHEDULER,
        "mem_cache.memory_pool:ReqToTokenPool.free_rows",
        "read",
        "finish, abort and retraction all free the row",
        "indices",
        reads_attributes("_aux_cache free"),
    ),
    relies_on(
        SCHEDULER,
        "mem_cache.memory_pool:ReqToTokenPool.__init__",
        "override",
        "on a CPU the table takes memory where it is written to",
        "size max_context_len device enable_memory_saver",
        reads_attributes("_alloc_size max_context_len req_to_token"),
    ),
    relies_on(
        SCHEDULER,
        "mem_cache.kv_cache_configurator:KVCacheConfigurator._build_default_req_pool",
        "read",
        "takes ReqToTokenPool from its module",
        "max_num_reqs extra_max_context_len",
        reads_global("ReqToTokenPool"),
    ),
    # --- the prefix cache ---
    relies_on(
        SCHEDULER,
        "mem_cache.registry:default_radix_cache_factory",
        "replace",
        "builds our tree",
        "ctx",
    ),
    relies_on(
        SCHEDULER,
        "mem_cache.registry:create_tree_cache",
        "read",
        "takes the factory from its module",
        "ctx",
        reads_global("default_radix_cache_factory"),
    ),
    *(
        relies_on(SCHEDULER, f"mem_cache.radix_cache:{method}", "call", "finds what a key shares", parameters)
        for method, parameters in (
            ("RadixKey.child_key_at", "offset page_size"),
            ("RadixKey.match_at", "other offset page_size"),
            ("RadixCache._inc_hit_count", "node chunked"),
        )
    ),
    *(
        relies_on(
            SCHEDULER,
            f"mem_cache.radix_cache:RadixCache.{method}",
            "override",
            "counts what could be evicted in pages",
            parameters,
        )
        for method, parameters in (
            ("reset", ""),
            ("evictable_size", ""),
            ("evict", "params"),
            ("inc_lock_ref", "node"),
            ("dec_lock_ref", "node params"),
            ("_insert_helper", "node key value priority chunked"),
            ("_match_prefix_helper", "node key"),
            ("_split_node", "key child split_len"),
            ("all_values_flatten", ""),
        )
    ),
    relies_on(
        SCHEDULER,
        "mem_cache.radix_cache:RadixCache.cache_unfinished_req",
        "override",
        "a request with copies of its own hands its prompt to the tree, and goes on from its row",
        "req chunked",
    ),
    relies_on(
        SCHEDULER,
        "mem_cache.radix_cache:RadixCache.cache_finished_req",
        "override",
        "what was computed with less than the prompt in sight, or behind the end, is cached for nobody",
        "req is_insert kv_len_to_handle",
        reads_attributes("disable disable_finished_insert origin_input_ids output_ids free_segment"),
    ),
    relies_on(
        SCHEDULER,
        "mem_cache.common:release_kv_cache",
        "read",
        "hands over the length that was computed, and frees nothing of it later",
        "req tree_cache is_insert",
        reads_attributes("effective_kv_committed_len kv_allocated_len"),
    ),
    relies_on(
        SCHEDULER,
        "managers.schedule_batch:Req._compute_max_prefix_len",
        "replace",
        "a prefix hit ends before the last prompt token where KV above it is private",
        "input_len",
    ),
    # --- the idle check ---
    relies_on(
        SCHEDULER,
        "managers.scheduler:Scheduler.init_invariant_checker",
        "override",
        "puts our check in",
        "",
    ),
    relies_on(
        SCHEDULER,
        "managers.scheduler_components.invariant_checker:SchedulerInvariantChecker._check_full_pool",
        "override",
        "sums pages besides tokens",
        "ps uncached",
    ),
)
