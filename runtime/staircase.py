"""The staircase: run spans of layers over a batch whose requests go on with fewer and fewer tokens.

Between two spans the rows that a request's plan drops are taken out of the batch. Which requests are dense and
which are not makes no difference to the code: a plan without steps keeps every row. Rows of which nobody reads the
hidden state any more, at the last layer or below a narrowing, leave one layer earlier: of them that layer computes
keys and values alone.
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


def left_of(rows: Rows, stay: np.ndarray) -> Rows:
    """The rows in ``stay``, as the layer sees them whose other rows are keys and values alone.

    Token 0, where those behind it have gone, stands apart from the rest as an anchor does that is computed again.
    """
    request, position = rows.request[stay], rows.position[stay]
    apart = (position[:-1] == 0) & (position[1:] > 1) & (request[:-1] == request[1:])
    return Rows(request, position, rows.again[stay] | np.append(apart, False), rows.ghost[stay])


Selector = Callable[[int, Step, np.ndarray], Choice]
"""Decides a SCORED step: (index of the request, step, positions of its rows)."""


class Host(Protocol):
    """What the staircase needs from the engine."""

    def run(self, rows: Rows, low: int, high: int) -> None:
        """Compute layers ``low .. high - 1`` of these rows; the hidden states stay with the host."""

    def pays(self, rows: int, stay: int) -> bool:
        """Whether it is worth a second look at a layer to compute only ``stay`` of ``rows`` rows whole."""

    def end(self, rows: Rows, low: int, high: int, stay: np.ndarray) -> None:
        """Compute layers ``low .. high - 1``; at the last of them only the rows in ``stay`` ([kept] int64,
        ascending), whose hidden states stay with the host, and of all others keys and values."""

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
    host: Host,
    works: Sequence[Work],
    rows: Rows,
    selectors: Mapping[str, Selector] | None = None,
    wanted: np.ndarray | None = None,
) -> Rows | None:
    """Run all layers.

    Args:
        works: one per request of the batch, all for the same model.
        rows: of :func:`first_rows`.
        selectors: by mechanism, for plans with SCORED steps.
        wanted: [requests] position from which on logits are read; by default those of the last prompt token, of
            what was generated, and of each request's last row.

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
        stay, ghost = _going_on(works, rows, high, selectors or {}, wanted)
        if not host.pays(len(rows), int(stay.sum())):
            host.run(rows, low, high)
            continue
        ended = high < layers and ghost[stay].all()
        host.end(rows, low, high, np.zeros(0, np.int64) if ended else np.flatnonzero(stay))
        if ended:
            return None
        rows = Rows(rows.request[stay], rows.position[stay], rows.again[stay], ghost[stay])
    return rows


def _going_on(
    works: Sequence[Work],
    rows: Rows,
    layer: int,
    selectors: Mapping[str, Selector],
    wanted: np.ndarray | None,
) -> tuple[np.ndarray, np.ndarray]:
    """Rows whose hidden state is read at ``layer``, as far as that is known before the layer below it has run, and
    which of them are ghosts from there on: [rows] bool each.
    """
    if layer < works[0].plan.layers:
        if any(step.layer == layer and step.kind == SCORED for work in works for step in work.plan.steps):
            return np.ones(len(rows), bool), rows.ghost
        stay, ghost, _ = _narrow(works, rows, layer, selectors)
        return stay, ghost
    if wanted is None:
        wanted = np.array([work.prompt_tokens - 1 for work in works])
    stay = (rows.position >= wanted[rows.request]) & ~rows.again
    stay[np.append(np.flatnonzero(np.diff(rows.request)), len(rows) - 1)] = True
    return stay, rows.ghost


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
