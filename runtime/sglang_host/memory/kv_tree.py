"""SGLang's radix cache, counting what it could give back in memory instead of tokens.

Its nodes hold virtual slots; the KV behind them reaches as deep as the first narrowing of the policy they were made
under. The policy's fingerprint is part of every node's key (``extra_key``), so all tokens of a node, and of
the whole path from the root to it, are equally deep.
"""

import time
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache import registry
from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey
from sglang.srt.runtime_context import get_memory

from fathom.runtime.kv.pages import pages_of
from fathom.runtime.sglang_host.memory.kv_allocator import DepthAllocator
from fathom.runtime.sglang_host.requests import alternates, uses_draft

EVICTIONS = 128
"""In which everything that is cached and not in use would be gone."""

_default_factory = registry.default_radix_cache_factory


class DepthRadixCache(RadixCache):
    """A radix cache whose ``evictable_size`` is true for tokens of any depth.

    Attributes:
        evictable_per_span: [spans] int64 physical pages behind what nobody uses at the moment.
    """

    token_to_kv_pool_allocator: DepthAllocator

    def reset(self) -> None:
        super().reset()
        self.evictable_per_span = np.zeros(self.token_to_kv_pool_allocator.memory.spans, np.int64)
        self._left: weakref.WeakSet[Req] = weakref.WeakSet()

    @property
    def evictable_pages(self) -> int:
        """Physical pages behind what nobody uses at the moment."""
        return int(self.evictable_per_span.sum())

    def evictable_size(self) -> int:
        """Tokens kept at all depths that would fit in what could be evicted."""
        allocator = self.token_to_kv_pool_allocator
        # Together with what is free, so that no page is lost to rounding twice. Tokens may be cached with few pages
        # behind them, or none: then it is virtual slots that can be had back.
        pages = allocator.dense_size(allocator.memory.pool.free + self.evictable_pages)
        return min(allocator.virtual_size() + self.slots_to_evict(), pages) - allocator.available_size()

    def slots_to_evict(self, unlocked: int = 0, left: int = 0) -> int:
        """Virtual slots that could be had back, at least.

        Args:
            unlocked: tokens that would not be in use any more; left: cached pages that nobody would lean on.
        """
        leaned = self.token_to_kv_pool_allocator.memory.leaners.cached - left
        return max(self.evictable_size_ + unlocked - leaned * self.page_size, 0)

    # --- requests that hold copies of their own of what is left of their prompt ---

    def cache_unfinished_req(self, req: Req, chunked: bool = False) -> None:
        if not self._keeps_to_itself(req):
            super().cache_unfinished_req(req, chunked)
            return
        self._leave(req)
        row = self.req_to_token_pool.req_to_token[req.kv.req_pool_idx]
        req.prefix_indices = row[: len(req.get_fill_ids())].to(dtype=torch.int64, copy=True)

    def cache_finished_req(self, req: Req, is_insert: bool = True, *, kv_len_to_handle: int) -> None:
        if self._keeps_to_itself(req):
            # What it generated was computed with less than the whole prompt in sight: for nobody else.
            if is_insert:
                self._leave(req)
            is_insert = False
        elif alternates(req) and kv_len_to_handle > len(req.origin_input_ids):
            is_insert = False  # likewise; its prompt went to the tree before
        if is_insert:
            kv_len_to_handle = self._drop_last_token(req, kv_len_to_handle)
        self._left.discard(req)
        super().cache_finished_req(req, is_insert, kv_len_to_handle=kv_len_to_handle)

    def _drop_last_token(self, req: Req, length: int) -> int:
        """The length without the last token of the answer, which only a step beyond the end reads.

        Where steps overlap, such a step may run after the request has ended, when what it attends to is gone: that
        KV is for nobody.
        """
        known = len(req.origin_input_ids) + max(len(req.output_ids) - 1, 0)
        if length <= known:
            return length
        begin = pages_of(known, self.page_size) * self.page_size
        if begin < length:
            slots = self.req_to_token_pool.req_to_token[req.kv.req_pool_idx, begin:length]
            self.token_to_kv_pool_allocator.free_segment(slots, start_pos=begin)
        return known

    def _keeps_to_itself(self, req: Req) -> bool:
        memory = self.token_to_kv_pool_allocator.memory
        row = req.kv.req_pool_idx
        return memory.settled(row) and memory.owners[row].plan.shared_spans > 0

    def _leave(self, req: Req) -> None:
        """Hand the whole prompt's KV to the tree, where it may be evicted from now on: the request has its own."""
        if req in self._left:
            return
        self._left.add(req)
        allocator, kv = self.token_to_kv_pool_allocator, req.kv
        slots = self.req_to_token_pool.req_to_token[kv.req_pool_idx, : len(req.origin_input_ids)]
        key = RadixKey(req.origin_input_ids, req.extra_key, cache_salt=req.cache_salt).page_aligned(
            self.page_size
        )
        values = slots[: len(key)].to(dtype=torch.int64, copy=True)
        known = self.insert(InsertParams(key=key, value=values, priority=req.priority or 0)).prefix_len
        begin = kv.cache_protected_len
        allocator.free_segment(slots[begin:known], start_pos=begin)
        # The last, partly filled page goes on with generated tokens, and nothing behind it.
        allocator.uncover(slots[len(key) :])
        kv.cache_protected_len = len(key)
        if uses_draft(req):
            # The draft goes on reading its own KV of the prompt, in the same virtual slots.
            found = self.match_prefix(MatchPrefixParams(key=key))
            slots[:known] = found.device_indices[:known]  # the own ones of what others had left are free
            allocator.memory.leaners.add(kv.req_pool_idx, allocator.virtual_pages_of(slots[: len(key)]))
        self.dec_lock_ref(req.last_node)
        req.last_node = self.root_node

    def cached_slots(self) -> torch.Tensor:
        """All virtual slots in the tree."""
        return self.all_values_flatten() if self.root_node.children else torch.empty(0, dtype=torch.int64)

    def inc_lock_ref(self, node: Any) -> Any:
        before = self.evictable_size_
        result = super().inc_lock_ref(node)
        self._count(node, self.evictable_size_ - before)
        return result

    def dec_lock_ref(self, node: Any, params: Any = None) -> Any:
        before = self.evictable_size_
        result = super().dec_lock_ref(node, params)
        self._count(node, self.evictable_size_ - before)
        return result

    def _insert_helper(
        self, node: Any, key: Any, value: Any, priority: int = 0, chunked: bool = False
    ) -> Any:
        path = self._path(node, key)
        for passed in path:
            passed.priority = max(passed.priority, priority or 0)
            self._inc_hit_count(passed, chunked)
        before, offset = self.evictable_size_, _tokens(path)
        if path:
            node.priority = max(node.priority, priority or 0)
            node, key, value = path[-1], key[offset:], value[offset:]
        length, last = super()._insert_helper(node, key, value, priority, chunked)
        self._count(last, self.evictable_size_ - before)
        return offset + length, last

    def _match_prefix_helper(self, node: Any, key: Any) -> Any:
        if not (path := self._path(node, key)):
            return super()._match_prefix_helper(node, key)
        values, node, key = [passed.value for passed in path], path[-1], key[_tokens(path) :]
        if len(key) == 0:
            return values, node
        more, last = super()._match_prefix_helper(node, key)
        return values + more, last

    def _path(self, node: Any, key: Any) -> list[Any]:
        """The nodes from the given one on of which all tokens are the key's, marked as used now.

        A long prompt has a node for each of its chunks, and at each of them SGLang copies the rest of the key.
        """
        path: list[Any] = []
        now, offset, size = time.monotonic(), 0, self.page_size
        while offset < len(key) and (child := node.children.get(key.child_key_at(offset, size))) is not None:
            if child.key.match_at(key, offset, size) < len(child.key):
                break
            child.last_access_time = now
            path.append(child)
            offset, node = offset + len(child.key), child
        return path

    def evict(self, params: Any) -> Any:
        """SGLang's, which ranks all leaves anew in each call: a full cache of many short prompts is not asked for a
        few tokens in every decode step, but for a share of it now and then.

        Where virtual slots are asked for, what running requests lean on gives none.
        """
        allocator = self.token_to_kv_pool_allocator
        pool, wanted = allocator.memory.pool, params.num_tokens
        before, slots = pool.in_use.copy(), allocator.virtual_size()
        params = replace(params, num_tokens=max(wanted, self.evictable_size_ // EVICTIONS))
        result = more = super().evict(params)
        while allocator.seeks_slots and more.num_tokens_evicted and allocator.virtual_size() - slots < wanted:
            more = super().evict(params)
            result.num_tokens_evicted += more.num_tokens_evicted
        self.evictable_per_span -= before - pool.in_use
        return result

    def _count(self, node: Any, tokens: int) -> None:
        if tokens:
            self.evictable_per_span[: self._depth(node)] += tokens // self.page_size

    def _split_node(self, key: Any, child: Any, split_len: int) -> Any:
        front = super()._split_node(key, child, split_len)
        front.depth = getattr(child, "depth", None)
        return front

    def _depth(self, node: Any) -> int:
        """Spans behind the tokens of a node: as many as behind its parent's.

        Only for the first node of a policy's part of the tree the device is asked for a slot.
        """
        if getattr(node, "depth", None) is None:
            node.depth = getattr(node.parent, "depth", None)
        if node.depth is None:
            shared = self.token_to_kv_pool_allocator.memory.shared
            node.depth = shared.depth(int(node.value[0]) // self.page_size)
        return node.depth


def _tokens(path: Sequence[Any]) -> int:
    return sum(len(node.key) for node in path)


def tree_of(cache: Any) -> DepthRadixCache | None:
    """The tree behind a cache of SGLang's scheduler, which streaming sessions wrap; None where there is none."""
    inner = getattr(cache, "inner", cache)
    return inner if isinstance(inner, DepthRadixCache) else None


def factory(context: Any) -> Any:
    """Our tree where SGLang would build its own over depth pages.

    Raises:
        ValueError: for a feature that copies KV by slot, which the layout of depth pages does not allow.
    """
    if (
        not isinstance(context.params.token_to_kv_pool_allocator, DepthAllocator)
        or context.disable_radix_cache
    ):
        return _default_factory(context)
    memory = get_memory()
    for name in (
        "enable_hierarchical_cache",
        "enable_lmcache",
        "enable_flexkv",
        "enable_unified_cache_external_linker",
    ):
        if getattr(memory, name):
            raise ValueError(f"--{name.replace('_', '-')} copies KV by slot, which depth pages do not have")
    return DepthRadixCache(context.params)
