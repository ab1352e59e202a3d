"""Short prompts beside the chunks of a long one.

SGLang computes a long prompt in chunks, and each chunk takes all tokens that a step may have: whoever comes
meanwhile waits for the last one, however short their own prompts are.
"""

from dataclasses import dataclass
from itertools import islice
from typing import Any

from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.schedule_policy import PrefillAdder
from sglang.srt.runtime_context import get_schedule

from fathom.runtime.sglang_host.requests import is_judged

LOOKED_AT = 32
"""Waiting requests that are looked at before a chunk: each looks for its prefix in the cache."""


@dataclass
class Options:
    """The operator's.

    Attributes:
        share: of a chunk's tokens, at most, that short prompts may have; 0 leaves them where SGLang does.
    """

    share: float = 0.0


OPTIONS = Options()


class Beside:
    """Who may be computed beside the next chunk of a prompt: whose whole prompt fits into what they may have of it.

    What is in the cache counts as computed. They go ahead of those who wait and do not fit, which another chunked
    prompt keeps waiting anyway; but nobody goes ahead where requests have priorities.

    Attributes:
        scheduler: SGLang's, in whose queue they wait.
    """

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler

    def room(self, adder: PrefillAdder, chunked: Req) -> tuple[int, int]:
        """Tokens that the next chunk leaves to them, a multiple of the page size, and how many they are.

        They are first in the queue then.

        Args:
            adder: of the step, to which nobody was added; chunked: whose prompt the chunk is of.
        """
        scheduler, running, size = self.scheduler, adder.running_batch, adder.page_size
        most = int(adder.rem_chunk_tokens * OPTIONS.share) // size * size
        rows = scheduler.get_num_allocatable_reqs(len(running.reqs), running_batch=running) - 1
        if most <= 0 or running.batch_is_full:
            return 0, 0
        adapters = _adapters(adder, chunked)
        room = 0
        first: list[Req] = []
        for request in islice(scheduler.waiting_queue, LOOKED_AT):
            if len(first) >= rows:
                break
            request.init_next_round_input(scheduler.tree_cache)
            new = len(request.full_untruncated_fill_ids) - len(request.prefix_indices)
            tokens = adder.ceil_paged_tokens(new)
            simple = request.beam_group is None and not is_judged(request)
            if simple and self._may_join(request, adapters) and room + tokens <= most:
                room += tokens
                first.append(request)
            elif scheduler.enable_priority_scheduling:
                break
        chosen = set(first)
        scheduler.waiting_queue[:] = [*first, *(r for r in scheduler.waiting_queue if r not in chosen)]
        return room, len(first)

    def takes_its_place(self, adder: PrefillAdder, chunked: Req, beside: int) -> bool:
        """Whether whoever waits next is so much more urgent that it would take the prompt's place if that ran.

        Args:
            adder, chunked: as in :meth:`room`; beside: how many are computed beside the chunk.
        """
        scheduler, others = self.scheduler, self.scheduler.waiting_queue[beside : beside + 1]
        if not (scheduler.enable_priority_preemption and others):
            return False
        return outranks(adder, others[0], chunked) and self._may_join(others[0], _adapters(adder, chunked))

    def _may_join(self, request: Req, adapters: set[str | None]) -> bool:
        """Whether the batch has the request's adapter, and that takes others."""
        turns = self.scheduler.lora_drainer
        return request.lora_id in adapters and (turns is None or turns.can_schedule(request))


def outranks(adder: PrefillAdder, request: Req, running: Req) -> bool:
    """Whether a request is so much more urgent than a running one that it may take that one's place."""
    more = request.priority - running.priority
    if get_schedule().schedule_low_priority_values_first:
        more = -more
    return more > adder.priority_scheduling_preemption_threshold


def _adapters(adder: PrefillAdder, chunked: Req) -> set[str | None]:
    """Those that the batch has."""
    return {request.lora_id for request in (*adder.running_batch.reqs, chunked)}
