"""SGLang's paged allocator, handing out virtual pages that depth pages stand behind.

SGLang's scheduler, request table and prefix cache know virtual slots only. There are more of them than dense tokens
fit, because a shallow token takes less memory; what can really be had is counted in physical pages.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.runtime_context import get_spec

from fathom.runtime.kv.audit import Audit, audit
from fathom.runtime.kv.memory import KvMemory
from fathom.runtime.plan import PrefillPlan
from fathom.runtime.sglang_host.memory.kv_pool import LAYOUT, DepthKvPool
from fathom.runtime.sglang_host.memory.torch_allocator import TorchPagedAllocator
from fathom.runtime.sglang_host.requests import plan_of
from fathom.runtime.staging import send


class DepthAllocator(TorchPagedAllocator):
    """Virtual pages for SGLang; the physical ones behind them are in ``memory``.

    Attributes:
        size: tokens that fit when all are kept at all depths: what SGLang calls its capacity.
        memory: pool, shared map and private tables.
        virtual_pages: size of the virtual space.
    """

    def __init__(
        self,
        size: int,
        page_size: int,
        dtype: torch.dtype,
        device: str,
        kvcache: DepthKvPool,
        need_sort: bool,
    ) -> None:
        pages = kvcache.size // page_size
        drafts = get_spec().speculative_draft_model_path is not None
        on_a_gpu = torch.device(device).type != "cpu"
        self.virtual_pages = LAYOUT.virtual_slots(kvcache.spans, drafts and on_a_gpu) * size // page_size
        self.memory = KvMemory(pages, page_size, kvcache.spans, self.virtual_pages)
        self.layers, self.span = kvcache.layer_num, kvcache.span
        self.seeks_slots = False
        super().__init__(size, page_size, dtype, device, kvcache, need_sort)

    def clear(self) -> None:
        self.memory.clear()
        self.num_pages = self.virtual_pages
        super().clear()

    @property
    def virtual_tokens(self) -> int:
        """Virtual slots, free or not: the most tokens that can be held, however shallow."""
        return self.virtual_pages * self.page_size

    def plan_of(self, request: Req) -> PrefillPlan:
        """The request's prefill plan on this model."""
        return plan_of(request, self.layers, self.span)

    def held_pages(self, requests: Sequence[Req]) -> list[int]:
        """Physical pages of each running request, its cached prefix included."""
        rows = [request.kv.req_pool_idx for request in requests]
        return self.memory.all_held(rows, [request.kv.kv_allocated_len for request in requests])

    def uncover(self, slots: torch.Tensor) -> None:
        """Free what stands behind the virtual pages of these slots; the pages themselves keep their owner."""
        self.memory.shared.release(self.virtual_pages_of(slots))

    # --- what can be had ---

    def virtual_size(self) -> int:
        """Free virtual slots."""
        return super().available_size()

    def dense_size(self, pages: int) -> int:
        """Tokens that ``pages`` physical pages hold when all are kept at all depths."""
        return pages // self.memory.spans * self.page_size

    def available_size(self) -> int:
        """Tokens that can be had now at all depths; while physical pages are seen to, free virtual slots."""
        if self.seeks_slots:
            return self.virtual_size()
        return min(self.virtual_size(), self.dense_size(self.memory.pool.free))

    @contextmanager
    def physical_pages_seen_to(self) -> Iterator[None]:
        """Within it, SGLang's own allocation only asks for virtual slots."""
        self.seeks_slots = True
        try:
            yield
        finally:
            self.seeks_slots = False

    def make_room(self, tree_cache: Any, pages: int) -> bool:
        """Evict from the prefix cache until ``pages`` physical pages are free; whether they are."""
        pool = self.memory.pool
        while pool.free < pages:
            missing = -(-(pages - pool.free) // self.memory.spans) * self.page_size
            if tree_cache is None or not tree_cache.evict(EvictParams(num_tokens=missing)).num_tokens_evicted:
                return False
        return True

    def check_decode_capacity(
        self,
        *,
        num_tokens: int,
        tree_cache: Any,
        requests: Sequence[Any] | None = None,
        spec_algorithm: Any = None,
    ) -> bool:
        """Whether the next decode step fits, cached prefixes evicted; SGLang retracts requests until it does."""
        requests = requests or ()
        rows = [request.kv.req_pool_idx for request in requests]
        lengths = [request.kv.kv_allocated_len for request in requests]
        pages = self.decode_pages(rows, lengths) + sum(map(self._beam_pages, requests))
        if not self.make_room(tree_cache, pages):
            return False
        with self.physical_pages_seen_to():
            return super().check_decode_capacity(
                num_tokens=num_tokens, tree_cache=tree_cache, requests=requests, spec_algorithm=spec_algorithm
            )

    def _beam_pages(self, request: Req) -> int:
        """The most that one more token of the other beams of a request takes."""
        group = request.beam_group
        return 0 if group is None else (group.beam_width - 1) * self.memory.spans

    def decode_pages(self, rows: Sequence[int], lengths: Sequence[int], tokens: int = 1) -> int:
        """Physical pages that ``tokens`` more tokens of each row take."""
        tables, size = self.memory.tables, self.page_size
        depths = tables.firsts(rows)
        if size == 1:
            shared = tokens * sum(depths)
        else:
            held = np.array(lengths, np.int64)
            shared = int((-(-(held + tokens) // size) + -held // size) @ np.array(depths, np.int64))
        private = [row for row, depth in zip(rows, depths, strict=True) if depth < tables.spans]
        return shared + sum(tables.need_all(row, tokens) for row in private)

    # --- frees ---

    def _release_page_ids(self, *page_ids: torch.Tensor) -> None:
        known = [ids.cpu().numpy() for ids in page_ids]
        for pages in known:
            self.memory.shared.release(pages)
        if leaners := self.memory.leaners:
            page_ids = tuple(send(leaners.keep(pages), self.device) for pages in known)
        super()._release_page_ids(*page_ids)

    def free_known(self, pages: np.ndarray) -> None:
        """Free these virtual pages [pages] int64, none of them twice. Nothing waits for the device."""
        if len(pages):
            self.memory.shared.release(pages)
            super()._release_page_ids(send(pages, self.device))

    # --- the idle check ---

    def virtual_pages_of(self, slots: torch.Tensor) -> np.ndarray:
        """[pages] ids of the virtual pages of these slots, which are whole pages one after the other."""
        return slots[:: self.page_size].cpu().numpy() // self.page_size

    def audit(self, cached_slots: torch.Tensor | None) -> Audit:
        """Where every physical page is, given the virtual slots that the prefix cache holds, if there is one."""
        memory = self.memory
        cached = np.zeros(0, np.int64) if cached_slots is None else self.virtual_pages_of(cached_slots)
        return audit(memory.pool, memory.shared, memory.tables, cached, memory.retained)
