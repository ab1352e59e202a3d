"""Turns of LoRA adapters, of which a batch takes only some.

SGLang lets a request wait until there is a place for its adapter. Those who have one may keep it for ever:
whoever comes for the same adapter meanwhile joins. Its drainer takes places away for those who wait too long,
also where they wait for KV and not for a place. It lets others join without end, counts a pinned adapter's place
as free, does nothing for requests without an adapter, and each of a model's processes goes by a clock of its own,
so that they may compose different batches.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sglang.srt.managers.schedule_batch import Req

Adapter = str | None
"""SGLang's id of an adapter; None for the model alone, which takes a place too."""


@dataclass(frozen=True)
class Late:
    """What the process whose clock counts tells all of them.

    Attributes:
        adapters: whose first request has waited too long, the longest first.
    """

    adapters: tuple[Adapter, ...]


class Drain(NamedTuple):
    """Why an adapter is to give up its place.

    Attributes:
        whom: the adapter that it is for.
        had: ids of the requests that the adapter had when that was decided.
    """

    whom: Adapter
    had: frozenset[str]


class Turns:
    """SGLang's ``LoRADrainer`` for those who wait for a place, and for nobody else.

    An adapter that drains takes no request that may stay for longer than those that it had when that began. A place
    that is free goes to the adapter that has waited longest, if one is late.

    Args:
        seconds: how long a request waits before a place is made for its adapter.
        fit: whether adapters can be in one batch.
        pinned: whether an adapter keeps its place whoever runs.
        begun: the request whose prompt is between two chunks, which is in no batch then; None where there is none.

    Attributes:
        late: as :class:`Late` said it last.
    """

    def __init__(
        self,
        seconds: float,
        fit: Callable[[set[Adapter]], bool],
        pinned: Callable[[Adapter], bool],
        begun: Callable[[], Req | None],
    ) -> None:
        self.late: tuple[Adapter, ...] = ()
        self._seconds, self._fit, self._pinned, self._begun = seconds, fit, pinned, begun
        self._held: set[Adapter] = set()
        self._draining: dict[Adapter, Drain] = {}
        self._left: dict[Adapter, int] = {}  # of those that drain, tokens that may come before they are done
        self._next: Sequence[Adapter] = ()

    def news(self, waiting: Iterable[Req], running: Iterable[Req]) -> list[Late]:
        """By this process's clock, who is late; nothing where ``late`` says the same."""
        latest = time.perf_counter() - self._seconds
        held = {request.lora_id for request in self._with_places(running)}
        came: dict[Adapter, float] = {}
        for request in waiting:
            if request.lora_id not in held:
                entered = request.time_stats.wait_queue_entry_time
                came[request.lora_id] = min(entered, came.get(request.lora_id, entered))
        late = tuple(sorted((a for a, entered in came.items() if entered < latest), key=came.__getitem__))
        return [] if late == self.late else [Late(late)]

    def update_draining_state(self, waiting_queue: Iterable[Req], running_reqs: Iterable[Req]) -> None:
        """Before a batch is composed: see which adapters have places, and which are to give theirs up."""
        running = self._with_places(running_reqs)
        waiting = {request.lora_id for request in waiting_queue}
        left: dict[Adapter, dict[str, int]] = {}
        for request in running:
            most = request.sampling_params.max_new_tokens - len(request.output_ids)
            left.setdefault(request.lora_id, {})[request.rid] = most
        self._held = set(left)
        late = [adapter for adapter in self.late if adapter in waiting - self._held]
        self._next = late[:1]
        self._draining = {a: d for a, d in self._draining.items() if a in self._held and d.whom in late}
        if late and not self._fit({late[0], *self._held}):
            served = {drain.whom for drain in self._draining.values()}
            may = [a for a in left if a not in self._draining and not self._pinned(a)]
            may.sort(key=lambda adapter: max(left[adapter].values()))
            for adapter, whom in zip(may, (a for a in late if a not in served), strict=False):
                self._draining[adapter] = Drain(whom, frozenset(left[adapter]))
        self._left = {
            adapter: max((left[adapter][rid] for rid in drain.had & left[adapter].keys()), default=0)
            for adapter, drain in self._draining.items()
        }

    def can_schedule(self, req: Req) -> bool:
        """Whether the request's adapter may have it now, if there is a place."""
        if req.lora_id not in self._held:
            return not self._next or req.lora_id in self._next
        most = req.sampling_params.max_new_tokens
        return most <= self._left.get(req.lora_id, most)

    def _with_places(self, running: Iterable[Req]) -> list[Req]:
        begun = self._begun()
        return [r for r in (*running, *([begun] if begun is not None else [])) if not r.finished()]
