"""PrefillPlan: which prompt tokens are computed at which layer, as data.

A prompt of N tokens and a model of L layers give a chain of token sets ``E_1 ⊇ E_2 ⊇ … ⊇ E_L``. Each mechanism
adds at most one :class:`Step`, which narrows the chain from one layer on. Everything else (how far the prefix
cache reaches, what a request costs, where the engine stops to drop rows) follows from the plan. Layers are
counted from 0 here: a cutoff K of the papers is a step at ``layer=K``, the first layer that sees the smaller
set.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

FIXED, SCORED = "fixed", "scored"


class PlanError(ValueError):
    """A plan that no engine step can run. The message names the nearest legal values."""


@dataclass(frozen=True)
class Step:
    """From ``layer`` on, a smaller set of prompt tokens is computed.

    Attributes:
        layer: first layer (from 0) that sees the smaller set; a span boundary.
        mechanism: who asked for it.
        kind: FIXED when the prompt's length alone decides who stays (SPEED); SCORED when a selector decides
            once the whole prompt has been seen (SpecPrefill, FastKV).
        anchor: whether token 0 stays.
        rate: SCORED only: share of the units of the set below that stays, forced ones included.
        unit: SCORED only: tokens that stay or go together (SpecPrefill's chunk).
        window: SCORED only: the last tokens of the prompt that always stay.
        kept: SCORED only: the most prompt tokens that stay, where that is known before they are scored.
    """

    layer: int
    mechanism: str
    kind: str = FIXED
    anchor: bool = True
    rate: float = 0.0
    unit: int = 1
    window: int = 1
    kept: int = 0

    def most_kept(self, tokens: int) -> int:
        """The most of ``tokens`` prompt tokens that go on above this step."""
        if self.kind == FIXED:
            return min(tokens, 2 if self.anchor else 1)
        if self.kept:
            return min(tokens, self.kept)
        units = -(-tokens // self.unit)
        kept = max(math.ceil(self.rate * units), -(-self.window // self.unit))
        return min(tokens, kept * self.unit)


@dataclass(frozen=True)
class Retention:
    """Which of its prompt KV entries each KV head keeps once the prompt is complete.

    Attributes:
        rate: share of the tokens that entered the model, in (0, 1].
        budget: that share in tokens, the window included.
        window: the last tokens that entered the model: their queries judge the others, and they stay.
        pool: width of the max-pooling of the scores, tokens.
        policy: name of the rule that ranks the entries.
    """

    rate: float
    budget: int
    window: int
    pool: int
    policy: str


@dataclass(frozen=True)
class PrefillPlan:
    """What one request computes in prefill, and what stays of it.

    Attributes:
        layers: layers L of the model.
        span: layers G that share one page table; divides L.
        steps: in the order of their layers; no two at the same layer.
        retention: what is kept after prefill; None for everything.

    Raises:
        PlanError: for a step off the span boundaries, out of range or out of order.
    """

    layers: int
    span: int
    steps: tuple[Step, ...] = ()
    retention: Retention | None = None

    def __post_init__(self) -> None:
        if self.span < 1 or self.layers % self.span:
            raise PlanError(f"a span of {self.span} layers does not divide {self.layers} layers")
        below = -1
        for step in self.steps:
            if step.layer % self.span or not 0 <= step.layer < self.layers:
                near = ", ".join(map(str, nearest_boundaries(step.layer, self.layers, self.span)))
                message = f"{step.mechanism} narrows at layer {step.layer}, which is no span boundary"
                raise PlanError(f"{message}; nearest legal: {near}")
            if step.layer <= below:
                raise PlanError(
                    f"{step.mechanism} narrows at layer {step.layer}, at or below an earlier step"
                )
            below = step.layer

    @property
    def spans(self) -> int:
        """Page tables per request."""
        return self.layers // self.span

    @property
    def dense(self) -> bool:
        """Whether every token is computed and kept at every layer."""
        return not self.steps and self.retention is None

    @property
    def shared_spans(self) -> int:
        """Spans below the first step: their KV depends on nothing but the tokens before, so it may be shared."""
        return self.steps[0].layer // self.span if self.steps else self.spans

    def step_of_span(self, span: int) -> Step | None:
        """The step that decides which tokens a span holds; None below the first."""
        found = [step for step in self.steps if step.layer <= span * self.span]
        return found[-1] if found else None

    @property
    def propagation(self) -> Step | None:
        """The SCORED step that waits for the whole prompt with hidden states in hand; None where there is none."""
        found = [step for step in self.steps if step.kind == SCORED and step.layer > 0]
        return found[0] if found else None

    @property
    def window(self) -> int:
        """The last prompt tokens that every step and the retention need: what judges the others."""
        kept = 1 if self.retention is None else self.retention.window
        return max(kept, *(step.window for step in self.steps if step.layer > 0), 1)

    def present_tokens(self, span: int, prompt_tokens: int) -> int:
        """Prompt tokens that a span holds after prefill; above a SCORED step, the most that it can hold."""
        return tokens_per_span(self, prompt_tokens)[span]

    def retained_tokens(self, span: int, prompt_tokens: int) -> int:
        """Prompt entries (at most, as above) that a span holds per KV head after prefill."""
        present = self.present_tokens(span, prompt_tokens)
        return present if self.retention is None else min(self.retention.budget, present)

    def compacted_spans(self, prompt_tokens: int) -> range:
        """The spans, from the bottom up, in which retention drops entries."""
        spans = 0
        while spans < self.spans and self.retained_tokens(spans, prompt_tokens) < self.present_tokens(
            spans, prompt_tokens
        ):
            spans += 1
        return range(spans)

    def reusable_tokens(self, prompt_tokens: int) -> int:
        """Most prompt tokens that a hit in the prefix cache may spare.

        There is nothing but KV in it: a propagation needs every hidden state at its layer besides, retention the
        queries of the window.
        """
        if self.steps and self.steps[0] is self.propagation:
            return 0
        return max(prompt_tokens - (1 if self.steps and self.steps[0].layer == 0 else self.window), 0)

    def anchored_above(self, layer: int) -> bool:
        """Whether token 0 is needed at some layer >= ``layer``: a selection below must keep it."""
        return any(step.anchor for step in self.steps if step.layer >= layer)


Builder = Callable[[Mapping[str, Any], int], Step | None]


def build(
    policy: Mapping[str, Any],
    layers: int,
    span: int,
    builders: Sequence[Builder] = (),
    retention: Retention | None = None,
) -> PrefillPlan:
    """The plan of a policy.

    Args:
        policy: the policy's fields (``Policy.to_wire()``); empty for the engine's own requests.
        builders: one function per mechanism: its step for (policy, layers), or None. SPEED's is built in.
        retention: what is kept after prefill.

    Raises:
        PlanError: for a combination whose steps contradict each other.
    """
    steps = [step for make in (speed_step, *builders) if (step := make(policy, layers)) is not None]
    return PrefillPlan(layers, span, tuple(sorted(steps, key=lambda step: step.layer)), retention)


def speed_step(policy: Mapping[str, Any], layers: int) -> Step | None:
    """SPEED (Table 1): above layer K only the anchors, the last prompt token and generated tokens exist."""
    cutoff = policy.get("depth_cutoff", "full")
    if cutoff in ("full", layers):
        return None
    return Step(int(cutoff), "SPEED", anchor=policy.get("anchors", "bos") == "bos")


def nearest_boundaries(layer: int, layers: int, span: int) -> list[int]:
    """The legal cutoffs around ``layer``: multiples of ``span`` from ``span`` to ``layers``."""
    below = layer // span * span
    return [value for value in (below, below + span) if span <= value <= layers] or [span]


def default_span(layers: int) -> int:
    """The largest span that has a boundary at 3/4 of the layers (SPEED's K = 24 of 32) and, if possible, at
    1/2.

    A boundary counts as being there when it is the nearest legal one and no further off than half a layer or
    1/32 of the layers. A span of one layer is the last resort.
    """
    allowed = max(0.5, layers / 32)

    def has(span: int, share: float) -> bool:
        target = share * layers
        return abs(round(target / span) * span - target) <= allowed and span < layers

    divisors = [span for span in range(layers, 0, -1) if layers % span == 0]
    both = [span for span in divisors if has(span, 0.75) and has(span, 0.5)]
    three_quarters = [span for span in divisors if has(span, 0.75)]
    return next(iter([span for span in both if span > 1] or three_quarters), 1)


def choose_span(layers: int, asked: int | None) -> int:
    """Layers per span: what the operator asked for, or the model's default.

    Raises:
        PlanError: when the operator's choice does not divide the layers.
    """
    if asked is None:
        return default_span(layers)
    if asked < 1 or layers % asked:
        legal = ", ".join(str(span) for span in range(1, layers + 1) if layers % span == 0)
        raise PlanError(f"--depth-span {asked} does not divide the model's {layers} layers; legal: {legal}")
    return asked


TSP_SHARE = 0.5
"""FastKV's selection layer as a share of the layers. Section 5.1 counts from 0: all tokens are computed up to its
layers 15 of 32 and 17 of 36, which with a fifth of them above makes the 60 % of the prefill that it gives."""


def choose_tsp_layer(layers: int, span: int, asked: int | None) -> int | None:
    """Layers below FastKV's selection: what the operator asked for, or the span boundary nearest to L / 2.

    Returns:
        A multiple of ``span`` in ``[span, layers - span]``; None where there is no such layer.

    Raises:
        PlanError: when the operator's choice is none, with the nearest legal ones.
    """
    legal = range(span, layers, span)
    if asked is None:
        return min(legal, key=lambda layer: abs(layer - TSP_SHARE * layers), default=None)
    if asked not in legal:
        near = sorted(sorted(legal, key=lambda layer: abs(layer - asked))[:2])
        message = f"--tsp-layer {asked} is not a multiple of {span} layers below {layers}"
        raise PlanError(f"{message}; nearest: {', '.join(map(str, near)) or 'none'}")
    return asked


def fixed_rows(step: Step, begin: int, end: int, prompt_tokens: int) -> tuple[bool, int]:
    """What of the new tokens ``begin .. end - 1`` goes on above a FIXED step.

    The last prompt token is the first decode-side token, so everything from it on goes on. The anchor goes
    with the
    chunk that holds the last prompt token, whatever chunk token 0 itself was in: no state waits between
    chunks, and a prefix hit, a chunk and a restart after a retraction are one case.

    Returns:
        Whether the anchor goes on with this chunk besides these tokens, and the first position that goes on
        (``end`` for none). The anchor is False where position 0 is itself the last prompt token.
    """
    last = prompt_tokens - 1
    first = min(max(begin, last), end)
    anchor = step.anchor and begin <= last < end and last > 0
    return anchor, first


def deep_tokens(step: Step, length: int, prompt_tokens: int) -> int:
    """Entries that a FIXED step's spans hold once the request's first ``length`` tokens have been computed."""
    if length < prompt_tokens:
        return 0
    return length - prompt_tokens + 1 + (1 if step.anchor and prompt_tokens > 1 else 0)


def tokens_per_span(plan: PrefillPlan, prompt_tokens: int) -> list[int]:
    """Prompt tokens that each span holds at the end of prefill; above a SCORED step, the most that it can hold."""
    counts, left = [], prompt_tokens
    starts = {step.layer // plan.span: step for step in plan.steps}
    for span in range(plan.spans):
        if span in starts:
            left = starts[span].most_kept(left)
        counts.append(left)
    return counts
