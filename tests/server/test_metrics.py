"""What the request metrics count: each number of a report under its own name, for its own route and preset."""

import pytest
from prometheus_client import REGISTRY

from fathom.runtime import ledger
from fathom.server.telemetry.metrics import OUTCOMES, Account, RequestMetrics, outcome_of

BY_REPORT = {
    "fathom:request_kept_tokens_total": "kept_tokens",
    "fathom:retained_tokens_total": "retained_tokens",
    "fathom:propagated_tokens_total": "propagated_tokens",
    "fathom:propagation_skipped_total": "propagation_skipped",
    "fathom:scoring_seconds_total": "scoring_seconds",
    "fathom:draft_tokens_total": "draft_tokens",
    "fathom:draft_accepted_tokens_total": "accepted_tokens",
    "fathom:longest_burst_tokens_sum": "longest_burst",
    "fathom:refresh_seconds_total": "refresh_seconds",
    "fathom:dense_fallbacks_total": "dense_fallbacks",
}
BY_LABEL = {
    ("fathom:decode_steps_total", "phase", "slow"): "slow_steps",
    ("fathom:decode_steps_total", "phase", "fast"): "fast_steps",
    ("fathom:refreshes_total", "cause", "trigger"): "trigger_refreshes",
    ("fathom:refreshes_total", "cause", "timeout"): "timeout_refreshes",
}
MEMBERS = (*BY_REPORT.values(), *BY_LABEL.values())


@pytest.fixture
def metrics():
    made = RequestMetrics()
    yield made
    for series in vars(made).values():
        REGISTRY.unregister(series)


def account(preset="exact", first=0, start=0.0):
    """A generation whose report has a number of its own in every member."""
    report = {name: 2 ** (first + at) for at, name in enumerate(MEMBERS)}
    return Account("/generate", preset, start, report=report)


def value(name, preset="exact", **labels):
    return REGISTRY.get_sample_value(name, {"route": "/generate", "preset": preset} | labels)


def test_each_number_of_a_report_has_its_series(metrics):
    one, another, third = account(), account(first=1), account("turbo", 2)
    for item in (one, another, third):
        metrics.observe_tokens(item, 300, 20)
    for name, member in BY_REPORT.items():
        assert value(name) == one.report[member] + another.report[member], name
        assert value(name, "turbo") == third.report[member], name
    for (name, label, kind), member in BY_LABEL.items():
        assert value(name, **{label: kind}) == one.report[member] + another.report[member], (name, kind)
        assert value(name, "turbo", **{label: kind}) == third.report[member], (name, kind)
    assert (value("fathom:request_prompt_tokens_total"), value("fathom:request_output_tokens_total")) == (
        600,
        40,
    )


def test_a_prompt_of_which_nothing_was_dropped_is_computed_and_kept_whole(metrics):
    request = object.__new__(type("Request", (), {"__slots__": ("__weakref__",)}))
    book = ledger.RequestLedger()
    book.open(request, {})
    metrics.observe_tokens(Account("/generate", "exact", 0.0, report=book.report(request, 300, 0)), 300, 20)
    metrics.observe_tokens(Account("/generate", "exact", 0.0), 7, 1)  # nothing was reported
    for name in ("request_prompt", "request_kept", "retained"):
        assert value(f"fathom:{name}_tokens_total") == 307, name
    assert value("fathom:propagated_tokens_total") == 0
    assert value("fathom:longest_burst_tokens_count") is None  # of requests that drafted


def test_times_begin_with_the_request_and_end_with_its_last_token(metrics):
    metrics.observe_times(account(start=10.0), 12.0, 17.0, 6)
    metrics.observe_times(account(start=20.0), 23.0, 23.0, 1)  # has no time between tokens
    found = [
        [value(f"fathom:{name}_seconds_{part}") for part in ("sum", "count")]
        for name in ("time_to_first_token", "request_latency", "time_per_output_token")
    ]
    assert found == [[2.0 + 3.0, 2], [7.0 + 3.0, 2], [1.0, 1]]


def test_every_outcome_is_there_from_the_first_generation_on(metrics):
    metrics.count(account(), "length")
    metrics.count(account(), "length")
    counts = {outcome: value("fathom:requests_total", outcome=outcome) for outcome in OUTCOMES}
    assert counts == dict.fromkeys(OUTCOMES, 0) | {"length": 2}


@pytest.mark.parametrize(
    ("status", "outcome"),
    [(400, "refused"), (499, "refused"), (500, "error"), (503, "unavailable"), (None, "abort")],
)
def test_an_abort_with_a_status_is_whose_fault_the_status_says(status, outcome):
    assert outcome_of({"type": "abort", "status_code": status}) == outcome
