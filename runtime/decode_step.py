"""One decode step in which requests decode slow and fast: what its layers read, and what it was for each request.

:class:`Step` is planned from tokens that are known. :class:`Ahead` is launched while its last tokens are being
computed (overlap scheduling): whether they end a sentence, and so what each request reads, the device decides.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from fathom.kernels.two_segment_attention import Evidence, SegmentPlan, two_segment_attention
from fathom.runtime.kv.device_view import DeviceView
from fathom.runtime.kv.view import SpanView
from fathom.runtime.sfi.rules import Reading
from fathom.runtime.sfi.step import Reads, RefreshBatch, SfiStep, grant_evidence, plan_span, refresh_layer
from fathom.runtime.sfi.trigger import CAUSES
from fathom.runtime.staging import send

if TYPE_CHECKING:
    from fathom.runtime.decode import SlowFast

AS_SERVED = Reading()


class Entry(NamedTuple):
    """One request of a decode step.

    Attributes:
        row: the engine's request row.
        length: tokens of the request, the one that this step reads included.
        tokens: what the request has generated so far, the token that this step reads included; None for a request
            that always reads everything.
        drafted: tokens that were drafted after these; they are query rows behind the request's own.
        reading: what its fast steps read; looked at when the request is new.
        ahead: whether the last of its tokens, which this step reads, is on the device only: it is missing in
            ``tokens``.
    """

    row: int
    length: int
    tokens: Sequence[int] | None
    drafted: int = 0
    reading: Reading = AS_SERVED
    ahead: bool = False


class Outcome(NamedTuple):
    """What a step was for one row.

    Attributes:
        fast: whether it read a selection only.
        cause: why its selection was renewed, one of ``CAUSES``; None where it was not.
        seconds: its share of the time that the Selector and the packing took.
        compact_bytes: size of its compact buffers on all devices, 0 where it has none.
    """

    fast: bool
    cause: str | None
    seconds: float
    compact_bytes: int


@dataclass(eq=False)
class Later:
    """What a step was for one row, once the token that it read is known.

    Attributes:
        outcome: None until then, and for good where the request was taken back or has ended before.
    """

    outcome: Outcome | None = None


class Phase(NamedTuple):
    """Of each row, [batch] bool: whether its step is slow, and whether nothing has been chosen yet."""

    slow: np.ndarray
    stale: np.ndarray


@dataclass
class Planned:
    """A step on page tables of some lengths, on the host.

    Attributes:
        longest: entries of the longest table; width: of the evidence.
    """

    step: SfiStep
    longest: int
    width: int
    _there: SfiStep | None = None

    def on(self, device: torch.device | str) -> SfiStep:
        """The step with what kernels read on a device; sent once."""
        if self._there is None:
            self._there = self.step.on(device)
        return self._there


@dataclass(frozen=True)
class SpanStep:
    """What the layers of one span read, on the device of the keys.

    Attributes:
        table: int32 page table, a row for each request: [batch, longest], or a span's list of slots.
        width: entries of the evidence.
    """

    step: SfiStep
    table: torch.Tensor
    width: int


class Step:
    """One decode step of a batch.

    A request has one query row, and one for each token that was drafted after its own: such a row reads what the
    request would read in the step that it stands for. Use::

        with executor.step():
            for each layer:
                output = step.attend(...)
        step.finish()

    Attributes:
        capacity: requests whose selection is renewed; width: of their evidence at most.
        choosing: [requests] bool, which of them; of all that may be, where the last tokens are not known.
        at_random: whether one of them chooses at random.
        owner: [query rows] the request of each.
    """

    def __init__(
        self,
        state: "SlowFast",
        entries: Sequence[Entry],
        segments: np.ndarray,
        phase: Phase | None = None,
        like: "Step | None" = None,
    ) -> None:
        """
        Args:
            segments: [len(entries)] as in :meth:`SlowFast.begin`.
            phase: of the rows, where it is not what :attr:`SlowFast.phases` says.
            like: a step in which all are slow that are here: each has its evidence in the same place.
        """
        self.state, self.segments = state, segments
        self.rows = np.array([entry.row for entry in entries])
        self.lengths = np.array([entry.length for entry in entries])
        self.alternates = np.array([entry.tokens is not None for entry in entries])
        self.start = np.where(self.alternates, state.start[self.rows], -1)
        phase = phase or Phase(state.phases.slow(self.rows), state.phases.stale(self.rows))
        self.slow = ~self.alternates | (self.start < 0) | phase.slow
        settled = state.frozen[self.rows] & ~phase.stale
        asking = self.slow & (self.start >= 0) & ~settled
        if like is None:
            # No table is longer than its request.
            self.width = state.wide(int(self.lengths[asking].max(initial=1)))
            room = min(state.ring.capacity(self.width), len(self.rows))
            self.evidence = grant_evidence(asking, self.start, self.lengths, room, state.config)
            self.capacity = int((self.evidence >= 0).sum())
        else:
            self.width, self.capacity = like.width, like.capacity
            self.evidence = np.where(asking, like.evidence, -1)
        renewed = self.evidence >= 0
        self.choosing: np.ndarray = renewed if like is None else like.choosing
        self.refreshed = renewed | (self.slow & settled)
        self.at_random = bool((state.reading[self.rows[renewed], 2] >= 0).any())
        counts = np.array([1 + entry.drafted for entry in entries])
        assert not (self.slow & (self.start >= 0) & (counts > 1)).any(), "a slow step has one row"
        # Of each query row its request, and the rows of that request behind it.
        self.owner, self.last = np.repeat(np.arange(len(entries)), counts), np.cumsum(counts) - 1
        self.behind = self.last[self.owner] - np.arange(len(self.owner))
        self.spans: dict[int, SpanStep] = {}
        self.planned: dict[int, Planned] = {}  # by span
        # Spans whose tables are as long and as packed as another's share its plan.
        self.plans: dict[bytes, Planned] = {}
        self.kinds: set[bool] = set() if like is None else like.kinds
        self.seconds = 0.0

    def __len__(self) -> int:
        """Requests."""
        return len(self.rows)

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        pool: tuple[torch.Tensor, torch.Tensor],
        view: SpanView,
        scale: float,
        there: DeviceView | None = None,
    ) -> torch.Tensor:
        """Attention of the step's query rows at one layer.

        Args:
            query: [query rows, heads, head_dim], request after request.
            pool: keys [slots, kv_heads, head_dim] and values [slots, kv_heads, value_dim] of the layer, the new
                tokens' included.
            view: of the layer's span; there: the same on the device, where it is; else the table is sent there.

        Returns:
            [query rows, heads, value_dim] in the query's type.
        """
        state, plan = self.state, self.span_step(layer, view, there)
        compact, evidence = state.compact[layer], None
        if self.capacity:
            evidence = state.ring.view(state.executor.acquire(), self.capacity, plan.width)
        output = query.new_empty(len(query), query.shape[1], pool[1].shape[2])
        two_segment_attention(query, pool, compact, plan.table, plan.step.plan, scale, evidence, output)
        if evidence is not None:
            state.executor.submit(self._refresh(layer, evidence, pool, compact, plan))
        return output

    def span_step(self, layer: int, view: SpanView, there: DeviceView | None = None) -> SpanStep:
        """What the layers of a layer's span read; ``view`` is the span's, ``there`` the same on the device."""
        span = layer // self.state.shape.span
        if span not in self.spans:
            planned = self.plan(span, view, there)
            table = self._table(planned, view) if there is None else there.table
            self.spans[span] = SpanStep(planned.on(self.state.shape.device), table, planned.width)
        return self.spans[span]

    def plan(self, span: int, view: SpanView, there: DeviceView | None = None) -> Planned:
        """The plan of a span, on the host."""
        state = self.state
        lengths = np.diff(view.entry)[self.segments]
        held = state.held[span, self.rows]
        rows = np.arange(len(self)) if there is None else there.first[self.segments]
        key = b"".join(each.tobytes() for each in (lengths, held, rows))
        if key not in self.plans:
            self.plans[key] = self._plan_tables(rows, lengths, held)
        self.planned[span] = self.plans[key]
        return self.plans[key]

    def _table(self, planned: Planned, view: SpanView) -> torch.Tensor:
        """[batch, longest] int32 page table, for a view that is on the host only."""
        # What the descriptor does not name is never read, and a long table not even touched.
        table = np.empty((len(self), planned.longest), np.int32)
        segments = np.arange(len(view.entry) - 1)[self.segments].tolist()
        for line, begin, end, *_ in planned.step.plan.packed.tolist():
            table[line, begin:end] = view.part(segments[line], begin, end)
        return send(table, self.state.shape.device)

    def _plan_tables(self, rows: np.ndarray, lengths: np.ndarray, held: np.ndarray) -> Planned:
        """The plan for page tables of these lengths.

        Args:
            rows: [requests] of the table.
            lengths, held: [requests] entries of the table and of the compact run, -1 where nothing is packed.
        """
        state, owner = self.state, self.owner
        recent, selected, seed = state.reading[self.rows][owner].T
        step = plan_span(
            rows[owner],
            lengths[owner] - self.behind,
            self.slow[owner],
            self.start[owner],
            held[owner],
            self.evidence[owner],
            self.capacity,
            state.shape.kv_heads,
            state.config,
            Reads(recent, selected, np.where(self.alternates[owner], seed, -1), self.lengths[owner]),
        )
        width = state.wide(int(lengths[self.choosing].max(initial=1)))
        return Planned(step, int(lengths.max()), width)

    def _refresh(
        self,
        layer: int,
        evidence: Evidence,
        pool: tuple[torch.Tensor, torch.Tensor],
        compact: tuple[torch.Tensor, torch.Tensor],
        plan: SpanStep,
    ) -> Callable[[], None]:
        batch: RefreshBatch = plan.step.refresh
        config, selector = self.state.config, self.state.options.selector

        def work() -> None:
            began = time.perf_counter()  # the host's part: on a GPU what it takes to enqueue the work
            refresh_layer(evidence, pool, compact, plan.table, batch, config, selector, layer, self.at_random)
            self.seconds += time.perf_counter() - began

        return work

    def finish(self) -> Sequence[Outcome | Later | None]:
        """Take note of the step once all layers have run.

        Returns:
            Per request what the step was, None for one that always reads everything.
        """
        self.state.refresh_seconds += self.seconds
        return self.note(np.arange(len(self)))

    def hold(self, places: np.ndarray) -> None:
        """What the next step finds of the requests at these places of it: runs, and whose selection is new."""
        state, rows, alternates = self.state, self.rows[places], self.alternates[places]
        for span, plan in self.planned.items():
            held = plan.step.held[self.last[places]]
            state.held[span, rows] = np.where(alternates, held, state.held[span, rows])
        state.refreshed[rows] = np.where(alternates, self.refreshed[places], state.refreshed[rows])

    def note(self, places: np.ndarray) -> list[Outcome | None]:
        """Take note of what the step was for the requests at these places of it."""
        self.hold(places)
        state, rows, alternates = self.state, self.rows[places], self.alternates[places]
        renewed = self.evidence[places] >= 0
        causes = state.phases.cause(rows).tolist()
        share = self.seconds / max(self.capacity, 1)
        found: list[Outcome | None] = []
        for counts, slow, new, start, cause in zip(
            alternates.tolist(),
            self.slow[places].tolist(),
            renewed.tolist(),
            self.start[places].tolist(),
            causes,
            strict=True,
        ):
            if not counts:
                found.append(None)
                continue
            size = state.runs.shape.bytes * state.shape.devices if start >= 0 else 0
            outcome = Outcome(not slow, CAUSES[cause] if new else None, share if new else 0.0, size)
            state.totals["slow_steps" if slow else "fast_steps"] += 1
            if new:
                state.totals[f"{outcome.cause}_refreshes"] += 1
            found.append(outcome)
        self._mix({outcome.fast for outcome in found if outcome is not None})
        return found

    def _mix(self, kinds: set[bool]) -> None:
        """Count the step once as one in which some requests are slow and others fast."""
        before = len(self.kinds) > 1
        self.kinds |= kinds
        self.state.totals["mixed_steps"] += len(self.kinds) > 1 and not before


class Ahead(Step):
    """A step whose last tokens the device has and the host has not.

    Whether such a token is a trigger is all that is unknown of the step: there are two plans, this one for requests
    whose tokens are triggers and ``otherwise`` for the others, and the device takes of each request the one that
    its token asks for. Rows that are slow in the latter are slow here too: the evidence of a row has one place.

    Call :meth:`look` before the first layer, and :meth:`resolve` when the tokens are known.

    Attributes:
        otherwise: the step in which no token that is not known yet is a trigger.
        crossed: [requests] bool on the device, whose token is a trigger; crossed_places: [capacity], the same of
            the requests that may have evidence, by its row.
    """

    crossed: torch.Tensor
    crossed_places: torch.Tensor

    def __init__(self, state: "SlowFast", entries: Sequence[Entry], segments: np.ndarray) -> None:
        """
        Args:
            entries: nothing is drafted behind any of them.
        """
        rows = np.array([entry.row for entry in entries])
        self.ahead = np.array([entry.ahead for entry in entries])
        self.first = np.array([entry.ahead and not entry.tokens for entry in entries])
        now = Phase(state.phases.slow(rows), state.phases.stale(rows))
        slow, stale = state.phases.ahead(rows, state.refreshed[rows])
        otherwise, crossed = (
            Phase(np.where(self.ahead, each, now.slow), np.where(self.ahead, stale, now.stale))
            for each in slow
        )
        super().__init__(state, entries, segments, crossed)
        self.otherwise = Step(state, entries, segments, otherwise, like=self)
        self._taken: dict[int, SfiStep] = {}

    def look(self, tokens: torch.Tensor) -> None:
        """Let the device see which plan each request asks for.

        Args:
            tokens: [requests] int64 on the device, the token that each reads.
        """
        owner = np.zeros(self.capacity, np.int64)
        owner[self.evidence[self.evidence >= 0]] = np.flatnonzero(self.evidence >= 0)
        self.crossed = self.state.triggers[tokens]
        self.crossed_places = self.crossed[send(owner, tokens.device)]

    def of_rows(self, crossed: torch.Tensor, otherwise: torch.Tensor) -> torch.Tensor:
        """Of two plans [..., requests, fields] on the device each request's own."""
        return torch.where(self.crossed.unsqueeze(1), crossed, otherwise)

    def of_places(self, crossed: torch.Tensor, otherwise: torch.Tensor) -> torch.Tensor:
        """The same of what is renewed, [..., capacity]."""
        return torch.where(self.crossed_places, crossed, otherwise)

    def span_step(self, layer: int, view: SpanView, there: DeviceView | None = None) -> SpanStep:
        span = layer // self.state.shape.span
        if span not in self.spans:
            planned, otherwise = self.plan(span, view, there), self.otherwise.plan(span, view, there)
            if id(planned) not in self._taken:
                self._taken[id(planned)] = self._take(planned, otherwise)
            # Who is slow in one of the plans is slow in this one: its table has what both of them read.
            table = self._table(planned, view) if there is None else there.table
            self.spans[span] = SpanStep(self._taken[id(planned)], table, planned.width)
        return self.spans[span]

    def _take(self, planned: Planned, otherwise: Planned) -> SfiStep:
        """What the device takes of two plans; on it."""
        one, other = (each.on(self.state.shape.device) for each in (planned, otherwise))
        packed = self.of_rows(one.plan.packed, other.plan.packed)
        refresh = one.refresh
        if self.capacity:
            refresh = RefreshBatch(self.of_places(one.refresh.packed, other.refresh.packed))
        return SfiStep(SegmentPlan(packed, one.plan.kv_heads), one.refreshed, one.held, refresh)

    def finish(self) -> list[Outcome | Later | None]:
        state = self.state
        state.refresh_seconds += self.seconds
        self.otherwise.seconds = self.seconds
        known = np.flatnonzero(~self.ahead)
        found: list[Outcome | Later | None] = [None] * len(self)
        for place, outcome in zip(known.tolist(), self.note(known), strict=True):
            found[place] = outcome
        for place in np.flatnonzero(self.ahead).tolist():
            found[place] = later = Later()
            state.pending[int(self.rows[place])] = self, place, later
        return found

    def resolve(self, places: np.ndarray, tokens: np.ndarray) -> list[Outcome | None]:
        """Take note of what the step was for requests whose tokens are known now.

        Args:
            places: of the requests in the step; tokens: the id that each read in it.
        """
        phases, rows, first = self.state.phases, self.rows[places], self.first[places]
        if first.any():
            phases.admit(rows[first], tokens[first])
        old = rows[~first]
        if len(old):
            phases.advance(old, self.state.refreshed[old], tokens[~first])
        crossed = phases.triggers(tokens)
        found: list[Outcome | None] = [None] * len(places)
        for step, own in ((self, crossed), (self.otherwise, ~crossed)):
            for place, outcome in zip(np.flatnonzero(own).tolist(), step.note(places[own]), strict=True):
                found[place] = outcome
        return found
