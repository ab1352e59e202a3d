"""Admission into a small pool: how much of a prompt a step computes, who is let in, and that all of it fits."""

import random
from array import array
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from admission_ledger import Ledger
from kv_walk import ALL, LAYERS, LONGEST, POLICIES, Engine
from sglang.srt.managers import schedule_policy
from sglang.srt.managers.schedule_batch import FINISH_LENGTH
from sglang.srt.managers.schedule_policy import AddReqResult
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from fathom.runtime.kv.pages import pages_of
from fathom.runtime.sglang_host import requests
from fathom.runtime.sglang_host.memory.hidden_buffer import HiddenBuffer
from fathom.runtime.sglang_host.scheduling import between_chunks, kv_schedule, short_prompts

KINDS = [*POLICIES, {"tsp_rate": 0.5, "prefill_keep_rate": 0.5, "min_prompt_tokens": 12}]
KINDS += [{}, {"tsp_rate": 0.5, "kv_retention_rate": 0.5}, {"prefill_keep_rate": 0.2, "min_prompt_tokens": 4}]


class Batch(SimpleNamespace):
    """Running requests, of whom some are taken out for who is more urgent."""

    def release_req(self, index, _):
        self.engine.release(self.reqs[index], False)

    def filter_batch(self, keep_indices):
        self.reqs = [self.reqs[index] for index in keep_indices]


class Admitting(Engine):
    """Every prompt comes by admission, beside running requests of which some are about to leave."""

    rows, pools, kinds, buffers, answers = 7, (40, 80, 120), KINDS, (40, LONGEST), (1, 3, 9, 20)
    chunks = (4, 8, 16, 32)
    urgent = False  # whether who is more urgent takes others out

    def __init__(self, draw, size, patch):
        self.policies = draw.sample(self.kinds, 3)
        super().__init__(draw, size, patch)
        patch.setattr(requests.LAYOUT, "propagation_buffer", draw.choice(self.buffers))
        requests._plan.cache_clear()
        self.hidden = HiddenBuffer(requests.LAYOUT.propagation_buffer, 1, torch.float32, "cpu")
        self.memory.on_close.append(self.hidden.drop)
        self.admits, self.mixed, self.patch = True, False, patch
        self.decoding, self.ended, self.seen = [], [], Counter()
        low_first = SimpleNamespace(schedule_low_priority_values_first=False)
        for module in (short_prompts, schedule_policy):
            patch.setattr(module, "get_schedule", lambda: low_first)
        patch.setattr(between_chunks, "take_back", lambda *_: self.take_back(self.in_chunks()))

    def in_chunks(self):
        return [req for req in self.running if not self.complete(req)]

    def release(self, req, is_insert):
        super().release(req, is_insert)
        if is_insert:
            req.finished_reason = FINISH_LENGTH(len(req.output_ids))
            self.ended = [req]

    def forward(self, reqs, chunks):
        """States of chunks wait until their prompts end; those of what a draft chose, until the step ends."""
        complete = []
        for req, (begin, end) in zip(reqs, chunks, strict=True):
            row, prompt, plan = req.kv.req_pool_idx, len(req.origin_input_ids), self.allocator.plan_of(req)
            chosen = requests.selection_of(req)
            if end >= prompt:
                complete.append(row)
            waiting = range(begin, end if end < prompt else begin)
            if chosen is not None:
                waiting = range(chosen.most_kept(prompt) if end >= prompt > begin else 0)
            if plan.propagation is not None and waiting:
                states = torch.zeros(len(waiting), 1)
                self.hidden.put(row, np.array(waiting), states, None)
        for row in complete:
            self.hidden.drop(row)
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
        elif kind < 0.8:
            self.decode_all()
        elif kind < 0.9 and self.running:
            req = draw.choice(self.running)
            if draw.random() < 0.5:
                self.release(req, True)
            else:
                self.take_back([req])
        elif kind < 0.93:
            self.tree.evict(EvictParams(num_tokens=draw.choice([9, 20, ALL])))
        self.end_answers()

    def decode_all(self):
        decoding = [req for req in self.running if self.complete(req)]
        if decoding and not self.decode(decoding):
            self.take_back(self.in_chunks() or decoding[-1:])

    def end_answers(self):
        for req in [req for req in self.running if self.over(req)]:
            self.release(req, True)

    def to_the_end(self):
        """Nobody comes any more: who waits runs in turn, and ends."""
        for _ in range(2000):
            if not (self.running or self.waiting):
                return
            queue, self.waiting = self.waiting, []
            self.admit(queue)
            self.end_answers()
            self.decode_all()
            self.end_answers()
        raise AssertionError(f"{len(self.waiting)} wait, and {len(self.running)} do not end")

    def over(self, req):
        """Whether it has said all that it was to say."""
        return len(req.output_ids) >= req.sampling_params.max_new_tokens and self.complete(req)

    def request(self):
        req = super().request()
        prompt, plan = len(req.origin_input_ids), self.allocator.plan_of(req)
        longest = kv_schedule.most_tokens(self.allocator, plan, prompt)
        if plan.dense:  # as SGLang has it
            longest = self.allocator.size - (pages_of(prompt, self.size) + 1) * self.size - 1 + prompt
        room = max(longest - prompt, 0)
        req.sampling_params.max_new_tokens = min(self.draw.choice(self.answers), room)
        return req

    def adder(self, running, chunk, ratio, queue):
        """SGLang's of a step, as the scheduler makes it."""
        batch = Batch(reqs=running, batch_is_full=False, engine=self)
        scheduler = SimpleNamespace(
            is_mixed_chunk=self.mixed,
            waiting_queue=queue,
            tree_cache=self.tree,
            enable_priority_scheduling=self.urgent,
            enable_priority_preemption=self.urgent,
            lora_drainer=None,
            get_num_allocatable_reqs=lambda running, running_batch: self.table.available_size(),
        )
        beside = short_prompts.Beside(scheduler)
        self.patch.setattr(kv_schedule.DepthPrefillAdder, "beside", beside)
        return kv_schedule.DepthPrefillAdder(
            *(self.size, self.tree, self.allocator, batch, ratio, ALL, chunk),
            *(len(running) if self.mixed else 0, self.draw.randrange(2) if self.urgent else 0),
        )

    def next_chunk(self, adder, ledger, chunked):
        """Of the prompt that is in chunks; it, if it goes on."""
        chunked.init_next_round_input()
        left, beside = adder.beside.room(adder, chunked)
        for other in adder.beside.scheduler.waiting_queue[beside : beside + 1] if self.urgent else ():
            if other.priority - chunked.priority > adder.priority_scheduling_preemption_threshold:
                assert adder.add_chunked_req(chunked) is None and chunked not in self.running
                self.seen["gave way"] += 1
                return None
        expected = ledger.next_chunk(chunked, ledger.chunk - left)
        goes_on = adder.add_chunked_req(chunked)
        assert chunked.extend_range.length == expected
        assert (goes_on is not None) == ledger.in_chunks
        self.seen["parked" if ledger.parked else "chunk"] += 1
        return goes_on

    def makes_room(self, adder, ledger, req):
        """Whether a row is free for a waiting request, or somebody less urgent gives it his."""
        if not self.urgent or len(adder.can_run_list) < self.table.available_size():
            return True
        req.init_next_round_input(self.tree)
        return self.gives_way(adder, ledger, req, lambda: adder.preempt_to_schedule(req))[0]

    def gives_way(self, adder, ledger, req, ask):
        """Whether less urgent requests give way as admission is asked, and what it answers."""
        before = set(adder.preempt_list)
        self.tree.inc_lock_ref(req.last_node)
        pages = ledger.pages()
        expected = ledger.taken_out(req, adder.priority_scheduling_preemption_threshold)
        held, slots = ledger.held(expected, req), ledger.slots_without(expected, req)
        self.tree.dec_lock_ref(req.last_node)
        self.seen["together"] += held > sum(ledger.held({each}, req) for each in expected)
        answer = ask()
        assert set(adder.preempt_list) - before == expected
        self.tree.inc_lock_ref(req.last_node)
        assert (ledger.pages(), ledger.slots_without((), req)) == (pages + held, slots)
        self.tree.dec_lock_ref(req.last_node)
        ledger.give_up(expected)
        self.decoding = ledger.decoding
        return bool(expected), answer

    def admit(self, queue, **given):
        draw = self.draw
        queue = [req for req in queue if not kv_schedule.refuse_what_never_fits(self.allocator, req)]
        if self.urgent:
            queue.sort(key=lambda req: -req.priority)
        self.decoding = [req for req in self.running if self.complete(req)]
        running = [*self.decoding, *self.ended]
        self.ended = []
        self.mixed = given.get("mixed", draw.random() < 0.5)
        ratio = given.get("ratio", draw.choice([0, 0.25, 1]))
        self.patch.setattr(short_prompts.OPTIONS, "share", draw.choice([0, 0.5]))
        chunked = next(iter(self.in_chunks()), None)
        chunks = self.chunks if chunked or self.mixed else [None, *self.chunks]
        chunk = given.get("chunk", draw.choice(chunks))
        ledger = Ledger(self, running, self.decoding, ratio)
        adder = self.adder(running, chunk, ratio, queue)
        ledger.chunk = adder.rem_chunk_tokens
        if chunked:
            chunked = self.next_chunk(adder, ledger, chunked)
        queue = list(adder.beside.scheduler.waiting_queue)
        for place, req in enumerate(queue):
            result = None
            out = len(adder.preempt_list)
            if self.makes_room(adder, ledger, req):
                self.seen["for a row"] += len(adder.preempt_list) > out
                result = self.add(adder, ledger, req, chunked)
                # Where those who decode left no page of the chunk, it is let in the next time.
                for_it = len(adder.preempt_list) > out and (chunk is None or ledger.chunk >= self.size)
                assert req in adder.can_run_list or not for_it, "they were taken out for nothing"
            if result != AddReqResult.CONTINUE:
                self.waiting += [each for each in queue[place:] if each not in adder.can_run_list]
                break
        self.waiting += sorted(adder.preempt_list, key=lambda req: req.rid)  # SGLang has them in no order
        mixed = self.mixed and self.decoding
        if self.compute_admitted(adder):
            self.seen["mixed" if mixed else "alone"] += 1

    def expected(self, ledger, req):
        """How many tokens of a waiting request's are computed."""
        self.tree.inc_lock_ref(req.last_node)
        tokens = ledger.next_prompt(req)
        self.tree.dec_lock_ref(req.last_node)
        return tokens

    def add(self, adder, ledger, req, chunked):
        """A waiting request is asked for; what admission says then."""
        req.init_next_round_input(self.tree)
        expected = self.expected(ledger, req)

        def ask():
            return adder.add_one_req(req, has_chunked_req=chunked is not None, truncation_align_size=None)

        if self.urgent and ledger.full:
            gave_way, result = self.gives_way(adder, ledger, req, ask)
            self.seen["for room" if gave_way else "stays"] += 1
            expected = self.expected(ledger, req)
        else:
            before = list(adder.preempt_list)
            result = ask()
            assert adder.preempt_list == before
        assert (req in adder.can_run_list) == (expected > 0)
        self.seen["let in" if expected else "held back"] += 1
        if expected:
            assert req.extend_range.length == expected
            self.running.append(req)
            req.kv.cache_protected_len = len(req.prefix_indices)
            assert (result == AddReqResult.NO_TOKEN) == (min(ledger.left()) <= 0)
        return result


class FewStates(Admitting):
    """All want FastKV's selection, and few hidden states can wait for it."""

    kinds = [kind for kind in KINDS if "tsp_rate" in kind] * 2 + [{"tsp_rate": 0.3}]
    buffers = (24, 30, 40)


class Judged(FewStates):
    """Also from what a draft has chosen, of prompts that are computed at once."""

    kinds = tuple(
        {"tsp_rate": rate, "prefill_keep_rate": 0.5, "min_prompt_tokens": 12} for rate in (0.2, 0.3, 0.5)
    )
    buffers, begins, pools, chunks = (66,), (40, 40, 64), (160, 240), (16, 64, 128)


class FewRows(Admitting):
    """Long answers."""

    rows, answers = 2, (9, 20)


class Urgent(Admitting):
    """Rows are what is missing, and some take others'."""

    rows, urgent, pools, clips = 3, True, (80, 120, 200), (1 << 12,)

    def __init__(self, draw, size, patch):
        super().__init__(draw, size, patch)
        clip = draw.choice(self.clips)
        for module in (kv_schedule, schedule_policy):
            patch.setattr(module, "CLIP_MAX_NEW_TOKENS", clip)


class UrgentAlike(Urgent):
    """Many read the same long text, and of some answers only the begin is reckoned with."""

    rows, begins, clips, answers = 4, (24, 40), (4, 1 << 12), (9, 20, 40)

    def __init__(self, draw, size, patch):
        super().__init__(draw, size, patch)
        self.policies = self.policies[:1]


class UrgentForSlots(Urgent):
    """Virtual slots are what is missing, of which some hold many more than of memory, and some fewer."""

    rows, factors, begins, answers, pools, chunks = 5, (1,), (24, 40), (9, 20), (120,), (64,)
    kinds = (
        {},
        {"kv_retention_rate": 0.3},
        {"depth_cutoff": 1, "anchors": "none"},
        {"kv_retention_rate": 0.1, "speculative": True},
    )


MET = {"let in", "held back", "chunk", "parked", "alone", "mixed"}
WALKS = {
    Admitting: (16, MET),
    FewStates: (8, MET | {"states"}),
    Judged: (8, MET - {"parked"} | {"states at once"}),
    FewRows: (8, MET - {"parked"} | {"rows"}),
    Urgent: (10, MET - {"parked"} | {"for a row", "for room", "stays", "gave way"}),
    UrgentAlike: (12, {"for a row", "for room", "together"}),
    UrgentForSlots: (8, {"for room", "stays"}),
}


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("walk", WALKS)
def test_who_fits_is_let_in_and_nobody_else(walk, size):
    """And nobody waits for ever."""
    seeds, met = WALKS[walk]
    seen = Counter()
    for seed in range(seeds):
        with pytest.MonkeyPatch.context() as patch:
            engine = walk(random.Random(f"{seed} {size}"), size, patch)
            for _ in range(200):
                engine.step()
            engine.look()
            engine.to_the_end()
            engine.look()
            assert not engine.hidden.used
            seen += engine.seen
            requests._plan.cache_clear()
    assert met <= set(seen), seen


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
