"""The ledger of what was done for each request."""

import gc

from fathom.runtime.decode import Outcome
from fathom.runtime.ledger import Held, KvShape, RequestLedger


class Request:
    """Stands for the engine's request: any object that can be referred to weakly."""


def test_counters_add_up_and_the_report_closes_the_account():
    ledger = RequestLedger(KvShape(layers=4, bytes_per_token=100))
    request = Request()
    account = ledger.open(request, {"preset": "exact"})
    assert ledger.open(request, {}) is account
    ledger.prefilled(account, 30, Held(3000, 3000))
    ledger.prefilled(account, 12, Held(4200, 4200))
    ledger.first_token(request)
    first = account.first_token_time
    ledger.first_token(request)
    ledger.decoded(account, Held(3000, 4300))
    assert len(ledger) == 1
    report = ledger.report(request, prompt_tokens=42, cached_tokens=0)
    assert report["policy"] == {"preset": "exact"}
    assert (report["prefill_steps"], report["decode_steps"]) == (2, 1)
    assert (report["kv_bytes"], report["kv_bytes_dense"]) == (3000, 4300)
    assert report["kept_tokens"] == report["deep_tokens"] == 42
    assert report["first_token_time"] == first
    steps = {"prefill_tokens": 42, "prefill_steps": 2, "decode_steps": 1, "requests": 1}
    assert ledger.totals == steps | {
        "draft_tokens": 0,
        "accepted_tokens": 0,
        "fast_steps": 0,
        "scoring_seconds": 0,
        "prefill_seconds": 0,
        "draft_prefill_seconds": 0,
    }
    assert len(ledger) == 0


def test_drafted_tokens_are_counted_with_the_longest_burst():
    ledger = RequestLedger(KvShape(4, 100))
    request = Request()
    account = ledger.open(request, {})
    for proposed, accepted in ((8, 5), (4, 0), (4, 4)):
        ledger.drafted(account, proposed, accepted)
    report = ledger.report(request, prompt_tokens=9, cached_tokens=0)
    assert (report["draft_tokens"], report["accepted_tokens"], report["longest_burst"]) == (16, 9, 6)
    assert (ledger.totals["draft_tokens"], ledger.totals["accepted_tokens"]) == (16, 9)


def test_fast_steps_and_refreshes_are_counted():
    ledger = RequestLedger(KvShape(4, 100))
    request = Request()
    account = ledger.open(request, {})
    steps = [(False, "start", 500), (True, None, 500), (False, "timeout", 500), (False, "trigger", 500)]
    for fast, cause, size in [*steps, (False, None, 0)]:
        ledger.decoded(account, Held(0, 0))
        ledger.alternated(account, Outcome(fast, cause, 0.5 if cause else 0.0, size))
    report = ledger.report(request, prompt_tokens=9, cached_tokens=0)
    assert (report["slow_steps"], report["fast_steps"]) == (4, 1)
    assert (report["timeout_refreshes"], report["trigger_refreshes"]) == (1, 1)
    assert (report["refresh_seconds"], report["dense_fallbacks"], report["compact_bytes"]) == (1.5, 1, 0)
    assert ledger.totals["fast_steps"] == 1


def test_the_time_of_scoring_is_kept_per_request_and_in_total():
    ledger = RequestLedger(KvShape(4, 100))
    first, second = Request(), Request()
    for request, seconds in ((first, 0.5), (second, 0.25), (first, 0.5)):
        ledger.scored(ledger.open(request, {}), seconds)
    assert ledger.report(first, prompt_tokens=9, cached_tokens=0)["scoring_seconds"] == 1
    assert ledger.totals["scoring_seconds"] == 1.25


def test_the_time_of_decode_steps_is_told_apart():
    ledger = RequestLedger(KvShape(4, 100))
    request = Request()
    account = ledger.open(request, {})
    for seconds, fast in ((0.5, False), (0.25, True), (0.125, True)):
        ledger.timed(account, seconds, fast)
    report = ledger.report(request, prompt_tokens=9, cached_tokens=0)
    assert (report["decode_seconds"], report["fast_seconds"]) == (0.875, 0.375)


def test_an_account_dies_with_its_request():
    ledger = RequestLedger(KvShape(4, 100))
    request = Request()
    ledger.open(request, {})
    del request
    gc.collect()
    assert len(ledger) == 0


def test_a_request_that_never_ran_has_an_empty_report():
    report = RequestLedger(KvShape(4, 100)).report(Request(), prompt_tokens=9, cached_tokens=0)
    assert (report["kv_bytes"], report["decode_steps"], report["first_token_time"]) == (0, 0, None)
