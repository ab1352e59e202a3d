"""The staircase: run spans of layers over a batch whose requests go on with fewer and fewer tokens.

Between two spans the rows that a request's plan drops are taken out of the batch. Which requests are dense and
which are not makes no difference to the code: a plan without steps keeps every row.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from fathom.runtime.plan import SCORED, PlanError, PrefillPlan, Step, fixed_rows


@dataclass(frozen=True)
class Work:
    """What one request brings to an engine step: the tokens ``begin .. end - 1``.

    Attributes:
        prompt_tokens: length of its prompt; tokens from there on were generated.
    """

    plan: PrefillPlan
    begin: int
    end: int
    prompt_tokens: int


@dataclass(frozen=True)
class Rows:
    """The rows that are computed, request after request, in the order of positions.

    Attributes:
        request: [rows] index into the batch.
        position: [rows] position in the request.
        again: [rows] whether this is token 0, computed again because it is needed above a narrowing and its
            hidden state is not there any more.
        ghost: [rows] whether the row is kept only because every request needs one for its logits, which nobody
            reads.
    """

    request: np.ndarray
    position: np.ndarray
    again: np.ndarray
    ghost: np.ndarray

    def __len__(self) -> int:
        return len(self.request)


@dataclass(frozen=True)
class Choice:
    """Which tokens of a request go on above a SCORED step.

    Attributes:
        stay: [rows] bool, of the rows that are there.
        earlier: positions, ascending, of tokens of earlier chunks that go on too; the host has kept their states.
    """

    stay: np.ndarray
    earlier: np.ndarray


Selector = Callable[[int, Step, np.ndarray], Choice]
"""Decides a SCORED step: (index of the request, step, positions of its rows)."""


class Host(Protocol):
    """What the staircase needs from the engine."""

    def run(self, rows: Rows, low: int, high: int) -> None:
        """Compute layers ``low .. high - 1`` of these rows; the hidden states stay with the host."""

    def keep(self, rows: Rows, index: np.ndarray) -> None:
        """Drop the hidden states of all rows of ``rows`` but those in ``index`` ([kept] int64, ascending)."""

    def recall(self, earlier: Mapping[int, np.ndarray], order: np.ndarray) -> None:
        """Append the states of earlier tokens, request after request, then bring all rows into ``order``."""


def first_rows(works: Sequence[Work], entering: Mapping[int, np.ndarray] | None = None) -> Rows:
    """The rows of a step at layer 0: each request's new tokens, after an anchor that has to be computed again.

    Args:
        entering: by index of the request, for plans with a step at layer 0: the positions [rows] that enter
            instead of its new tokens. A request of which none enters yet has one ghost row.
    """
    parts = [_entering(work, (entering or {}).get(index)) for index, work in enumerate(works)]
    request = [np.full(len(position), index) for index, (position, _, _) in enumerate(parts)]
    return Rows(np.concatenate(request), *(np.concatenate(column) for column in zip(*parts, strict=True)))


def _entering(work: Work, chosen: np.ndarray | None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Positions of a request's first rows, and which are an anchor again or a ghost."""
    positions = np.arange(work.begin, work.end) if chosen is None else chosen
    if len(positions) == 0:
        return np.array([work.end - 1]), np.zeros(1, bool), np.ones(1, bool)
    holds_last = positions[0] < work.prompt_tokens <= positions[-1] + 1
    anchor = holds_last and positions[0] > 0 and any(step.anchor for step in work.plan.steps)
    # A propagation keeps the states of earlier tokens, and the anchor's among them.
    anchor &= work.plan.propagation is None
    if anchor:
        positions = np.concatenate([[0], positions])
    return positions, np.arange(len(positions)) < anchor, np.zeros(len(positions), bool)


def climb(
    host: Host, works: Sequence[Work], rows: Rows, selectors: Mapping[str, Selector] | None = None
) -> Rows | None:
    """Run all layers.

    Args:
        works: one per request of the batch, all for the same model.
        rows: of :func:`first_rows`.
        selectors: by mechanism, for plans with SCORED steps.

    Returns:
        The rows that reached the last layer, at least one per request; None when no row of any request goes on
        above some layer, so that the layers above were not run.
    """
    layers = works[0].plan.layers
    edges = {step.layer for work in works for step in work.plan.steps} | {0, layers}
    for low, high in itertools.pairwise(sorted(edges)):
        keep, ghost, earlier = _narrow(works, rows, low, selectors or {})
        if not keep.all():
            host.keep(rows, np.flatnonzero(keep))
        rows = Rows(rows.request[keep], rows.position[keep], rows.again[keep], ghost[keep])
        if earlier:
            rows = _recall(host, rows, earlier)
        if rows.ghost.all():
            return None
        host.run(rows, low, high)
    return rows


def _recall(host: Host, rows: Rows, earlier: Mapping[int, np.ndarray]) -> Rows:
    """The rows with tokens of earlier chunks among them."""
    request = [np.full(len(positions), index) for index, positions in earlier.items()]
    request = np.concatenate([rows.request, *request])
    position = np.concatenate([rows.position, *earlier.values()])
    order = np.lexsort((position, request))
    host.recall(earlier, order)
    none = np.zeros(len(order) - len(rows), bool)
    again, ghost = np.concatenate([rows.again, none]), np.concatenate([rows.ghost, none])
    return Rows(request[order], position[order], again[order], ghost[order])


def _narrow(
    works: Sequence[Work], rows: Rows, layer: int, selectors: Mapping[str, Selector]
) -> tuple[np.ndarray, np.ndarray, dict[int, np.ndarray]]:
    """Which rows are computed from ``layer`` on, and which of them as ghosts: [rows] bool each; and by request the
    positions of earlier chunks that go on besides.

    Of a request none of whose rows goes on, the last one stays as a ghost.
    """
    keep, ghost = np.ones(len(rows), bool), rows.ghost.copy()
    earlier: dict[int, np.ndarray] = {}
    begin = np.searchsorted(rows.request, np.arange(len(works) + 1))
    for index, work in enumerate(works):
        mine, last = slice(begin[index], begin[index + 1]), begin[index + 1] - 1
        for step in work.plan.steps:
            if step.layer != layer or ghost[last]:
                continue
            if layer == 0 and step.mechanism not in selectors:
                continue  # decided when the rows were made
            choice = _decide(work, step, rows.position[mine], index, selectors)
            keep[mine] = choice.stay
            if len(choice.earlier):
                earlier[index] = choice.earlier
            if not keep[mine].any():
                keep[last] = ghost[last] = True
            assert keep[last], "the last row goes on, or none does"
    return keep, ghost, earlier


def _decide(
    work: Work, step: Step, position: np.ndarray, index: int, selectors: Mapping[str, Selector]
) -> Choice:
    if step.kind == SCORED:
        if step.mechanism not in selectors:
            raise PlanError(f"nobody decides which tokens {step.mechanism} keeps")
        return selectors[step.mechanism](index, step, position)
    anchor, first = fixed_rows(step, work.begin, work.end, work.prompt_tokens)
    return Choice((position >= first) | ((position == 0) & anchor), np.zeros(0, np.int64))
