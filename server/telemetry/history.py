"""The last generations of this server and the tokens of its last minute: what the live page shows."""

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

REMEMBERED = 256
"""Generations that quantiles are taken over."""
SECONDS = 60
"""How far back tokens are counted."""


@dataclass(frozen=True)
class Finished:
    """One generation that ended. Times are seconds; the clock is ``time.perf_counter()``.

    Attributes:
        end: when it ended.
        route, preset, outcome: as the metrics label it.
        prompt, output: tokens.
        ttft, latency: None where it did not run to its end.
        tpot: None for less than two tokens, too.
        report: the scheduler's report; empty where there is none.
    """

    end: float
    route: str
    preset: str
    outcome: str
    prompt: int
    output: int
    ttft: float | None = None
    tpot: float | None = None
    latency: float | None = None
    report: dict[str, Any] = field(default_factory=dict)


class History:
    """Bounded: the last :data:`REMEMBERED` generations, and one count per second of the last minute."""

    def __init__(self) -> None:
        self.finished: deque[Finished] = deque(maxlen=REMEMBERED)
        self._seconds: deque[tuple[int, int]] = deque(maxlen=SECONDS + 1)

    def put_out(self, now: float, tokens: int) -> None:
        """``tokens`` output tokens have just reached this process."""
        second, before = self._seconds[-1] if self._seconds else (-1, 0)
        if second == int(now):
            self._seconds[-1] = second, before + tokens
        else:
            self._seconds.append((int(now), tokens))

    def end(self, generation: Finished) -> None:
        """A generation has ended."""
        self.finished.append(generation)

    def tokens_by_second(self, now: float) -> list[int]:
        """[:data:`SECONDS`] output tokens of each whole second before the current one, the last one last."""
        counts = dict(self._seconds)
        return [counts.get(second, 0) for second in range(int(now) - SECONDS, int(now))]


def quantile(values: Iterable[float], share: float) -> float | None:
    """The smallest value that is not exceeded by ``share`` of them (nearest rank); None for no values."""
    ordered: Sequence[float] = sorted(values)
    return ordered[max(math.ceil(share * len(ordered)), 1) - 1] if ordered else None


def ratio(parts: Iterable[float], wholes: Iterable[float]) -> float | None:
    """Sum over sum; None where the latter is 0."""
    whole = sum(wholes)
    return sum(parts) / whole if whole else None
