"""FastKV in the engine: what a prompt's last tokens attend to decides which tokens go on, and which entries stay.

The scores are taken while the layers run, from the rotated queries of the prompt's last tokens and the keys in the
pool, once the last chunk is there. Each layer's kept entries are copied to where they stay before the next layer
runs; after the forward they take the place of the request's pages.
"""

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from fathom.kernels.compact_kv import compact_kv
from fathom.kernels.dispatch import runs_triton
from fathom.kernels.window_scores import pool_saliency, row_mean_scores, window_of
from fathom.runtime.fastkv.config import FastKVConfig
from fathom.runtime.fastkv.policies import RetentionContext, RetentionPolicy, load_policy
from fathom.runtime.fastkv.select import Sizes, propagated_tokens, retain
from fathom.runtime.fastkv.step import MECHANISM, propagated_count
from fathom.runtime.kv.memory import KvMemory
from fathom.runtime.plan import Step
from fathom.runtime.retain import top_indices
from fathom.runtime.sglang_host.machine import devices
from fathom.runtime.sglang_host.memory.hidden_buffer import HiddenBuffer
from fathom.runtime.staging import send
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
        queries: by row and layer the rotated queries of window tokens, chunk by chunk.
    """

    def __init__(self, memory: KvMemory, buffer: HiddenBuffer | None) -> None:
        self.memory, self.buffer = memory, buffer
        self.queries: dict[int, Queries] = {}
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
        windowed: layers with a sliding window.
        window_rows: rows of the packed query that are window tokens, in the layers that run now.
        selected: positions that go on above the selection layer, once that is known.
        slots: by span, where the entries of the prompt are.
        present_in, kept_in: by span, tokens that are computed and entries that each KV head keeps.
        scoring_seconds: spent on the window's attention and the choices made from it, on the host's clock.
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
    windowed: frozenset[int] = frozenset()
    window_rows: torch.Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    selected: np.ndarray | None = None
    slots: dict[int, torch.Tensor] = field(default_factory=dict)
    present_in: list[int] = field(default_factory=list)
    kept_in: list[int] = field(default_factory=list)
    scoring_seconds: float = 0.0

    @property
    def window(self) -> int:
        return self.work.plan.window

    def present(self, layer: int) -> np.ndarray:
        """Positions that a layer (counted from 0) sees."""
        step = self.work.plan.propagation
        if step is None or layer < step.layer:
            return self.entered
        assert self.selected is not None
        return self.selected

    def selects(self, layer: int) -> bool:
        """Whether it is this layer's attention that decides which tokens go on above the selection layer: the last
        one below it that sees the whole prompt.
        """
        step = self.work.plan.propagation
        return step is not None and layer == judging_layer(step.layer, self.windowed)

    def scored(self, layer: int, span: int) -> bool:
        """Whether the window's attention is needed at a layer."""
        ranked = self.policy is not None and self.policy.needs_saliency and layer // span in self.compacted
        return (ranked and layer not in self.windowed) or self.selects(layer)


def judging_layer(tsp_layer: int, windowed: Collection[int]) -> int:
    """The layer whose attention selects what ``tsp_layer`` and those above it see; -1 where there is none."""
    return max((layer for layer in range(tsp_layer) if layer not in windowed), default=-1)


class CompressionStep:
    """FastKV's part of one forward; the engine's forward calls it before, between and after its spans."""

    def __init__(
        self,
        side: Compression,
        works: Sequence[Work],
        requests: Sequence["Req"],
        span: int,
        entered: Callable[["Req"], np.ndarray | None] = lambda _: None,
        windowed: frozenset[int] = frozenset(),
    ) -> None:
        """
        Args:
            span: layers per span.
            entered: positions of a request's prompt that enter the model, ascending; None for all.
            windowed: layers with a sliding window: they keep the last entries, and judge no others.
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
            job = self.jobs[index] = Job(
                index,
                request.kv.req_pool_idx,
                work,
                np.arange(work.prompt_tokens) if chosen is None else chosen,
                np.zeros(0, np.int64),
                final,
                request.sampling_params.sampling_seed or 0,
                load_policy(rule.policy) if compacted and rule is not None else None,
                compacted,
                windowed,
            )
            if final:
                job.present_in, job.kept_in = self.counts(job)
                self._fit(job)

    # --- before and between spans ---

    def start(self, rows: Rows, lengths: np.ndarray, virtual: np.ndarray) -> None:
        """Further spans are about to run.

        Args:
            rows: what they compute.
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

    def _fit(self, job: Job) -> None:
        """Give back room that was taken for more tokens than have entered."""
        plan, prompt = job.work.plan, job.work.prompt_tokens
        most = plan.steps[0].most_kept(prompt) if plan.steps and plan.steps[0].layer == 0 else prompt
        if len(job.entered) == most:
            return
        for span in range(plan.spans):
            step = plan.step_of_span(span)
            if step is plan.propagation and step is not None:
                length, spare = self.memory.tables.length(job.row, span), step.kept - job.present_in[span]
                self.memory.tables.truncate(job.row, span, length - spare)
            if span in job.compacted:
                self.memory.fit(job.row, span, job.kept_in[span])

    def counts(self, job: Job) -> tuple[list[int], list[int]]:
        """By span of a request whose whole prompt is there: tokens computed, and entries kept per KV head."""
        plan, rule, present = job.work.plan, job.work.plan.retention, []
        left = len(job.entered)
        starts = {step.layer // plan.span: step for step in plan.steps if step.layer > 0}
        for span in range(plan.spans):
            if (step := starts.get(span)) is None:
                pass
            elif step is plan.propagation:
                left = propagated_count(step.rate, step.window, left, plan.anchored_above(step.layer))
            else:
                left = step.most_kept(left)
            present.append(left)
        if rule is None:
            return present, present
        budget = self._sizes(job, len(job.entered)).budget(rule.rate)
        return present, [min(budget, count) for count in present]

    def _sizes(self, job: Job, present: int) -> Sizes:
        return Sizes(len(job.entered), present, job.window)

    def choose(self, index: int, position: np.ndarray, hidden: Hidden) -> Choice:
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
            self.wait(index, position, *hidden(np.flatnonzero(self.rows.request == index)))
            return Choice(np.zeros(len(position), bool), nothing)
        assert job.selected is not None, "the prompt has ended and nobody chose from it"
        stay = np.isin(position, job.selected) | (position >= job.work.prompt_tokens)
        return Choice(stay, np.setdiff1d(job.selected, position))

    def wait(
        self, index: int, positions: np.ndarray, hidden: torch.Tensor, residual: torch.Tensor | None
    ) -> None:
        """Keep hidden states at the selection layer until the whole prompt has been seen."""
        assert self.side.buffer is not None, "no plan propagates without a buffer"
        self.side.buffer.put(self.jobs[index].row, positions, hidden, residual)

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
            began = time.perf_counter()
            mean = self._window_mean(job, layer, query, keys, scale) if job.scored(layer, self.span) else None
            kept = None
            if job.final:
                if job.selects(layer):
                    assert mean is not None
                    self._select(job, mean)
                if layer // self.span in job.compacted:
                    kept = self._retained(job, layer, mean, keys)
            job.scoring_seconds += time.perf_counter() - began
            if kept is not None:
                target = self.memory.retained.slots(job.row, layer // self.span, 0, kept.shape[1])
                here = self._slots(job, layer, keys.device)[kept]
                compact_kv(keys, values, here, send(target, keys.device, torch.int64), disjoint=True)

    def _window_mean(
        self, job: Job, layer: int, query: torch.Tensor, keys: torch.Tensor, scale: float
    ) -> torch.Tensor | None:
        """[heads, present] attention of the window, or None while it is not complete."""
        rows = query[send(job.window_rows, query.device)]
        if not job.final:
            if len(rows):
                self.side.queries.setdefault(job.row, {}).setdefault(layer, []).append(rows.clone())
            return None
        earlier = self.side.queries.get(job.row, {}).get(layer, [])
        window = torch.cat([*earlier, rows])
        slots = self._slots(job, layer, keys.device)
        view = window_of([len(window)], [len(slots)], slots.view(1, -1), causal=True)
        return row_mean_scores(window, keys, view, scale)[0]

    def _slots(self, job: Job, layer: int, device: torch.device) -> torch.Tensor:
        """[present] slots of the prompt's entries at a layer, on the device."""
        span = layer // self.span
        if span not in job.slots:
            if span < self.memory.tables.first_private(job.row):
                slots = self.memory.shared.slots(span, job.virtual)
            else:
                slots = self.memory.tables.slots(job.row, span, 0, len(job.present(layer)))
            job.slots[span] = send(slots.astype(np.int64), device)
        return job.slots[span]

    def _select(self, job: Job, mean: torch.Tensor) -> None:
        step = job.work.plan.propagation
        assert step is not None
        sizes = self._sizes(job, len(job.entered))
        saliency = devices.mean(pool_saliency(mean, sizes.ranked, 1, FastKVConfig.pool))
        anchored = job.work.plan.anchored_above(step.layer)
        forced = torch.zeros(1, dtype=torch.int64) if anchored else None
        kept = propagated_tokens(saliency, sizes, step.rate, forced)
        job.selected = job.entered[kept.cpu().numpy()]
        self.memory.choose(job.row, step.layer // self.span, job.selected)

    def _retained(self, job: Job, layer: int, mean: torch.Tensor | None, keys: torch.Tensor) -> torch.Tensor:
        """[kv_heads, kept] indices, into what is present at a layer, of the entries that stay."""
        rule = job.work.plan.retention
        assert rule is not None and job.policy is not None
        present = job.present(layer)
        sizes = self._sizes(job, len(present))
        if layer in job.windowed:
            last = torch.arange(len(present) - job.kept_in[layer // self.span], len(present))
            return send(last, keys.device).expand(keys.shape[1], -1)
        saliency = None
        if mean is not None and job.policy.needs_saliency:
            saliency = pool_saliency(mean, sizes.ranked, keys.shape[1], rule.pool)
        positions = send(present[: sizes.ranked].astype(np.int64), keys.device)
        context = RetentionContext(positions, keys.shape[1], layer, job.seed, saliency)
        return retain(job.policy, context, sizes, rule.rate)

    # --- after the forward ---

    def finish(self) -> list[Job]:
        """The requests whose prompts this step has completed."""
        done = [job for job in self.jobs.values() if job.final]
        for job in done:
            self.side.forget(job.row)
        return done

    def settle(self, job: Job) -> None:
        """The kept entries of a request's prompt are all it holds from now on."""
        if job.compacted:
            self.memory.settle(job.row)


def selectors(step: CompressionStep, hidden: Hidden) -> dict[str, Callable[[int, Step, np.ndarray], Choice]]:
    """For ``staircase.climb``."""
    return {MECHANISM: lambda index, _, position: step.choose(index, position, hidden)}


def warm_up(keys: torch.Tensor, values: torch.Tensor, heads: int, dtype: torch.dtype) -> None:
    """Compile what chooses at the end of a prompt, so that no request waits for it (cached on disk).

    SpecPrefill chooses on the host, wherever its scores were taken; FastKV where the keys are. The other kernels of
    a CPU are compiled by its attention backend.

    Args:
        keys, values: a layer of the pool, which stays as it is; heads: of its queries, whose type is ``dtype``.
    """
    top_indices(torch.zeros(1, 2), 1)
    if not runs_triton(keys):
        return
    kv_heads, dim = keys.shape[1:]
    dummy = torch.zeros(kv_heads, 1, dtype=torch.int64, device=keys.device)
    query = torch.zeros(1, heads, dim, dtype=dtype, device=keys.device)
    row_mean_scores(query, keys, window_of([1], [1], dummy[:1], causal=True), 1.0)
    top_indices(torch.zeros(kv_heads, 2, device=keys.device), 1)
    compact_kv(keys, values, dummy, dummy[0], disjoint=True)
