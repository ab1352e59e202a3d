"""Decode steps that are launched one after the other, while the host knows none of the tokens between them.

Each step but the first is planned as if no token since had ended a sentence. When the tokens are known,
:meth:`Chain.settle` finds how far that was so: behind a token after which the request's step would have been
another one, what was computed for it counts for nothing, and its next step, a slow one, chooses anew.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np

from fathom.runtime.decode import SlowFast
from fathom.runtime.decode_step import Outcome, Step


@dataclass(frozen=True)
class Assumed(Sequence[int]):
    """Tokens of a request, and behind them some that nobody knows yet.

    Attributes:
        known: the first ones; unknown: how many others; token: id that stands for each of these.
    """

    known: Sequence[int]
    unknown: int
    token: int

    def __len__(self) -> int:
        return len(self.known) + self.unknown

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(len(self)))]
        place = range(len(self))[index]
        return self.known[place] if place < len(self.known) else self.token


class Chain:
    """The steps of one batch, in the order in which they were launched::

    for each step:
        step = state.begin(...)  # its unknown tokens as :meth:`tokens` has them
        ...  # its layers
        chain.add(step)
    chain.settle(...)
    """

    def __init__(self, state: SlowFast) -> None:
        self.state = state
        self.steps: list[Step] = []

    def tokens(self, known: Sequence[int]) -> Sequence[int]:
        """A request's tokens as of the next step, ``known`` those before the chain."""
        return Assumed(known, len(self.steps), self.state.no_trigger) if self.steps else known

    def add(self, step: Step) -> None:
        """Take up a step whose layers have run."""
        if not self.steps:
            state, rows = self.state, step.rows
            self._saved = state.phases.saved(rows)
            self._seen = [state.seen.get(row, 0) for row in rows.tolist()]
        step.hold(np.arange(len(step)))
        self.state.refresh_seconds += step.seconds
        self.steps.append(step)

    def settle(self, tokens: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, list[list[Outcome | None]]]:
        """Take note of the steps that stand.

        Args:
            tokens: [steps, requests] ids that the steps put out.
            counts: [requests] how many of them may stand, at least one.

        Returns:
            How many stand, [requests]; by request what each of these steps was, None for one that always reads
            everything.
        """
        state, first = self.state, self.steps[0]
        phases, rows, counts = state.phases, first.rows, counts.copy()
        phases.put_back(rows, self._saved)
        found = [[outcome] for outcome in first.note(np.arange(len(first)))]
        for i, step in enumerate(self.steps[1:], 1):
            going = np.flatnonzero(first.alternates & (counts > i))
            own = rows[going]
            before = phases.saved(own)
            phases.advance(own, state.refreshed[own], tokens[i - 1, going])
            wrong = ((first.start[going] < 0) | phases.slow(own)) != step.slow[going]
            phases.put_back(own[wrong], [column[wrong] for column in before])
            counts[going[wrong]] = i
            stands = np.flatnonzero(counts > i)
            for place, outcome in zip(stands.tolist(), step.note(stands), strict=True):
                found[place].append(outcome)
        for place in np.flatnonzero(first.alternates).tolist():
            state.seen[int(rows[place])] = self._seen[place] + int(counts[place]) - 1
        return counts, found
