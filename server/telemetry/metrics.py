"""Fathom's request metrics, in the registry that SGLang's ``/metrics`` serves."""

from collections.abc import Callable
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from fathom.server.routes import path_of

# fmt: off
STEPS = (
    1.0, 1.1, 1.2, 1.3, 1.5, 1.6, 1.8, 2.0, 2.2, 2.4, 2.7, 3.0,
    3.3, 3.6, 3.9, 4.3, 4.7, 5.1, 5.6, 6.2, 6.8, 7.5, 8.2, 9.1,
)
"""24 steps to a power of ten (the E24 series of IEC 60063): each at most 1.155 times the one before."""
LATENCY_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 2, 4, 7, 10, 15, 20, 30, 45, 60, 90, 120, 180, 300, 600, 1200)
# fmt: on


def fine_buckets(low: float, high: float) -> tuple[float, ...]:
    """Bucket boundaries from ``low`` to ``high`` seconds; a quantile read from them is off by less than 15.5 %."""
    steps = (float(f"{step}e{power}") for power in range(-4, 4) for step in STEPS)
    return tuple(step for step in steps if low <= step <= high)


TTFT_BUCKETS = fine_buckets(0.01, 300)
TPOT_BUCKETS = fine_buckets(0.001, 10)
BURST_BUCKETS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 32, 64)
LABELS = ("route", "preset")


@dataclass
class Account:
    """What is known of one generation when it starts.

    Attributes:
        route: HTTP route, as a label.
        preset: name of the policy, as a label.
        start: ``time.perf_counter()`` seconds when its HTTP request arrived.
        first_token: the same clock at its first token, by the scheduler; None until it reported.
        report: what the scheduler reported of it.
        seen_tokens: output tokens that this process has had so far.
    """

    route: str
    preset: str
    start: float
    first_token: float | None = None
    report: dict[str, Any] = field(default_factory=dict)
    seen_tokens: int = 0


class RequestMetrics:
    """One time series per route and preset. Create it after SGLang chose the metrics folder."""

    def __init__(self) -> None:
        from prometheus_client import Counter, Gauge, Histogram

        self._ttft = Histogram(
            "fathom:time_to_first_token_seconds",
            "Time from a request's arrival to its first output token.",
            LABELS,
            buckets=TTFT_BUCKETS,
        )
        self._tpot = Histogram(
            "fathom:time_per_output_token_seconds",
            "Per request of two tokens or more: (latency - time to first token) / (output tokens - 1).",
            LABELS,
            buckets=TPOT_BUCKETS,
        )
        self._latency = Histogram(
            "fathom:request_latency_seconds",
            "Time from a request's arrival to its last output token.",
            LABELS,
            buckets=LATENCY_BUCKETS,
        )
        self._prompt = Counter(
            "fathom:request_prompt_tokens_total", "Prompt tokens of finished requests.", LABELS
        )
        self._output = Counter(
            "fathom:request_output_tokens_total", "Output tokens of finished requests.", LABELS
        )
        self._kept = Counter(
            "fathom:request_kept_tokens_total",
            "Prompt tokens of finished requests that were computed, cached ones too, averaged over the layers.",
            LABELS,
        )
        self._drafted = Counter(
            "fathom:draft_tokens_total", "Tokens that the draft proposed and the target verified.", LABELS
        )
        self._accepted = Counter("fathom:draft_accepted_tokens_total", "Proposed tokens that stood.", LABELS)
        self._burst = Histogram(
            "fathom:longest_burst_tokens",
            "Per drafted request, the most tokens that one step put out.",
            LABELS,
            buckets=BURST_BUCKETS,
        )
        self._steps = Counter(
            "fathom:decode_steps_total",
            "Decode steps of finished requests: fast ones read a selection only.",
            (*LABELS, "phase"),
        )
        self._refreshes = Counter(
            "fathom:refreshes_total",
            "Selections of finished requests that were renewed, by what caused it.",
            (*LABELS, "cause"),
        )
        self._refresh_seconds = Counter(
            "fathom:refresh_seconds_total", "Time that choosing and packing selections took.", LABELS
        )
        self._fallbacks = Counter(
            "fathom:dense_fallbacks_total",
            "Finished requests that asked for fast steps and found no compact buffer free.",
            LABELS,
        )
        self._requests = Counter(
            "fathom:requests_total", "Generations by how they ended.", (*LABELS, "outcome")
        )

        self._in_flight = Gauge(
            "fathom:generations_in_flight",
            "Generations that wait or run.",
            multiprocess_mode="livesum",
        )
        self._propagated = Counter(
            "fathom:propagated_tokens_total",
            "Prompt tokens that FastKV's selection let go on, of requests that asked for one.",
            LABELS,
        )
        self._skipped = Counter(
            "fathom:propagation_skipped_total",
            "Requests whose prompt was too long for the buffer of hidden states, and was computed whole.",
            LABELS,
        )
        self._scoring = Counter(
            "fathom:scoring_seconds_total",
            "Time that FastKV took to score prompts and to choose from the scores.",
            LABELS,
        )
        self._retained = Counter(
            "fathom:retained_tokens_total",
            "Prompt entries kept per KV head after prefill, averaged over the layers.",
            LABELS,
        )

    def observe_in_flight(self, generations: int) -> None:
        """How many generations have not ended, whether the engine has said anything of them or not."""
        self._in_flight.set(generations)

    def count(self, account: Account, outcome: str) -> None:
        """Count one generation that ended with an outcome. The other outcomes are there from then on, and zero:
        a rate does not see what a series begins with, and the first error would be none.
        """
        self._requests.labels(account.route, account.preset, outcome).inc()
        for other in OUTCOMES:
            self._requests.labels(account.route, account.preset, other)

    def observe_times(self, account: Account, first_token: float, end: float, output_tokens: int) -> None:
        """Record the times of a generation that ran to its end and put out a token.

        Args:
            account: the generation.
            first_token, end: ``time.perf_counter()`` seconds of its first and last token.
            output_tokens: their number.
        """
        labels = (account.route, account.preset)
        self._ttft.labels(*labels).observe(first_token - account.start)
        self._latency.labels(*labels).observe(end - account.start)
        if output_tokens > 1:
            self._tpot.labels(*labels).observe((end - first_token) / (output_tokens - 1))

    def observe_tokens(self, account: Account, prompt_tokens: int, output_tokens: int) -> None:
        """Record the tokens of a generation that ran to its end, and what they took."""
        labels = (account.route, account.preset)
        self._prompt.labels(*labels).inc(prompt_tokens)
        self._kept.labels(*labels).inc(account.report.get("kept_tokens", prompt_tokens))
        self._retained.labels(*labels).inc(account.report.get("retained_tokens", prompt_tokens))
        self._scoring.labels(*labels).inc(account.report.get("scoring_seconds", 0))
        self._propagated.labels(*labels).inc(account.report.get("propagated_tokens") or 0)
        self._skipped.labels(*labels).inc(int(account.report.get("propagation_skipped", False)))
        if drafted := account.report.get("draft_tokens", 0):
            self._drafted.labels(*labels).inc(drafted)
            self._accepted.labels(*labels).inc(account.report["accepted_tokens"])
            self._burst.labels(*labels).observe(account.report["longest_burst"])
        self._output.labels(*labels).inc(output_tokens)
        self._observe_phases(labels, account.report)

    def _observe_phases(self, labels: tuple[str, str], report: dict[str, Any]) -> None:
        for phase in ("slow", "fast"):
            self._steps.labels(*labels, phase).inc(report.get(f"{phase}_steps", 0))
        for cause in ("trigger", "timeout"):
            self._refreshes.labels(*labels, cause).inc(report.get(f"{cause}_refreshes", 0))
        self._refresh_seconds.labels(*labels).inc(report.get("refresh_seconds", 0))
        self._fallbacks.labels(*labels).inc(report.get("dense_fallbacks", 0))


UNFINISHED = ("abort", "error", "refused", "unavailable")
"""Outcomes of generations that did not run to their end."""

OUTCOMES = ("stop", "length", *UNFINISHED)


def outcome_of(finish_reason: dict[str, Any]) -> str:
    """The outcome label of SGLang's finish reason: an abort with a status below 500 is the client's own doing, one
    with 503 has no room here or no time.
    """
    kind, status = finish_reason.get("type", "stop"), finish_reason.get("status_code")
    if kind != "abort" or not status:
        return kind
    if status == HTTPStatus.SERVICE_UNAVAILABLE:
        return "unavailable"
    return "error" if status >= HTTPStatus.INTERNAL_SERVER_ERROR else "refused"


class Scrapes:
    """ASGI middleware: ``/metrics`` in Prometheus's text format, whatever the scraper would rather have, and with
    what is only looked at then.

    As OpenMetrics, prometheus_client writes an underscore for the colon in each name, unless the scraper asks for
    UTF-8 names, as Prometheus does since version 3: dashboards and rules would then find nothing.
    """

    ACCEPT = (b"accept", b"text/plain;version=0.0.4")

    def __init__(self, app: Any, look: Callable[[], None]):
        self._app = app
        self._look = look

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and path_of(scope) == "/metrics":
            self._look()
            others = [header for header in scope["headers"] if header[0].lower() != b"accept"]
            scope = {**scope, "headers": [*others, self.ACCEPT]}
        await self._app(scope, receive, send)
