"""Admission into a small pool: how much of a prompt a step computes, who is let in, and that all of it fits.

What it may say is reckoned here from docs/depth-pages.md: in pages, by a ledger of the step's own.
"""

import random
from array import array
from collections import Counter
from types import SimpleNamespace

import pytest
from kv_walk import ALL, LAYERS, LONGEST, POLICIES, Engine
from sglang.srt.managers.schedule_batch import FINISH_LENGTH
from sglang.srt.managers.schedule_policy import AddReqResult
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from fathom.runtime.kv.memory import pages_taken
from fathom.runtime.kv.pages import pages_of
from fathom.runtime.sglang_host import kv_schedule, requests, short_prompts

KINDS = [*POLICIES, {"tsp_rate": 0.5, "prefill_keep_rate": 0.5, "min_prompt_tokens": 12}]
KINDS += [{}, {"tsp_rate": 0.5, "kv_retention_rate": 0.5}, {"prefill_keep_rate": 0.2, "min_prompt_tokens": 4}]


class Ledger:
    """What is left in a step, in tokens at all depths and in virtual slots.

    Of both come off the tokens that running requests are expected to get, and what the step's prompts take.
    """

    def __init__(self, engine, running, decoding, ratio):
        self.engine, self.decoding = engine, decoding
        counted = len(running) if engine.mixed else 0
        self.decode_pages = 0
        if engine.mixed and decoding:
            held = [(req.kv.req_pool_idx, req.kv.kv_allocated_len) for req in decoding]
            self.decode_pages = engine.allocator.decode_pages(*zip(*held, strict=True))
        expected = sum(req.sampling_params.max_new_tokens - len(req.output_ids) for req in running) * ratio
        self.memory = counted + expected + max(self.dense(self.decode_pages) - len(decoding), 0)
        full = sum(req.kv.kv_allocated_len % engine.size == 0 for req in decoding) if engine.mixed else 0
        self.slots = expected + max(counted, counted - len(decoding) + full * engine.size)
        self.new, self.chunk, self.states = [], None, 0
        self.parked, self.in_chunks = False, False

    def dense(self, pages):
        """Pages in tokens at all depths, of which a part counts as one."""
        return -(-pages * self.engine.size // LAYERS)

    def pages(self):
        """Those that can be had."""
        return self.engine.memory.pool.free + self.engine.tree.evictable_pages

    def left(self):
        """Tokens at all depths, and virtual slots."""
        slots = self.engine.allocator.virtual_size() + self.engine.tree.evictable_size_
        return self.pages() // LAYERS * self.engine.size - self.memory, slots - self.slots

    def taken(self, req, begin, end):
        plan = self.engine.allocator.plan_of(req)
        return pages_taken(plan, begin, end, len(req.origin_input_ids), self.engine.size, req.kv.holds_kv)

    def next_chunk(self, req, tokens):
        """Of the prompt that is in chunks: as many of ``tokens`` as what is left holds at its depth."""
        plan = self.engine.allocator.plan_of(req)
        begin, whole = len(req.prefix_indices), len(req.full_untruncated_fill_ids)
        memory, slots = self.left()
        most = min(tokens, whole - begin, int(memory * LAYERS / max(plan.shared_spans, 1)), int(slots))
        fits = most > 0 and self.taken(req, begin, begin + most) + self.decode_pages <= self.pages()
        if not fits and self.decoding:
            self.parked, most = True, 0
        elif most <= 0:
            most = min(tokens, whole - begin)
        self.in_chunks = begin + most < whole
        if plan.propagation is not None:
            self.states += len(req.origin_input_ids)
        if not self.parked:
            self.charge(req, begin, begin + most)
        return most

    def charge(self, req, begin, end):
        """A page to spare each; the whole answer once the prompt is complete."""
        size, new = self.engine.size, pages_of(end - begin, self.engine.size) * self.engine.size
        more = size + (req.sampling_params.max_new_tokens if end == len(req.full_untruncated_fill_ids) else 0)
        saved = (pages_of(end, size) - pages_of(begin, size)) * size - self.dense(self.taken(req, begin, end))
        self.memory += new + more - saved
        self.slots += new + more
        self.new.append(req)
        if self.chunk is not None:
            self.chunk -= new

    def next_prompt(self, req):
        """How many tokens of a waiting request's are computed, with what it found in the cache held by it."""
        size, begin, end = self.engine.size, len(req.prefix_indices), len(req.full_untruncated_fill_ids)
        plan, prompt = self.engine.allocator.plan_of(req), len(req.origin_input_ids)
        at_once = self.chunk is None or pages_of(end - begin, size) * size <= self.chunk
        waits = plan.propagation is not None and (requests.is_judged(req) or not at_once)
        states = prompt if waits else 0
        rows = sum(not each.kv.holds_kv for each in [*self.new, req])
        if self.parked or (self.in_chunks and not at_once) or rows > self.engine.table.available_size():
            return 0
        if states and self.states and self.states + states > requests.LAYOUT.propagation_buffer:
            return 0
        # At all depths it would take as many tokens as it is long; what it saves of whole pages is left.
        length = end - begin + max(req.sampling_params.max_new_tokens - len(req.output_ids), 0) + size
        dense = (pages_of(end, size) - pages_of(begin, size)) * size
        memory, slots = self.left()
        if length >= memory + dense - self.dense(self.taken(req, begin, end)) or length >= slots:
            return 0
        if not at_once and (end := (begin + self.chunk // size * size) // size * size) <= begin:
            return 0
        self.states += states
        self.in_chunks |= not at_once
        self.charge(req, begin, end)
        return end - begin


class Admitting(Engine):
    """Every prompt comes by admission, beside running requests of which some are about to leave."""

    rows, pools = 7, (40, 80, 120)

    def __init__(self, draw, size, patch):
        self.policies = draw.sample(KINDS, 3)
        super().__init__(draw, size, patch)
        patch.setattr(requests.LAYOUT, "propagation_buffer", draw.choice([40, LONGEST]))
        requests._plan.cache_clear()
        self.admits, self.mixed, self.patch = True, False, patch
        self.decoding, self.ended, self.seen = [], [], Counter()

    def release(self, req, is_insert):
        super().release(req, is_insert)
        if is_insert:
            req.finished_reason = FINISH_LENGTH(len(req.output_ids))
            self.ended = [req]

    def decode_beside(self):
        if self.mixed and self.decoding:
            self.grow(self.decoding)

    def step(self):
        """Mostly, the pool is full."""
        draw, kind = self.draw, self.draw.random()
        if kind < 0.5:
            count = draw.randint(1, 4)
            queue, self.waiting = self.waiting[:count], self.waiting[count:]
            queue += [self.request() for _ in range(draw.randint(0, count - len(queue)))]
            draw.shuffle(queue)
            self.admit(queue)
        elif kind < 0.8 and (decoding := [req for req in self.running if self.complete(req)]):
            if not self.decode(decoding):
                prompts = [req for req in self.running if not self.complete(req)]
                self.take_back(prompts or decoding[-1:])
        elif kind < 0.9 and self.running:
            req = draw.choice(self.running)
            if draw.random() < 0.5:
                self.release(req, True)
            else:
                self.take_back([req])
        elif kind < 0.93:
            self.tree.evict(EvictParams(num_tokens=draw.choice([9, 20, ALL])))
        for req in [req for req in self.running if self.over(req)]:
            self.release(req, True)

    def over(self, req):
        """Whether it has said all that it was to say."""
        return len(req.output_ids) >= req.sampling_params.max_new_tokens and self.complete(req)

    def request(self):
        req = super().request()
        req.sampling_params.max_new_tokens = self.draw.choice([1, 3, 9, 20])
        return req

    def adder(self, running, chunk, ratio, queue):
        """SGLang's of a step, as the scheduler makes it."""
        batch = SimpleNamespace(reqs=running, batch_is_full=False)
        scheduler = SimpleNamespace(
            is_mixed_chunk=self.mixed,
            waiting_queue=queue,
            tree_cache=self.tree,
            enable_priority_scheduling=False,
            enable_priority_preemption=False,
            lora_drainer=None,
            get_num_allocatable_reqs=lambda running, running_batch: self.table.available_size(),
        )
        beside = short_prompts.Beside(scheduler)
        self.patch.setattr(kv_schedule.DepthPrefillAdder, "beside", beside)
        return kv_schedule.DepthPrefillAdder(
            *(self.size, self.tree, self.allocator, batch, ratio, ALL, chunk),
            *(len(running) if self.mixed else 0,),
        )

    def admit(self, queue, **given):
        draw = self.draw
        queue = [req for req in queue if not kv_schedule.refuse_what_never_fits(self.allocator, req)]
        self.decoding = [req for req in self.running if self.complete(req)]
        running = [*self.decoding, *self.ended]
        self.ended = []
        self.mixed = given.get("mixed", draw.random() < 0.5)
        ratio = given.get("ratio", draw.choice([0, 0.25, 1]))
        self.patch.setattr(short_prompts.OPTIONS, "share", draw.choice([0, 0.5]))
        chunked = next((req for req in self.running if not self.complete(req)), None)
        chunks = [4, 8, 16, 32] if chunked or self.mixed else [None, 4, 8, 16, 32]
        chunk = given.get("chunk", draw.choice(chunks))
        ledger = Ledger(self, running, self.decoding, ratio)
        adder = self.adder(running, chunk, ratio, queue)
        ledger.chunk = adder.rem_chunk_tokens
        if chunked:
            chunked.init_next_round_input()
            left, _ = adder.beside.room(adder, chunked)
            expected = ledger.next_chunk(chunked, ledger.chunk - left)
            goes_on = adder.add_chunked_req(chunked)
            assert chunked.extend_range.length == expected
            assert (goes_on is not None) == ledger.in_chunks
            self.seen["parked" if ledger.parked else "chunk"] += 1
            chunked = goes_on
        queue = list(adder.beside.scheduler.waiting_queue)
        for place, req in enumerate(queue):
            req.init_next_round_input(self.tree)
            self.tree.inc_lock_ref(req.last_node)
            expected = ledger.next_prompt(req)
            self.tree.dec_lock_ref(req.last_node)
            result = adder.add_one_req(req, has_chunked_req=chunked is not None, truncation_align_size=None)
            assert (req in adder.can_run_list) == (expected > 0)
            self.seen["let in" if expected else "held back"] += 1
            if expected:
                assert req.extend_range.length == expected
                self.running.append(req)
                req.kv.cache_protected_len = len(req.prefix_indices)
                full = min(ledger.left()) <= 0
                assert (result == AddReqResult.NO_TOKEN) == full
            if result != AddReqResult.CONTINUE:
                self.waiting += [each for each in queue[place:] if each not in adder.can_run_list]
                break
        mixed = self.mixed and self.decoding
        if self.compute_admitted(adder):
            self.seen["mixed" if mixed else "alone"] += 1


MET = ("let in", "held back", "chunk", "parked", "alone", "mixed")


@pytest.mark.parametrize("size", [1, 4])
def test_who_fits_is_let_in_and_nobody_else(size):
    seen = Counter()
    for seed in range(16):
        with pytest.MonkeyPatch.context() as patch:
            engine = Admitting(random.Random(f"{seed} {size}"), size, patch)
            for _ in range(200):
                engine.step()
            engine.look()
            seen += engine.seen
            requests._plan.cache_clear()
    assert set(seen) == set(MET), seen


def prompt_of(engine, length, answer):
    """A request of the engine's one kind; no two begin alike."""
    req = engine.request()
    req.origin_input_ids = array("q", [engine.draw.randrange(1 << 20) for _ in range(length)])
    req.sampling_params.max_new_tokens = answer
    return req


def engine_of(policy, size, tokens, factor, patch):
    patch.setattr(Admitting, "pools", (tokens,))
    patch.setattr(Admitting, "factors", (factor,))
    engine = Admitting(random.Random(1), size, patch)
    engine.policies = [policy]
    return engine


@pytest.mark.parametrize("size", [1, 4])
def test_what_is_cached_with_nothing_behind_it_is_no_memory(size, monkeypatch):
    """Virtual slots that could be had back are none that physical pages stand behind."""
    engine = engine_of({"depth_cutoff": 1, "anchors": "none"}, size, 80, 2, monkeypatch)
    for length in (60, 60, 28):  # all virtual slots, and half of the memory
        shallow = prompt_of(engine, length, 1)
        engine.admit([shallow], mixed=False, chunk=None)
        engine.release(shallow, True)
    assert engine.allocator.virtual_size() < 16 and engine.memory.pool.free > 40 * LAYERS // size
    engine.policies = [{}]
    engine.admit([prompt_of(engine, 44, 1) for _ in range(3)], mixed=False, chunk=None, ratio=0)
    assert len(engine.running) == 1


@pytest.mark.parametrize("length", range(24, 42))
@pytest.mark.parametrize("chunk", [24, 32, 64])
def test_a_mixed_batch_has_virtual_pages_for_all(length, chunk, monkeypatch):
    """Also where all who decode begin one, and memory is no question."""
    engine = engine_of({"depth_cutoff": 1, "anchors": "none"}, 4, 80, 1, monkeypatch)
    running = [prompt_of(engine, 8, 9) for _ in range(4)]
    for req in running:
        engine.admit([req], mixed=False, chunk=None, ratio=0)
    assert engine.running == running and engine.allocator.virtual_size() == 48
    long = prompt_of(engine, length, 1)
    engine.admit([long], mixed=True, chunk=chunk, ratio=0)
    for _ in range(5):
        if long in engine.running and not engine.complete(long):
            engine.admit([], mixed=True, chunk=chunk, ratio=0)
    assert (long in engine.waiting) == (length + 1 + 4 >= 48 - 4 * 4)
