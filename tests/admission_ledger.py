"""What admission may say of a step, reckoned from docs/depth-pages.md: in pages, by a ledger of the step's own."""

from kv_walk import LAYERS
from sglang.srt.managers import schedule_policy

from fathom.runtime.kv.memory import pages_taken
from fathom.runtime.kv.pages import pages_of
from fathom.runtime.sglang_host import requests


def expected(tokens):
    """Of an answer: SGLang reckons with no more than these."""
    return min(tokens, schedule_policy.CLIP_MAX_NEW_TOKENS)


def answer_left(req):
    return expected(req.sampling_params.max_new_tokens - len(req.output_ids))


def path_of(req):
    """Nodes of the cache that a request reads."""
    node = req.last_node
    while node.parent is not None:
        yield node
        node = node.parent


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
        answers = sum(map(answer_left, running)) * ratio
        self.memory = counted + answers + max(self.dense(self.decode_pages) - len(decoding), 0)
        full = sum(req.kv.kv_allocated_len % engine.size == 0 for req in decoding) if engine.mixed else 0
        self.slots = answers + max(counted, counted - len(decoding) + full * engine.size)
        self.new, self.chunk, self.states, self.ratio = [], None, 0, ratio
        self.parked, self.in_chunks, self.full, self.states_at_once = False, False, False, False

    def dense(self, pages):
        """Pages in tokens at all depths, of which a part counts as one."""
        return -(-pages * self.engine.size // LAYERS)

    def pages(self):
        """Those that can be had."""
        return self.engine.memory.pool.free + self.engine.tree.evictable_pages

    def left(self):
        """Tokens at all depths, and virtual slots."""
        return self.pages() // LAYERS * self.engine.size - self.memory, self.slots_without(()) - self.slots

    def slots_without(self, taken, *readers):
        """Virtual slots that could be had without these running requests; what readers found is in use."""
        engine, size = self.engine, self.engine.size
        (cached, evictable), leaned = engine.cached(), engine.leaned(taken)
        others = {node for each in [*engine.running, *readers] if each not in taken for node in path_of(each)}
        unlocked = [node.value for each in taken for node in path_of(each) if node not in others]
        own = [engine.slots(each)[each.kv.cache_protected_len :] for each in taken]
        free = {slot // size for slots in own for slot in slots} | (engine.leaned() - leaned - cached)
        evictable |= {slot // size for slots in unlocked for slot in slots.tolist()}
        found = len(free) + max(len(evictable) - len(leaned & cached), 0)
        return engine.allocator.virtual_size() + found * size

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
        answer = req.sampling_params.max_new_tokens if end == len(req.full_untruncated_fill_ids) else 0
        more = size + expected(answer)
        saved = (pages_of(end, size) - pages_of(begin, size)) * size - self.dense(self.taken(req, begin, end))
        self.memory += new + more - saved
        self.slots += new + more
        self.new.append(req)
        if self.chunk is not None:
            self.chunk -= new

    def in_line(self, req):
        """Whether a waiting request can be in this batch, if there are memory and a row; and its hidden states."""
        plan, at_once = self.engine.allocator.plan_of(req), self.at_once(req)
        waits = plan.propagation is not None and (requests.is_judged(req) or not at_once)
        states = len(req.origin_input_ids) if waits else 0
        if self.parked or (self.in_chunks and not at_once):
            return False, states
        if states and self.states and self.states + states > requests.LAYOUT.propagation_buffer:
            self.engine.seen["states"] += 1
            self.engine.seen["states at once"] += self.states_at_once and at_once
            return False, states
        return True, states

    def at_once(self, req):
        size, new = self.engine.size, len(req.full_untruncated_fill_ids) - len(req.prefix_indices)
        return self.chunk is None or pages_of(new, size) * size <= self.chunk

    def room_for(self, req):
        """What is left for a waiting request: the less of memory and slots."""
        return min(self.rooms(req))

    def rooms(self, req):
        """Memory and slots. Memory as tokens of a waiting request: it would take as many as it is long at all
        depths, and what it saves of whole pages is left."""
        size, begin, end = self.engine.size, len(req.prefix_indices), len(req.full_untruncated_fill_ids)
        dense = (pages_of(end, size) - pages_of(begin, size)) * size
        memory, slots = self.left()
        return memory + dense - self.dense(self.taken(req, begin, end)), slots

    def held(self, taken, req):
        """Pages that running requests hold, and that neither others nor what a waiting one found hold too."""
        engine = self.engine
        others = {node for each in [*engine.running, req] if each not in taken for node in path_of(each)}
        pages, seen = sum(engine.allocator.held_pages(list(taken))), others
        for each in taken:
            twice = sum(len(node.key) for node in path_of(each) if node in seen)
            pages -= engine.depths[each.extra_key] * twice // engine.size
            seen = seen.union(path_of(each))
        return pages

    def taken_out(self, req, threshold):
        """Whom a waiting request takes out for its row: no more than make room for it, the least urgent first."""
        if not self.in_line(req)[0]:
            return set()
        size, new = self.engine.size, len(req.full_untruncated_fill_ids) - len(req.prefix_indices)
        needed, found = new + answer_left(req) + size + 1, set()  # a page to spare
        (memory, slots), had = self.rooms(req), self.slots_without((), req)
        room = min(memory, slots)
        for each in sorted(self.decoding, key=lambda each: each.priority):
            if req.priority - each.priority <= threshold or (found and needed <= room):
                break
            more = self.held(found | {each}, req) - self.held(found, req)
            found.add(each)
            memory += answer_left(each) * self.ratio + more // LAYERS * size
            slots += answer_left(each) * self.ratio
            room = min(memory, slots + self.slots_without(found, req) - had)
        return found if needed <= room else set()

    def give_up(self, taken):
        """Running requests were taken out."""
        answers = sum(map(answer_left, taken)) * self.ratio
        self.memory, self.slots = self.memory - answers, self.slots - answers
        self.decoding = [req for req in self.decoding if req not in taken]

    def next_prompt(self, req):
        """How many tokens of a waiting request's are computed, with what it found in the cache held by it."""
        size, begin, end = self.engine.size, len(req.prefix_indices), len(req.full_untruncated_fill_ids)
        rows = sum(not each.kv.holds_kv for each in [*self.new, req])
        first, states = self.in_line(req)
        if first and rows > self.engine.table.available_size():
            self.engine.seen["rows"] += 1
            return 0
        self.full = first and end - begin + max(answer_left(req), 0) + size >= self.room_for(req)
        if not first or self.full:
            return 0
        at_once = self.at_once(req)
        if not at_once and (end := (begin + self.chunk // size * size) // size * size) <= begin:
            return 0
        self.states += states
        self.states_at_once |= bool(states and at_once)
        self.in_chunks |= not at_once
        self.charge(req, begin, end)
        return end - begin
