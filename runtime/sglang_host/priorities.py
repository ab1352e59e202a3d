"""Priorities: their labels in SGLang's series, of which each stays for ever, and whom they do not end."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from sglang.srt.observability.metrics_collector import QueueCount, SchedulerMetricsCollector

MOST_PRIORITIES = 16
OTHER = "other"


class PriorityLabels:
    """The first :data:`MOST_PRIORITIES` priorities that are met have a label of their own, all others share one."""

    def __init__(self) -> None:
        self._known: set[int | None] = set()

    def label(self, priority: int | None) -> int | str | None:
        """The priority, or :data:`OTHER`."""
        if len(self._known) < MOST_PRIORITIES:
            self._known.add(priority)
        return priority if priority in self._known else OTHER

    def fold(self, counts: Mapping[int | None, int]) -> dict[Any, int]:
        """Counts by priority as counts by label."""
        folded: Counter[Any] = Counter()
        for priority, count in counts.items():
            folded[self.label(priority)] += count
        return dict(folded)


class FathomCollector(SchedulerMetricsCollector):
    """SGLang's collector with few priorities.

    Attributes:
        priorities: their labels.
    """

    priorities: PriorityLabels

    def _log_gauge_queue_count(self, gauge: Any, data: QueueCount) -> None:
        if data.by_priority:
            data = replace(data, by_priority=self.priorities.fold(data.by_priority))
        super()._log_gauge_queue_count(gauge, data)


def install(stock: SchedulerMetricsCollector) -> None:
    """Make SGLang's collector ours."""
    stock.__class__ = FathomCollector
    stock.priorities = PriorityLabels()


@contextmanager
def spared(urgent: Any, begun: Iterable[Any]) -> Iterator[None]:
    """Let none of these requests make room in a full queue for one that is more urgent than they are.

    Args:
        urgent: the one that comes.
        begun: who has run and was taken back; their clients may have read the beginning of an answer.
    """
    own = [(request, request.priority) for request in begun]
    for request, _ in own:
        request.priority = urgent.priority
    try:
        yield
    finally:
        for request, priority in own:
            request.priority = priority
