"""Where depth pages meet SGLang's scheduler: allocation, admission, and what can never fit.

All of it runs while a batch is composed; a forward only reads the tables.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from itertools import accumulate, pairwise
from typing import Any, ClassVar

import numpy as np
import torch
from sglang.srt.beam_search.batch_tail import num_beam_member_rows
from sglang.srt.managers import schedule_batch, utils
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.schedule_policy import CLIP_MAX_NEW_TOKENS, AddReqResult, PrefillAdder
from sglang.srt.mem_cache import allocation

from fathom.runtime.kv.memory import Growth, pages_held, pages_taken
from fathom.runtime.kv.pages import pages_of
from fathom.runtime.plan import PrefillPlan
from fathom.runtime.sglang_host.memory.kv_allocator import DepthAllocator
from fathom.runtime.sglang_host.memory.kv_pool import LAYOUT
from fathom.runtime.sglang_host.memory.kv_tree import tree_of
from fathom.runtime.sglang_host.requests import is_judged, prompt_tokens
from fathom.runtime.sglang_host.sampling.beams import rows_to_take
from fathom.runtime.sglang_host.scheduling import between_chunks
from fathom.runtime.sglang_host.scheduling.short_prompts import Beside, outranks
from fathom.runtime.sglang_host.scheduling.taken_out import TakenOut

_alloc_for_extend = allocation.alloc_for_extend
_alloc_for_decode = allocation.alloc_for_decode
_compute_max_prefix_len = Req._compute_max_prefix_len


def _new_pages(slots: np.ndarray, counts: Sequence[int], page_size: int) -> list[np.ndarray]:
    """Of each request the virtual pages that begin among its slots: the first slot is handed out with the page.

    Args:
        slots: of all requests, one after the other; counts: of each.
    """
    bounds = list(accumulate(counts, initial=0))
    if page_size > 1:
        first = slots % page_size == 0
        slots = slots[first] // page_size
        bounds = np.concatenate([[0], np.cumsum(first)])[bounds].tolist()
    return [slots[begin:end] for begin, end in pairwise(bounds)]


def alloc_for_extend(batch: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """SGLang's allocation for a prefill batch, with physical pages behind the virtual ones.

    Raises:
        RuntimeError: as SGLang's, when admission let in more than fits.
    """
    allocator: DepthAllocator = batch.token_to_kv_pool_allocator
    memory, size = allocator.memory, allocator.page_size
    ends = [begin + new for begin, new in zip(batch.prefix_lens, batch.extend_lens, strict=True)]
    needed = 0
    for request, begin, end in zip(batch.reqs, batch.prefix_lens, ends, strict=True):
        plan, opened = allocator.plan_of(request), request.kv.holds_kv
        needed += pages_taken(plan, begin, end, prompt_tokens(request), size, opened)
    _require(allocator, batch.tree_cache, needed, "Prefill")
    with allocator.physical_pages_seen_to():
        slots, rows, rows_cpu = _alloc_for_extend(batch)
    open_rows = rows_cpu.tolist()
    for request, row in zip(batch.reqs, open_rows, strict=True):
        if row not in memory.tables:
            memory.open(row, allocator.plan_of(request), prompt_tokens(request))
    fresh = _new_pages(slots.cpu().numpy(), batch.extend_lens, size)
    memory.grow(list(map(Growth, open_rows, batch.prefix_lens, ends, fresh)))
    return slots, rows, rows_cpu


def alloc_for_decode(batch: Any, token_per_req: int) -> torch.Tensor:
    """SGLang's allocation for a decode step, with physical pages behind the virtual ones.

    Raises:
        RuntimeError: as SGLang's, when the step was not checked against what is free.
    """
    allocator: DepthAllocator = batch.token_to_kv_pool_allocator
    memory, size = allocator.memory, allocator.page_size
    rows, lengths = batch.req_pool_indices_cpu.tolist(), batch.seq_lens_cpu.tolist()
    needed = allocator.decode_pages(rows, lengths, token_per_req)
    _require(allocator, batch.tree_cache, needed, "Decode")
    with allocator.physical_pages_seen_to():
        slots = _alloc_for_decode(batch, token_per_req)
    fresh = _new_pages(slots.cpu().numpy(), [token_per_req] * len(rows), size)
    ends = [length + token_per_req for length in lengths]
    memory.grow(list(map(Growth, rows, lengths, ends, fresh)))
    return slots


def _require(allocator: DepthAllocator, tree_cache: Any, pages: int, phase: str) -> None:
    if not allocator.make_room(tree_cache, pages):
        free = allocator.memory.pool.free
        raise RuntimeError(f"{phase} out of memory: {pages} KV pages needed, {free} free and none to evict")


class RowLifetime:
    """Closes a request's tables when SGLang frees its row (``ReqToTokenPool.attach_aux_cache``).

    Attributes:
        closed: who else is told of each row that is freed.
    """

    def __init__(self, allocator: DepthAllocator) -> None:
        self._allocator = allocator
        self.dense_capacity = allocator.size
        self.closed: list[Callable[[int], None]] = []

    def free(self, row: int) -> None:
        """The request finished, was aborted, or was taken back."""
        self._allocator.free_known(self._allocator.memory.leaners.remove(row))
        self._allocator.memory.close(row)
        for tell in self.closed:
            tell(row)

    def alloc_to_lengths(self, **_: Any) -> None:
        """Nothing: tables grow where the whole batch is known."""

    def clear(self) -> None:
        """Every row is free."""
        for row in list(self._allocator.memory.owners):
            self.free(row)

    def reset_allocator(self) -> None:
        """The allocator clears its memory itself."""


def _dense_tokens(pages: int, allocator: DepthAllocator) -> int:
    """Tokens at all depths that take as much memory as ``pages`` pages, rounded up."""
    return -(-pages * allocator.page_size // allocator.memory.spans)


def saved_tokens(request: Req, begin: int, end: int, allocator: DepthAllocator) -> int:
    """How much less the tokens ``begin .. end - 1`` take than at all depths, in tokens at all depths.

    Less than 0 where the first chunk of a prompt takes the room for later ones too.
    """
    size, plan = allocator.page_size, allocator.plan_of(request)
    pages = pages_taken(plan, begin, end, prompt_tokens(request), size, request.kv.holds_kv)
    dense = (pages_of(end, size) - pages_of(begin, size)) * size
    return dense - _dense_tokens(pages, allocator)


class DepthPrefillAdder(PrefillAdder):
    """SGLang's admission, where a prompt costs the depth pages of its plan.

    SGLang compares tokens with what is left. While a request is judged, what it saves against being kept at
    all depths is added to what is left; when it is charged, the same amount is taken off the charge. Virtual slots
    are another bound, in which nothing is saved.

    A prompt between two chunks keeps what it has. Where others decode meanwhile, they may need more than they had
    promised: then it is parked until there is room for its next chunk, or the scheduler takes it back; as it is
    where a running request would be, for somebody more urgent.

    Attributes:
        beside: who may be computed beside a chunk of this process's long prompts.
    """

    token_to_kv_pool_allocator: DepthAllocator
    beside: ClassVar[Beside | None] = None
    _parked = False
    _chunked = False  # a prompt between two chunks goes on, and not to its end
    _saved = 0
    _saved_before = 0  # by the requests that were let in
    _share = 1.0
    _judged: Req | None = None
    _gained: dict[Req, float] | None = None  # with who may be taken out, in turn; None where nobody may
    _taken_out: TakenOut
    _states = 0  # the most tokens of this batch's prompts whose hidden states may wait for FastKV's selection

    @property
    def rem_total_tokens(self) -> float:
        return min(self._left())

    def _left(self) -> tuple[float, int]:
        """Of memory and of virtual slots."""
        memory = (super().rem_total_tokens + self._not_virtual() - self._mixed) / self._share + self._saved
        return memory, self._virtual_left(self.rem_total_token_offset)

    @property
    def cur_rem_tokens(self) -> float:
        left = (super().cur_rem_tokens + self._not_virtual() - self._mixed) / self._share + self._saved
        return min(left, self._virtual_left(self.cur_rem_token_offset))

    def _not_virtual(self) -> int:
        """Tokens that the physical pages hold and SGLang's count, which the virtual slots bound too, leaves out."""
        allocator, tree = self.token_to_kv_pool_allocator, tree_of(self.tree_cache)
        pages = allocator.memory.pool.free + (tree.evictable_pages if tree else 0)
        return allocator.dense_size(pages) - allocator.available_size() - self.tree_cache.evictable_size()

    @cached_property
    def _decoding(self) -> list[Req]:
        """Who goes on decoding, in this batch or the next."""
        return [req for req in self.running_batch.reqs if not req.finished()]

    @cached_property
    def _decoding_here(self) -> list[Req]:
        """Who decodes in this batch."""
        return self._decoding if self.beside is not None and self.beside.scheduler.is_mixed_chunk else []

    @cached_property
    def _mixed_pages(self) -> int:
        """Pages that those take."""
        if not (here := self._decoding_here):
            return 0
        rows, lengths = zip(*((req.kv.req_pool_idx, req.kv.kv_allocated_len) for req in here), strict=True)
        return self.token_to_kv_pool_allocator.decode_pages(rows, lengths)

    @cached_property
    def _mixed(self) -> int:
        """What these take beyond the token of each that SGLang has counted."""
        tokens = _dense_tokens(self._mixed_pages, self.token_to_kv_pool_allocator)
        return max(tokens - len(self._decoding_here), 0)

    @cached_property
    def _mixed_slots(self) -> int:
        """Virtual slots that they take beyond it: a page each whose last one is full."""
        full = sum(req.kv.kv_allocated_len % self.page_size == 0 for req in self._decoding_here)
        return max(full * self.page_size - len(self._decoding_here), 0)

    def _virtual_left(self, charged: int) -> int:
        """Virtual slots that can be had, less those that SGLang has charged or promised."""
        had = self.token_to_kv_pool_allocator.virtual_size()
        if not self.tree_cache.is_chunk_cache():
            had += self.tree_cache.slots_to_evict()
        return had - charged - self._saved_before - self._mixed_slots

    def add_one_req(self, req: Req, has_chunked_req: bool, *args: Any, **kwargs: Any) -> Any:
        if self._has_to_wait(req, has_chunked_req):
            return AddReqResult.OTHER
        if self._rows_missing(req) > 0:
            # SGLang has only the beams of requests in mind that run already.
            return AddReqResult.OTHER
        states = self._waiting_states(req)
        add = partial(super().add_one_req, *args, has_chunked_req=has_chunked_req, **kwargs)
        added = self._judge(req, len(req.full_untruncated_fill_ids), add)
        if added == AddReqResult.NO_TOKEN and req not in self.can_run_list and self._makes_room(req):
            added = self._judge(req, len(req.full_untruncated_fill_ids), add)
        self._states += states
        return added

    def _rows_missing(self, req: Req) -> int:
        taken = sum(map(rows_to_take, [*self.can_run_list, req]))
        return taken - self.tree_cache.req_to_token_pool.available_size()

    def _makes_room(self, req: Req) -> bool:
        """Whether running requests were taken out for one that lacks room; SGLang has that for a row only."""
        preempts = self.beside is not None and self.beside.scheduler.enable_priority_preemption
        return preempts and self.preempt_to_schedule(req)

    def preempt_to_schedule(self, req: Req) -> bool:
        """SGLang's, where the request can be in this batch and fits then.

        SGLang reckons with what running requests may still take, not with what they hold, and with what the new
        one takes at all depths, or with nothing where it looks at it for the first time.
        """
        req.init_next_round_input(self.tree_cache)
        less = [each for each in self.running_batch.reqs if not each.finished() and outranks(self, req, each)]
        enough_rows = self._rows_missing(req) <= len(less) + num_beam_member_rows(less)
        if not enough_rows or self._has_to_wait(req, self._chunked):
            return False
        before, answer, most = len(self.preempt_list), req.sampling_params.max_new_tokens, CLIP_MAX_NEW_TOKENS
        left = min(max(answer - len(req.output_ids), 0), most)
        spare = self.page_size + 1 + left - min(answer, most)
        self.rem_total_token_offset += spare
        self._gained = {}
        self._taken_out = TakenOut(self.token_to_kv_pool_allocator, tree_of(self.tree_cache))
        try:
            with self._lock_node(req.last_node):
                return bool(self._judge(req, len(req.full_untruncated_fill_ids), super().preempt_to_schedule))
        finally:
            free_now = sum(self._gained[each] for each in self.preempt_list[before:])
            self.rem_total_token_offset += free_now - spare
            self._gained = None

    def _get_running_request_total_token_offset(self, req: Req) -> float:
        """SGLang's: what a request may still take. Where it may be taken out, what room it leaves counts too."""
        expected = super()._get_running_request_total_token_offset(req)
        if self._gained is None:
            return expected
        if req not in self._gained:
            before = self._left_without_them()
            self._taken_out.add(req)
            self._gained[req] = self._left_without_them() - before
        return expected + self._gained[req]

    def _left_without_them(self) -> float:
        memory, slots = self._left()
        return min(memory + self._taken_out.tokens, slots + self._taken_out.slots)

    def _has_to_wait(self, req: Req, has_chunked_req: bool) -> bool:
        """Whether a new request cannot be in this batch, however much room there is."""
        if self._parked:
            return True  # who is parked comes first
        if (has_chunked_req or self.new_chunked_req is not None) and not self._at_once(req):
            # One prompt is in chunks at a time. SGLang trusts that it leaves nothing of a batch's tokens; but the
            # rest of a page, or what the pool has no room for at its depth, is left.
            return True
        states = self._waiting_states(req)
        return bool(states and self._states and self._states + states > LAYOUT.propagation_buffer)

    def _at_once(self, req: Req) -> bool:
        """Whether all of a new request can be computed in this batch."""
        chunk, new = self.rem_chunk_tokens, len(req.full_untruncated_fill_ids) - len(req.prefix_indices)
        return chunk is None or self.ceil_paged_tokens(new) <= chunk

    def _waiting_states(self, req: Req) -> int:
        """The most tokens of a new request whose hidden states may wait: none of a prompt that is computed at once.

        What a draft has chosen is computed in chunks, too, in the step in which the prompt ends.
        """
        if self.token_to_kv_pool_allocator.plan_of(req).propagation is None:
            return 0
        return prompt_tokens(req) if is_judged(req) or not self._at_once(req) else 0

    def add_chunked_req(self, req: Req) -> Any:
        left = 0
        if self.beside is not None:
            left, count = self.beside.room(self, req)
            if self.beside.takes_its_place(self, req, count):
                between_chunks.take_back(self.beside.scheduler, len(self._decoding))
                return None
        plan = self.token_to_kv_pool_allocator.plan_of(req)
        # A chunk may be as long as what is left holds at this request's depth.
        self._share = max(plan.shared_spans, 1) / plan.spans
        self._states += 0 if plan.propagation is None else prompt_tokens(req)
        self.rem_chunk_tokens -= left
        try:
            goes_on = self._judge(req, len(req.prefix_indices), self._add_chunk)
            self._chunked = goes_on is not None
            return goes_on
        finally:
            self._share = 1.0
            self.rem_chunk_tokens += left

    def _add_chunk(self, req: Req) -> Any:
        """SGLang's, which takes a whole chunk where there is no room."""
        begin, whole = len(req.prefix_indices), len(req.full_untruncated_fill_ids)
        tokens = min(self.rem_chunk_tokens, int(self.rem_total_tokens), whole - begin)
        if self._decoding and not (tokens > 0 and self._fits(req, begin, begin + tokens)):
            req.set_extend_range(begin, begin)
            self._parked = True
            return req
        return super().add_chunked_req(req)

    def _fits(self, req: Req, begin: int, end: int) -> bool:
        """Whether there are pages for the next chunk, and for those who decode in the same batch."""
        allocator, tree = self.token_to_kv_pool_allocator, tree_of(self.tree_cache)
        plan, free = allocator.plan_of(req), allocator.memory.pool.free
        pages = pages_taken(plan, begin, end, prompt_tokens(req), allocator.page_size, req.kv.holds_kv)
        return pages + self._mixed_pages <= free + (tree.evictable_pages if tree else 0)

    def _judge(self, req: Req, end: int, add: Any, *args: Any, **kwargs: Any) -> Any:
        allocator = self.token_to_kv_pool_allocator
        self._judged = req
        begin = len(req.prefix_indices)
        self._saved = saved_tokens(req, begin, end, allocator) if end > begin else 0
        try:
            return add(req, *args, **kwargs)
        finally:
            self._judged, self._saved = None, 0

    def _update_prefill_budget(
        self, prefix_len: int, extend_input_len: int, *args: Any, **kwargs: Any
    ) -> None:
        super()._update_prefill_budget(prefix_len, extend_input_len, *args, **kwargs)
        if self._judged is None:
            return
        allocator, req = self.token_to_kv_pool_allocator, self._judged
        begin = len(req.prefix_indices)
        saved = saved_tokens(req, begin, begin + extend_input_len, allocator)
        self.rem_total_token_offset -= saved
        self.cur_rem_token_offset -= saved
        self._saved_before += saved
        self._saved = 0


def most_tokens(allocator: DepthAllocator, plan: PrefillPlan, prompt: int, pages: int | None = None) -> int:
    """The longest a request can get (prompt and generated tokens) and still be admitted into an empty pool, also
    when it comes back after it was taken out, and whatever of its prompt is cached.

    Args:
        pages: of the pool; None for as many as it has.
    """
    size, pages = allocator.page_size, allocator.memory.pool.total if pages is None else pages
    room, beyond = pages // plan.spans * size, _counted_beyond(allocator, plan, prompt, pages)
    # One page to spare, as SGLang's admission wants it: a virtual one, and a physical one per span.
    low, high = 0, min(max(allocator.virtual_pages - 2, 0) * size, 1 << 31)
    while low < high:
        middle = (low + high + 1) // 2
        fits = pages_held(plan, middle, prompt, size) + plan.spans < pages
        if fits and (middle <= prompt or middle + beyond < room):
            low = middle
        else:
            high = middle - 1
    return low


def _counted_beyond(allocator: DepthAllocator, plan: PrefillPlan, prompt: int, total: int) -> int:
    """What SGLang's admission counts beyond a request's tokens, generated ones included, before it lets it in.

    What has to be computed is rounded up to whole tokens at all depths, and there is a page to spare, or, where
    requests ignore their end and nothing is cached, a token. How much there is when a request comes back decides
    what is rounded: the worst of a page's worth. So does what of its prompt is cached, which is rounded by itself:
    the worst of as many pages as there are spans.
    """
    size, found = allocator.page_size, []
    hits = range(min(plan.spans, plan.reusable_tokens(prompt) // size) + 1)
    room = allocator.dense_size(total)
    for length in range(prompt, prompt + size):
        held, counted = pages_held(plan, length, prompt, size), pages_of(length, size) * size
        found.append(_dense_tokens(held, allocator) - length + 1)
        for cached in (hit * plan.shared_spans for hit in hits):
            left = allocator.dense_size(max(total - cached, 0))
            found.append(_dense_tokens(held - cached, allocator) + room - left - counted + size)
    return max(found)


def refuse_what_never_fits(allocator: DepthAllocator, request: Req) -> str | None:
    """Why the request can never be served by this pool, or None when it can."""
    plan, prompt = allocator.plan_of(request), prompt_tokens(request)
    if prompt + 1 <= most_tokens(allocator, plan, prompt):
        return None
    size, virtual = allocator.page_size, pages_of(prompt + 1, allocator.page_size) + 2
    if virtual > allocator.virtual_pages:
        return (
            f"The prompt of {prompt} tokens needs {virtual} virtual KV pages of {size} tokens; the pool has "
            f"{allocator.virtual_pages} (--shallow-factor). Use a shorter input."
        )
    enough = range((2 * virtual + 4) * plan.spans)  # retention holds what it copies twice
    needed = bisect_left(enough, prompt + 1, key=lambda pages: most_tokens(allocator, plan, prompt, pages))
    return (
        f"The prompt of {prompt} tokens needs {needed} KV pages ({size} tokens x {plan.span} layers each); "
        f"the pool has {allocator.memory.pool.total}. Use a shorter input."
    )


def truncate(allocator: DepthAllocator, request: Req, longest: int) -> None:
    """Cut a prompt to what fits into the pool under the plan that it then has, beside its answer if that takes no
    more than half of the pool. A prompt of which nothing fits is left as it is.

    Args:
        longest: tokens that a prompt may have anyway.
    """
    ids = request.origin_input_ids
    wanted = max(1, request.sampling_params.max_new_tokens or 1)

    def fits(length: int) -> bool:
        request.origin_input_ids = ids[:length]
        most = most_tokens(allocator, allocator.plan_of(request), length)
        return length + min(wanted, max(1, most // 2)) <= most

    low, high = 0, min(len(ids), longest)
    if high > 0 and fits(high):  # as most do
        low = high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    request.origin_input_ids = ids[:low] if low > 0 else ids


def validate_input_length(request: Req, max_req_input_len: int, allow_auto_truncate: bool) -> str | None:
    """SGLang's check of a prompt's length, and after it the check against the pool."""
    error = utils.validate_input_length(request, max_req_input_len, allow_auto_truncate)
    if error is not None or _ALLOCATOR is None:
        return error
    return refuse_what_never_fits(_ALLOCATOR, request)


def max_prefix_len(self: Req, input_len: int) -> int:
    """SGLang's bound on a prefix hit, and the plan's: see ``PrefillPlan.reusable_tokens``."""
    longest = _compute_max_prefix_len(self, input_len)
    if _ALLOCATOR is None or (plan := _ALLOCATOR.plan_of(self)).dense:
        return longest
    return min(longest, plan.reusable_tokens(prompt_tokens(self)))


_ALLOCATOR: DepthAllocator | None = None


def install(allocator: DepthAllocator, row_pool: Any) -> RowLifetime:
    """Put the functions in SGLang's places, for this process's only allocator."""
    from sglang.srt.managers import scheduler

    global _ALLOCATOR
    _ALLOCATOR = allocator
    lifetime = RowLifetime(allocator)
    row_pool.attach_aux_cache(lifetime)
    schedule_batch.alloc_for_extend = alloc_for_extend
    schedule_batch.alloc_for_decode = alloc_for_decode
    Req._compute_max_prefix_len = max_prefix_len
    scheduler.PrefillAdder = DepthPrefillAdder
    scheduler.validate_input_length = validate_input_length
    return lifetime
