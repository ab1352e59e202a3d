"""Labels whose values clients choose, and which stay for ever; and whom a more urgent request does not end."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from sglang.srt.observability.metrics_collector import QueueCount, SchedulerMetricsCollector

MOST_PRIORITIES = 16
OTHER = "other"


class FirstValues:
    """The first values that are met have a label of their own, all others share one.

    Args:
        most: values with a label of their own.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._known: set[Any] = set()

    def label(self, value: Any) -> Any:
        """The value, or :data:`OTHER`."""
        if len(self._known) < self._most:
            self._known.add(value)
        return value if value in self._known else OTHER


class PriorityLabels(FirstValues):
    """Of priorities, the first :data:`MOST_PRIORITIES`."""

    def __init__(self) -> None:
        super().__init__(MOST_PRIORITIES)

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
