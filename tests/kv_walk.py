"""The product's bookkeeping of KV without a model: requests of all kinds in one small pool, drawn at random."""

from array import array
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.schedule_policy import AddReqResult
from sglang.srt.mem_cache import allocation
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.sampling.sampling_params import SamplingParams

from fathom.runtime.cache_key import cache_key
from fathom.runtime.config import POLICY_KEY, Limits, choose
from fathom.runtime.kv.audit import check
from fathom.runtime.kv.memory import pages_taken
from fathom.runtime.kv.prefix import UNBACKED
from fathom.runtime.sglang_host import requests
from fathom.runtime.sglang_host.memory import kv_allocator
from fathom.runtime.sglang_host.memory.kv_tree import DepthRadixCache
from fathom.runtime.sglang_host.scheduling import kv_schedule

LAYERS, TSP, LONGEST = 4, 2, 90
ALL = 1 << 20
POLICIES = [
    {},
    {"speculative": True},
    {"decode": "slow_fast"},
    {"depth_cutoff": 2},
    {"depth_cutoff": 1, "anchors": "none"},
    {"kv_retention_rate": 0.5},
    {"kv_retention_rate": 0.3, "speculative": True},
    {"kv_retention_rate": 0.4, "decode": "slow_fast"},
    {"tsp_rate": 0.5, "kv_retention_rate": 0.5},
    {"prefill_keep_rate": 0.5, "min_prompt_tokens": 12},
    {"prefill_keep_rate": 0.5, "min_prompt_tokens": 12, "kv_retention_rate": 0.5},
]
NEVER = "never computed"


class Engine:
    """The product's bookkeeping, and beside it what each virtual slot holds: the tokens that its KV was computed
    of, and where not all of them were in sight, of whose answer it is."""

    policies, rows, pools, factors, begins = POLICIES, 5, (80, 160), (1, 2, 4), (6, 17, 24, 40, 64)

    def __init__(self, draw, size, patch):
        layout = {
            "tsp_layer": TSP,
            "propagation_buffer": LONGEST,
            "shallow_factor": draw.choice(self.factors),
        }
        for name, value in layout.items():
            patch.setattr(requests.LAYOUT, name, value)
        requests._plan.cache_clear()
        spec = SimpleNamespace(speculative_draft_model_path=None)
        patch.setattr(kv_allocator, "get_spec", lambda: spec)
        patch.setattr(allocation, "attention_backends", lambda: ("torch_native",) * 2)
        patch.setattr(Req, "_compute_max_prefix_len", kv_schedule.max_prefix_len)
        self.draw, self.size, self.admits = draw, size, draw.random() < 0.5
        tokens = draw.choice(self.pools) // size * size
        pool = SimpleNamespace(size=tokens * LAYERS, spans=LAYERS, layer_num=LAYERS, span=1)
        self.allocator = kv_allocator.DepthAllocator(
            tokens, size, torch.float32, "cpu", pool, need_sort=False
        )
        patch.setattr(kv_schedule, "_ALLOCATOR", self.allocator)
        self.memory = self.allocator.memory
        self.table = ReqToTokenPool(self.rows, LONGEST + size, "cpu", False)
        self.table.attach_aux_cache(kv_schedule.RowLifetime(self.allocator))
        self.tree = DepthRadixCache(CacheInitParams(False, self.table, self.allocator, size))
        self.running, self.waiting, self.holds, self.depths = [], [], {}, {}
        self.handed_over = set()  # whose prompts may have been evicted since they are in the tree

    def request(self):
        draw = self.draw
        policy = choose(draw.choice(self.policies), limits=Limits(LAYERS, 1, {}, TSP)).policy
        prompt = self.prompt()
        sampling = SamplingParams(max_new_tokens=9, custom_params={POLICY_KEY: policy.to_wire()})
        made = Req(str(draw.random()), "", prompt, sampling, extra_key=cache_key("", policy))
        made.priority = draw.randrange(3)
        requests.separate_cache_key(made)
        depth = self.allocator.plan_of(made).shared_spans
        assert self.depths.setdefault(made.extra_key, depth) == depth
        return made

    def prompt(self):
        draw = self.draw
        prompt = array("q", [draw.randrange(2) for _ in range(draw.randint(1, 24))])
        if draw.random() < 0.5:  # long prompts that begin alike
            prompt = array("q", [1] * draw.choice(self.begins)) + prompt[:2]
        return prompt

    def slots(self, req, end=None):
        end = req.kv.kv_allocated_len if end is None else end
        return self.table.req_to_token[req.kv.req_pool_idx, :end].tolist()

    def tokens(self, req):
        return (*req.origin_input_ids, *req.output_ids)

    def dropped(self, req):
        """Whether a running request has KV of its own of its prompt, less than all of it."""
        return self.memory.settled(req.kv.req_pool_idx) and self.depths[req.extra_key] > 0

    def leaned(self, besides=()):
        """Virtual pages of prompts that drafts read on in, though their requests have copies of what is left."""
        running = [req for req in self.running if req not in besides]
        leaning = [req for req in running if self.dropped(req) and req in self.handed_over]
        pages = [
            self.slots(req)[: req.kv.cache_protected_len : self.size]
            for req in leaning
            if requests.uses_draft(req)
        ]
        return {slot // self.size for slots in pages for slot in slots}

    def cached(self):
        """Virtual pages that the tree has, and those of them that it may let go."""
        nodes = [
            (node, [slot // self.size for slot in node.value.tolist()[:: self.size]]) for node in self.nodes()
        ]
        return {page for _, pages in nodes for page in pages}, {
            p for n, pages in nodes if not n.lock_ref for p in pages
        }

    # --- what an engine does ---

    def batch(self, reqs, **more):
        return SimpleNamespace(
            reqs=reqs,
            tree_cache=self.tree,
            req_to_token_pool=self.table,
            token_to_kv_pool_allocator=self.allocator,
            device="cpu",
            maybe_evict_swa=lambda: None,
            is_dllm=lambda: False,
            model_config=SimpleNamespace(is_encoder_decoder=False),
            **more,
        )

    def admit(self, queue):
        """A chunk of each prompt that admission lets in: there is room for all of them."""
        running = [req for req in self.running if self.complete(req)]
        adder = kv_schedule.DepthPrefillAdder(
            *(self.size, self.tree, self.allocator, SimpleNamespace(reqs=running)),
            *(self.draw.random(), ALL, self.draw.choice([None, 4, 8, 16, 32])),
        )
        if chunked := next((req for req in self.running if not self.complete(req)), None):
            if adder.rem_chunk_tokens is None:
                adder.rem_chunk_tokens = 8
            chunked.init_next_round_input()
            chunked = adder.add_chunked_req(chunked)
        for place, req in enumerate(queue):
            if kv_schedule.refuse_what_never_fits(self.allocator, req) or len(self.running) == self.rows:
                continue
            req.init_next_round_input(self.tree)
            result = adder.add_one_req(req, has_chunked_req=chunked is not None, truncation_align_size=None)
            if req in adder.can_run_list:
                self.running.append(req)
                req.kv.cache_protected_len = len(req.prefix_indices)
            if result != AddReqResult.CONTINUE:
                self.waiting += [each for each in queue[place:] if each not in adder.can_run_list]
                break
        self.compute_admitted(adder)

    def compute_admitted(self, adder):
        """The step of those that admission let in; whether there is one."""
        batch = [req for req in adder.can_run_list if req.extend_range.length]
        if batch:
            self.compute(batch, [(req.extend_range.start, req.extend_range.end) for req in batch])
        assert sum(not self.complete(req) for req in self.running) <= 1  # in chunks, at a time
        return bool(batch)

    def prefill(self, reqs):
        """A chunk of each prompt, or all of it, if there is room."""
        chunks = []
        for req in reqs:
            if not req.kv.holds_kv:
                req.init_next_round_input(self.tree)
                self.tree.inc_lock_ref(req.last_node)
                req.kv.cache_protected_len = len(req.prefix_indices)
            begin, whole = len(req.prefix_indices), len(req.full_untruncated_fill_ids)
            end = whole if self.draw.random() < 0.5 else self.draw.randint(begin + 1, whole)
            req.set_extend_range(begin, end)
            chunks.append((begin, end))
        needed = sum(
            pages_taken(
                *(self.allocator.plan_of(req), *chunk, len(req.origin_input_ids)),
                *(self.size, req.kv.holds_kv),
            )
            for req, chunk in zip(reqs, chunks, strict=True)
        )
        virtual = self.allocator.virtual_size() + len(self.cached()[1] - self.leaned()) * self.size
        if sum(end - begin + self.size for begin, end in chunks) > virtual:
            self.take_back(reqs)
        elif needed > self.memory.pool.free + self.tree.evictable_pages:
            with pytest.raises(RuntimeError, match="out of memory"):
                self.compute(reqs, chunks)
            assert not self.tree.evictable_pages
            self.take_back(reqs)
        else:
            self.compute(reqs, chunks)

    def compute(self, reqs, chunks):
        for req in reqs:
            if not req.kv.holds_kv:
                plan = self.allocator.plan_of(req)
                most = plan.reusable_tokens(len(req.origin_input_ids))
                assert plan.dense or len(req.prefix_indices) <= most
            copied = req.kv.holds_kv and self.dropped(req) and not requests.uses_draft(req)
            known = list(enumerate(req.prefix_indices.tolist()))[len(req.origin_input_ids) if copied else 0 :]
            for at, slot in known:
                assert self.holds[slot] == (req.extra_key, self.tokens(req)[: at + 1])
        begins, ends = map(list, zip(*chunks, strict=True))
        lens = [end - begin for begin, end in chunks]
        after = torch.tensor(ends)
        batch = self.batch(
            reqs, prefix_lens=begins, extend_lens=lens, extend_num_tokens=sum(lens), seq_lens=after
        )
        batch.seq_lens_cpu = after
        kv_schedule.alloc_for_extend(batch)
        self.forward(reqs, chunks)
        for req, (begin, end) in zip(reqs, chunks, strict=True):
            for at, slot in list(enumerate(self.slots(req, end)))[begin:]:
                self.holds[slot] = req.extra_key, self.tokens(req)[: at + 1]
            row, done = req.kv.req_pool_idx, end == len(req.full_untruncated_fill_ids)
            if end >= len(req.origin_input_ids) and self.memory.pending(row):
                self.memory.settle(row)
            if done:
                req.output_ids.append(self.draw.randrange(2))
            if done and self.draw.random() < 0.2:  # it was to say one token
                self.release(req, True)
                continue
            self.tree.cache_unfinished_req(req, chunked=not done)
            if done or self.dropped(req):
                self.handed_over.add(req)
            left = min(end, len(req.origin_input_ids)) if self.dropped(req) else end
            node = self.found(req, left)[1]
            while node.parent is not None:
                assert node.priority >= req.priority
                node = node.parent

    def forward(self, reqs, chunks):
        """What else a batch of chunks does; nothing, where nobody decodes in it."""

    def found(self, req, end):
        """Tokens that the tree has of a request's first ones, and where they end in it."""
        key = RadixKey(array("q", self.tokens(req)[:end]), req.extra_key)
        found = self.tree.match_prefix(MatchPrefixParams(key=key))
        return len(found.device_indices), found.last_device_node

    def take_back(self, reqs):
        """All of these, for whom there is no room."""
        for req in reqs:
            if req.kv.holds_kv:
                self.release(req, False)
            else:
                self.tree.dec_lock_ref(req.last_node)
                self.running.remove(req)
            self.waiting.append(req)

    def decode(self, reqs, then=True):
        """A step; ``then``: whether another follows, so that its token counts. False where there is no room."""
        pool, most, before = self.memory.pool, len(reqs) * self.size, self.tree.evictable_pages
        needed = self.allocator.decode_pages(
            [req.kv.req_pool_idx for req in reqs], [req.kv.kv_allocated_len for req in reqs]
        )

        def fits():
            return needed <= pool.free and most <= self.allocator.virtual_size()

        at_once = fits()
        there = self.allocator.check_decode_capacity(num_tokens=most, tree_cache=self.tree, requests=reqs)
        assert there == fits()
        assert there or not self.tree.evictable_size_
        assert not at_once or self.tree.evictable_pages == before
        if there:
            free = pool.free
            self.grow(reqs, then)
            assert pool.free == free - needed
        return there

    def grow(self, reqs, then=True):
        """Room for a token of each, and what is in it."""
        pool = self.memory.pool
        rows, lengths = zip(*((req.kv.req_pool_idx, req.kv.kv_allocated_len) for req in reqs), strict=True)
        needed = self.allocator.decode_pages(rows, lengths)
        before = pool.free + self.tree.evictable_pages
        lens = torch.tensor([req.kv.kv_allocated_len for req in reqs])
        rows = torch.tensor([req.kv.req_pool_idx for req in reqs])
        more = {"req_pool_indices": rows, "req_pool_indices_cpu": rows}
        kv_schedule.alloc_for_decode(self.batch(reqs, seq_lens=lens, seq_lens_cpu=lens, **more), 1)
        assert pool.free + self.tree.evictable_pages == before - needed
        for req, length in zip(reqs, lens.tolist(), strict=True):
            req.kv.kv_allocated_len = req.kv.kv_committed_len = length + 1
            own = self.dropped(req) or requests.alternates(req)
            what = (req.rid if own else req.extra_key), self.tokens(req)[: length + 1]
            self.holds[self.slots(req)[-1]] = what if then else NEVER
            if then:
                req.output_ids.append(self.draw.randrange(2))

    def release(self, req, is_insert):
        """It ends; ``is_insert``: and what others may find of it is kept."""
        length, prompt = req.kv.kv_committed_len, len(req.origin_input_ids)
        known = prompt + max(len(req.output_ids) - 1, 0)
        if self.dropped(req) or requests.alternates(req):
            known = prompt
        gone = self.dropped(req) and req in self.handed_over
        # Nor is there the prompt of who ended as soon as it came back.
        gone |= requests.alternates(req) and length > prompt and req not in self.handed_over
        self.handed_over.discard(req)
        self.tree.cache_finished_req(req, is_insert, kv_len_to_handle=req.kv.kv_committed_len)
        self.table.free(req)
        req.kv.mark_kv_released()
        if is_insert and not gone:
            kept = min(length, known) // self.size * self.size
            assert self.found(req, length)[0] >= kept
        req.kv.cache_protected_len = req.kv.kv_committed_len = 0
        self.running.remove(req)

    def step(self):
        draw = self.draw
        decoding = [req for req in self.running if req.output_ids and self.complete(req)]
        prompts = [req for req in self.running if not self.complete(req)]
        kind = draw.random()
        if kind < 0.4:
            new = [self.waiting.pop() if self.waiting else self.request() for _ in range(draw.randint(0, 2))]
            if self.admits:
                self.admit(new)
            elif batch := prompts + new[: self.rows - len(self.running)]:
                self.running += new[: self.rows - len(self.running)]
                self.prefill(batch)
        elif kind < 0.7 and decoding:
            reqs = draw.sample(decoding, draw.randint(1, len(decoding)))
            if not self.decode(reqs):
                self.take_back(reqs[:1])
        elif kind < 0.9 and self.running:
            req = draw.choice(self.running)
            if req in decoding and draw.random() < 0.5:
                self.decode([req], then=False)  # a step that was launched too far
            if draw.random() < 0.3:
                self.release(req, False)
                self.waiting.append(req)
            else:
                self.release(req, True)
        else:
            could = self.tree.evictable_size() + self.allocator.available_size()
            cached, evictable = self.cached()
            in_use = self.leaned() & cached - evictable  # counted as if they were not
            if draw.random() < 0.3:
                self.tree.evict(EvictParams(num_tokens=ALL))
                assert could <= self.allocator.available_size() <= could + len(in_use) * self.size
            else:
                self.tree.evict(EvictParams(num_tokens=draw.randint(1, 9)))
        for req in [req for req in self.running if len(self.tokens(req)) >= LONGEST - 2]:
            self.release(req, True)

    def complete(self, req):
        return req.kv.kv_allocated_len >= len(req.full_untruncated_fill_ids)

    # --- what has to be true after each step ---

    def nodes(self):
        nodes = list(self.tree.root_node.children.values())
        while nodes:
            yield (node := nodes.pop())
            nodes += node.children.values()

    def backed(self, pages):
        return np.count_nonzero(self.memory.shared.backing[:, list(pages)] != UNBACKED, axis=1)

    def look(self):
        size, memory = self.size, self.memory
        cached, evictable, locks = [], np.zeros(LAYERS, np.int64), {}
        for req in self.running:
            node = req.last_node
            while node.parent is not None:
                locks[node] = locks.get(node, 0) + 1
                node = node.parent
        for node in self.nodes():
            assert node.lock_ref == locks.get(node, 0)
            pages = [slot // size for slot in node.value.tolist()[::size]]
            assert node.value.tolist() == [page * size + at for page in pages for at in range(size)]
            depth = self.depths[node.key.extra_key]
            backed = self.backed(pages)
            assert backed.tolist() == [len(pages)] * depth + [0] * (LAYERS - depth)
            evictable += 0 if node.lock_ref else backed
            cached += pages
            before, parent = [], node
            while parent.parent is not None:
                before, parent = [*parent.key.token_ids[: len(parent.key)], *before], parent.parent
            for at, slot in enumerate(node.value.tolist(), len(before) - len(node.key)):
                assert self.holds[slot] == (node.key.extra_key, tuple(before[: at + 1]))
        assert self.tree.evictable_per_span.tolist() == evictable.tolist()
        own, alone = [], self.leaned() - set(cached)
        for req in self.running:
            pages = [slot // size for slot in self.slots(req)[::size]]
            first = req.kv.cache_protected_len // size
            own += pages[first:]
            row, length = req.kv.req_pool_idx, req.kv.kv_allocated_len
            tables = memory.tables.page_count(row) + memory.retained.page_count(row)
            dropped, drafted = self.dropped(req), requests.uses_draft(req)
            shared = pages[: len(req.origin_input_ids) // size if dropped else None]
            assert not (dropped and req.output_ids and self.backed(pages[first:]).any())
            held = tables + (0 if dropped else int(self.backed(shared).sum()))
            if not dropped:
                assert set(pages[:first]) <= set(cached)
                assert not req.output_ids or self.allocator.held_pages([req]) == [held]
            else:
                assert self.allocator.held_pages([req]) == [held]
            for at, slot in enumerate(self.slots(req, length)):
                if at >= len(req.origin_input_ids) or not dropped or drafted:
                    assert self.holds[slot][1] == self.tokens(req)[: at + 1]
        assert len(own) + len(cached) + len(alone) == len({*own, *cached, *alone})
        assert memory.leaners.alone == len(alone) and memory.leaners.cached == len(self.leaned()) - len(alone)
        found = self.allocator.available_size()
        dense = min(self.allocator.virtual_size() // size, memory.pool.free // LAYERS)
        assert found == dense * size  # whole pages
        taken = len(own) + len(cached) + len(alone)
        assert self.allocator.virtual_size() == (self.allocator.virtual_pages - taken) * size
        pages = np.array(cached, np.int64)
        found = check(memory.pool, memory.shared, memory.tables, pages, memory.retained)
        assert self.allocator.audit(self.tree.cached_slots()) == found
