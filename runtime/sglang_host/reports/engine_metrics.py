"""What only the scheduler process knows, for ``/metrics``: KV pages per span, KV held, seconds of prefill."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

REFRESH_SECONDS = 0.1
"""While steps follow each other, the series are written at most this often."""


@dataclass(frozen=True)
class KvState:
    """The KV pool at one moment; pages of one span each, bytes on all devices of the model.

    Attributes:
        held, cached: by span, pages of running requests, and pages that nobody but the prefix cache has.
        total: pages of the pool.
        held_bytes: KV of running requests, each with its cached prefix.
        dense_bytes: what the same tokens would hold at all depths.
    """

    held: list[int]
    cached: list[int]
    total: int
    held_bytes: int
    dense_bytes: int


def span_names(first_layer: int, layers: int, spans: int) -> list[str]:
    """Label of each span: its first and last layer, counted from 1."""
    width = layers // spans
    begins = range(first_layer + 1, first_layer + layers + 1, width)
    return [f"{begin}-{begin + width - 1}" if width > 1 else str(begin) for begin in begins]


def core_wait(thread: Path = Path("/proc/thread-self/schedstat")) -> float:
    """Seconds that the calling thread was ready to run since its start and waited for a core, as Linux counts them.

    0 where the kernel does not.
    """
    try:
        return int(thread.read_text().split()[1]) / 1e9
    except OSError:
        return 0.0


class EngineMetrics:
    """Series of one scheduler process. Create it where SGLang has chosen the metrics folder.

    Processes with other requests or layers add up: the gauges are sums over all that are alive.
    """

    def __init__(self, spans: list[str]) -> None:
        from prometheus_client import Counter, Gauge

        pages = Gauge(
            "fathom:kv_pages",
            "KV pages in use, by span of layers: held by running requests, or cached for later ones only.",
            ("span", "state"),
            multiprocess_mode="livesum",
        )
        self._held = [pages.labels(span, "held") for span in spans]
        self._cached = [pages.labels(span, "cached") for span in spans]
        self._total = Gauge(
            "fathom:kv_pool_pages", "KV pages of the pool, for all spans.", multiprocess_mode="livesum"
        )
        self._held_bytes = Gauge(
            "fathom:kv_held_bytes",
            "KV of running requests, each with its cached prefix.",
            multiprocess_mode="livesum",
        )
        self._dense_bytes = Gauge(
            "fathom:kv_dense_bytes",
            "What the tokens of running requests would hold at all layers.",
            multiprocess_mode="livesum",
        )
        seconds = Counter(
            "fathom:prefill_seconds_total", "Time of steps with prompt tokens, by model.", ("model",)
        )
        self._seconds = {
            "draft_prefill_seconds": seconds.labels("draft"),
            "prefill_seconds": seconds.labels("target"),
        }
        self._counted = dict.fromkeys(self._seconds, 0.0)
        self._waiting = Counter(
            "fathom:core_wait_seconds_total",
            "Time that the engine's main thread waited for a core, ready to run.",
        )
        self._waited = core_wait()
        self._written = 0.0

    @property
    def due(self) -> bool:
        """Whether the series are old enough to be written again between two steps."""
        return time.monotonic() - self._written >= REFRESH_SECONDS

    def write(self, kv: KvState, totals: Mapping[str, float]) -> None:
        """Set the gauges, and count what was added to the totals since the last time."""
        for held, count in zip(self._held, kv.held, strict=True):
            held.set(count)
        for cached, count in zip(self._cached, kv.cached, strict=True):
            cached.set(count)
        self._total.set(kv.total)
        self._held_bytes.set(kv.held_bytes)
        self._dense_bytes.set(kv.dense_bytes)
        for name, counter in self._seconds.items():
            counter.inc(totals[name] - self._counted[name])
            self._counted[name] = totals[name]
        waited = core_wait()
        self._waiting.inc(max(waited - self._waited, 0.0))
        self._waited = waited
        self._written = time.monotonic()
