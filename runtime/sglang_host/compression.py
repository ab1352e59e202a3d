"""FastKV in the engine: what a prompt's last tokens attend to decides which tokens go on, and which entries stay.

The scores are taken while the layers run, from the rotated queries of the prompt's last tokens and the keys in the
pool, once the last chunk is there. Each layer's kept entries are copied to where they stay before the next layer
runs; after the forward they take the place of the request's pages.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from fathom.kernels.compact_kv import compact_kv
from fathom.kernels.window_scores import pool_saliency, row_mean_scores, window_of
from fathom.runtime.fastkv.config import FastKVConfig
from fathom.runtime.fastkv.policies import RetentionContext, RetentionPolicy, load_policy
from fathom.runtime.fastkv.select import Sizes, propagated_tokens, retain
from fathom.runtime.fastkv.step import MECHANISM
from fathom.runtime.kv.memory import KvMemory
from fathom.runtime.plan import Step
from fathom.runtime.sglang_host.hidden_buffer import HiddenBuffer
from fathom.runtime.staircase import Choice, Rows, Work

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

Queries = dict[int, list[torch.Tensor]]
Hidden = Callable[[np.ndarray], tuple[torch.Tensor, torch.Tensor | None]]


class Compression:
    """What FastKV keeps from one chunk of a prompt to the next.

    Attributes:
        memory: pages and tables of the target.
        buffer: hidden states at the selection layer; None where no layer is one.
    """

    def __init__(self, memory: KvMemory, buffer: HiddenBuffer | None) -> None:
        self.memory, self.buffer = memory, buffer
        self.queries: dict[
            int, Queries
        ] = {}  # row -> layer -> rotated queries of window tokens, chunk by chunk
        memory.on_close.append(self.forget)

    def forget(self, row: int) -> None:
        """The request's prompt is complete, or the request is gone."""
        self.queries.pop(row, None)
        if self.buffer is not None:
            self.buffer.drop(row)


@dataclass
class Job:
    """One request whose prompt is still being computed in this step.

    Attributes:
        index: its place in the batch; row: the engine's request row.
        entered: [M] positions that entered the model.
        virtual: virtual slots of the prompt's tokens.
        final: whether this step completes the prompt.
        policy: ranks the entries; None where all are kept.
        compacted: spans in which entries are dropped.
        window_rows: rows of the packed query that are window tokens, in the layers that run now.
        selected: positions that go on above the selection layer, once that is known.
        slots: by span, where the entries of the prompt are.
    """

    index: int
    row: int
    work: Work
    entered: np.ndarray
    virtual: np.ndarray
    final: bool
    seed: int
    policy: RetentionPolicy | None
    compacted: range
    window_rows: torch.Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    selected: np.ndarray | None = None
    slots: dict[int, torch.Tensor] = field(default_factory=dict)

    @property
    def window(self) -> int:
        plan = self.work.plan
        return plan.retention.window if plan.retention else plan.propagation.window  # type: ignore[union-attr]

    def present(self, layer: int) -> np.ndarray:
        """Positions that a layer (counted from 0) sees."""
        step = self.work.plan.propagation
        if step is None or layer < step.layer:
            return self.entered
        assert self.selected is not None
        return self.selected

    def scored(self, layer: int, span: int) -> bool:
        """Whether the window's attention is needed at a layer."""
        step = self.work.plan.propagation
        ranked = self.policy is not None and self.policy.needs_saliency and layer // span in self.compacted
        return ranked or (step is not None and layer == step.layer - 1)


class CompressionStep:
    """FastKV's part of one forward; the engine's forward calls it before, between and after its spans."""

    def __init__(
        self,
        side: Compression,
        works: Sequence[Work],
        requests: Sequence["Req"],
        span: int,
        entered: Callable[["Req"], np.ndarray | None] = lambda _: None,
    ) -> None:
        """
        Args:
            span: layers per span.
            entered: positions of a request's prompt that enter the model, ascending; None for all.
        """
        self.side, self.memory, self.span = side, side.memory, span
        self.jobs: dict[int, Job] = {}
        for index, (work, request) in enumerate(zip(works, requests, strict=True)):
            compacted = work.plan.compacted_spans(work.prompt_tokens)
            if work.begin >= work.prompt_tokens or not (compacted or work.plan.propagation):
                continue
            final = work.end >= work.prompt_tokens
            chosen = entered(request) if final else None
            rule = work.plan.retention
            self.jobs[index] = Job(
                index,
                request.kv.req_pool_idx,
                work,
                np.arange(work.prompt_tokens) if chosen is None else chosen,
                np.zeros(0, np.int64),
                final,
                request.sampling_params.sampling_seed or 0,
                load_policy(rule.policy) if compacted and rule is not None else None,
                compacted,
            )

    # --- before and between spans ---

    def start(self, rows: Rows, low: int, lengths: np.ndarray, virtual: np.ndarray) -> None:
        """The spans from layer ``low`` on are about to run.

        Args:
            rows: what is computed.
            lengths: [requests] tokens of each request; virtual: [sum of lengths] virtual slots.
        """
        begin = np.concatenate([[0], np.cumsum(lengths)])
        self.rows = rows
        for job in self.jobs.values():
            prompt = job.work.prompt_tokens
            job.virtual = virtual[begin[job.index] : begin[job.index] + prompt]
            mine = (rows.request == job.index) & ~rows.ghost & ~rows.again
            first = job.entered[max(len(job.entered) - job.window, 0)]
            window = mine & (rows.position >= first) & (rows.position < prompt)
            job.window_rows = torch.from_numpy(np.flatnonzero(window))
            if job.final and low == 0:
                self._fit(job)

    def _fit(self, job: Job) -> None:
        """Give back room that was taken for more tokens than have entered."""
        plan, prompt = job.work.plan, job.work.prompt_tokens
        after = job.work.end - prompt
        for span in job.compacted:
            present = min(plan.present_tokens(span, prompt), len(job.entered))
            kept = min(self._sizes(job, present).budget(plan.retention.rate), present)  # type: ignore[union-attr]
            self.memory.retained.truncate(job.row, span, kept + after)

    def _sizes(self, job: Job, present: int) -> Sizes:
        return Sizes(len(job.entered), present, job.window)

    def choose(self, index: int, step: Step, position: np.ndarray, hidden: Hidden) -> Choice:
        """FastKV's decision for the rows of one request at its selection layer.

        Args:
            position: [rows] their positions.
            hidden: gives the hidden states of some rows of the batch.
        """
        job = self.jobs.get(index)
        nothing = np.zeros(0, np.int64)
        if job is None:
            return Choice(np.ones(len(position), bool), nothing)
        if not job.final:
            assert self.side.buffer is not None
            mine = np.flatnonzero(self.rows.request == index)
            self.side.buffer.put(job.row, position, *hidden(mine))
            return Choice(np.zeros(len(position), bool), nothing)
        assert job.selected is not None, "the prompt has ended and nobody chose from it"
        stay = np.isin(position, job.selected) | (position >= job.work.prompt_tokens)
        return Choice(stay, np.setdiff1d(job.selected, position))

    def recall(self, earlier: Mapping[int, np.ndarray]) -> Iterable[tuple[torch.Tensor, torch.Tensor | None]]:
        """Hidden states of earlier chunks, request after request."""
        for index, positions in earlier.items():
            assert self.side.buffer is not None
            yield self.side.buffer.get(self.jobs[index].row, positions)

    # --- while a layer runs ---

    def tap(
        self,
        layer: int,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        scale: float,
    ) -> None:
        """A layer's keys are in the pool and nothing has been read yet.

        Args:
            query: [rows, heads, head_dim] after rotary embedding; keys, values: the pool's, of this layer.
        """
        for job in self.jobs.values():
            mean = None
            if job.scored(layer, self.span):
                mean = self._window_mean(job, layer, query, keys, scale)
            if not job.final:
                continue
            step = job.work.plan.propagation
            if step is not None and layer == step.layer - 1:
                assert mean is not None
                self._select(job, step, mean)
            if layer // self.span in job.compacted:
                self._compact(job, layer, mean, keys, values)

    def _window_mean(
        self, job: Job, layer: int, query: torch.Tensor, keys: torch.Tensor, scale: float
    ) -> torch.Tensor | None:
        """[heads, present] attention of the window, or None while it is not complete."""
        rows = query[job.window_rows.to(query.device)]
        if not job.final:
            if len(rows):
                self.side.queries.setdefault(job.row, {}).setdefault(layer, []).append(rows.clone())
            return None
        earlier = self.side.queries.get(job.row, {}).get(layer, [])
        window = torch.cat([*earlier, rows])
        slots = self._slots(job, layer)
        view = window_of([len(window)], [len(slots)], slots.view(1, -1), causal=True)
        return row_mean_scores(window, keys, view, scale)[0]

    def _slots(self, job: Job, layer: int) -> torch.Tensor:
        """[present] slots of the prompt's entries at a layer."""
        span = layer // self.span
        if span not in job.slots:
            if span < self.memory.tables.first_private(job.row):
                slots = self.memory.shared.slots(span, job.virtual)
            else:
                slots = self.memory.tables.slots(job.row, span, 0, len(job.present(layer)))
            job.slots[span] = torch.from_numpy(slots.astype(np.int64))
        return job.slots[span]

    def _select(self, job: Job, step: Step, mean: torch.Tensor) -> None:
        sizes = self._sizes(job, len(job.entered))
        saliency = pool_saliency(mean, sizes.ranked, 1, FastKVConfig.pool)
        forced = torch.zeros(1, dtype=torch.int64) if job.work.plan.anchored_above(step.layer) else None
        kept = propagated_tokens(saliency, sizes, step.rate, forced)
        job.selected = job.entered[kept.cpu().numpy()]

    def _compact(
        self, job: Job, layer: int, mean: torch.Tensor | None, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        rule = job.work.plan.retention
        assert rule is not None and job.policy is not None
        slots, present = self._slots(job, layer), job.present(layer)
        sizes = self._sizes(job, len(present))
        saliency = None
        if mean is not None and job.policy.needs_saliency:
            saliency = pool_saliency(mean, sizes.ranked, keys.shape[1], rule.pool)
        positions = torch.from_numpy(present[: sizes.ranked].astype(np.int64)).to(keys.device)
        context = RetentionContext(positions, keys.shape[1], layer, job.seed, saliency)
        kept = retain(job.policy, context, sizes, rule.rate)
        target = self.memory.retained.slots(job.row, layer // self.span, 0, kept.shape[1])
        compact_kv(keys, values, slots[kept], torch.from_numpy(target), disjoint=True)

    # --- after the forward ---

    def finish(self) -> list[int]:
        """The prompts of this step are complete; the indices of those that :meth:`settle` is to be called for."""
        done = []
        for job in self.jobs.values():
            if not job.final:
                continue
            self.side.forget(job.row)
            if job.compacted:
                done.append(job.index)
        return done

    def settle(self, index: int) -> None:
        """The kept entries of one request's prompt are all it holds from now on."""
        self.memory.settle(self.jobs[index].row)


def selectors(step: CompressionStep, hidden: Hidden) -> dict[str, Callable[[int, Step, np.ndarray], Choice]]:
    """For ``staircase.climb``."""
    return {MECHANISM: lambda index, rule, position: step.choose(index, rule, position, hidden)}
