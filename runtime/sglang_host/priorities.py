"""Labels of priorities in SGLang's series: clients choose priorities, and each label stays for ever."""

from collections import Counter
from collections.abc import Mapping
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
