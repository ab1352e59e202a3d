"""The ledger of what was done for each request."""

import gc
from dataclasses import fields
from types import SimpleNamespace

from hypothesis import given, settings
from hypothesis import strategies as st

from fathom.runtime.decode_step import Outcome
from fathom.runtime.ledger import Account, Held, Launched, Part, RequestLedger
from fathom.runtime.sglang_host.scheduler import FathomScheduler

NOTHING = Held(0, 0)


def step(ledger, request, began, end, held=NOTHING, prompt_tokens=None, outcome=None, draft_seconds=None):
    """Settle a step of one request."""
    part = Part(request, ledger.open(request, {}), held, prompt_tokens, outcome, prompt_tokens is None)
    ledger.settle(Launched(began, draft_seconds, [part]), end)


class Request:
    """Stands for the engine's request: an object that can be referred to weakly, and says whether it has ended."""

    ended = False

    def finished(self):
        return self.ended


def test_counters_add_up_and_the_report_closes_the_account():
    ledger = RequestLedger()
    request = Request()
    account = ledger.open(request, {"preset": "exact"})
    assert ledger.open(request, {}) is account
    step(ledger, request, 0, 1, Held(3000, 3000), prompt_tokens=30, draft_seconds=0.25)
    step(ledger, request, 1, 2, Held(4200, 4200), prompt_tokens=12, draft_seconds=0.0)
    ledger.first_token(request)
    first = account.first_token_time
    ledger.first_token(request)
    step(ledger, request, 2, 3, Held(3000, 4300))
    assert len(ledger) == 1
    report = ledger.report(request, prompt_tokens=42, cached_tokens=0)
    assert report["policy"] == {"preset": "exact"}
    assert (report["prefill_steps"], report["decode_steps"]) == (2, 1)
    assert (report["kv_bytes"], report["kv_bytes_dense"]) == (3000, 4300)
    assert report["kept_tokens"] == report["deep_tokens"] == 42
    assert report["first_token_time"] == first
    assert (report["prefill_seconds"], report["draft_prefill_seconds"]) == (2, 0.25)
    steps = {"prefill_tokens": 42, "prefill_steps": 2, "decode_steps": 1, "requests": 1}
    assert ledger.totals == steps | {
        "draft_tokens": 0,
        "accepted_tokens": 0,
        "fast_steps": 0,
        "scoring_seconds": 0,
        "prefill_seconds": 1.75,
        "draft_prefill_seconds": 0.25,
    }
    assert len(ledger) == 0


def test_each_counter_is_reported_under_its_own_name():
    ledger, request = RequestLedger(), Request()
    account, names = ledger.open(request, {}), [item.name for item in fields(Account)]
    for number, name in enumerate(names, start=1000):
        setattr(account, name, number)
    wanted = {name: getattr(account, name) for name in names if name != "reported"}
    report = ledger.report(request, prompt_tokens=9, cached_tokens=5, queue_seconds=0.5)
    given = {"prompt_tokens": 9, "cached_tokens": 5, "queue_seconds": 0.5}
    assert report == wanted | given | {"slow_steps": account.decode_steps - account.fast_steps}


def test_means_are_over_the_spans_and_the_last_one_is_the_deepest():
    account = Account()
    account.climbed([40, 40, 12, 2], [10, 10, 10, 2])
    assert (account.kept_tokens, account.deep_tokens, account.retained_tokens) == (round(94 / 4), 2, 8)
    assert account.staircase == [(40, 10), (40, 10), (12, 10), (2, 2)]


OUTCOMES = st.sampled_from(
    [
        None,
        Outcome(True, None, 0.0, 7),
        Outcome(False, "trigger", 0.5, 7),
        Outcome(False, "timeout", 0.5, 7),
        Outcome(False, None, 0.0, 0),
    ]
)
PARTS = st.tuples(
    st.integers(0, 2),  # whose
    st.one_of(st.none(), st.integers(1, 9)),  # prompt tokens
    OUTCOMES,
    st.integers(0, 50),  # bytes held
)


@given(st.lists(st.lists(PARTS, min_size=1, max_size=3, unique_by=lambda part: part[0]), max_size=8))
@settings(max_examples=60)
def test_any_steps_add_up(steps):
    """Of any batches: each request's numbers are those of its own parts, and the totals are their sums. What a step
    took is decode time where all of its requests decoded; where one brought prompt tokens it is prefill time of
    those that did."""
    ledger, requests, now = RequestLedger(), [Request() for _ in range(3)], 0.0
    for request in requests:
        ledger.open(request, {})
    own = [[] for _ in requests]
    for seconds, step_parts in enumerate(steps, start=1):
        timed = all(prompt is None for _, prompt, _, _ in step_parts)
        parts = [
            Part(requests[i], ledger.open(requests[i], {}), Held(size, 2 * size), prompt, outcome, timed)
            for i, prompt, outcome, size in step_parts
        ]
        ledger.settle(Launched(now, None, parts), now + seconds)
        now += seconds
        for i, *part in step_parts:
            own[i].append((*part, seconds * (timed or part[0] is not None)))
    reports = [ledger.report(request, 9, 0) for request in requests]
    for report, parts in zip(reports, own, strict=True):
        sizes = [size for _, _, size, _ in parts]
        decoded = [(outcome, seconds) for prompt, outcome, _, seconds in parts if prompt is None]
        slow_fast = [outcome for outcome, _ in decoded if outcome is not None]
        assert report["prefill_steps"] == len(parts) - len(decoded)
        read = [seconds for prompt, _, _, seconds in parts if prompt is not None]
        assert report["prefill_seconds"] == sum(read)
        assert report["decode_steps"] == len(decoded) == report["slow_steps"] + report["fast_steps"]
        assert report["fast_steps"] == sum(outcome.fast for outcome in slow_fast)
        assert report["decode_seconds"] == sum(seconds for _, seconds in decoded)
        fast = [seconds for outcome, seconds in decoded if outcome is not None and outcome.fast]
        assert report["fast_seconds"] == sum(fast)
        for cause in ("trigger", "timeout"):
            assert report[f"{cause}_refreshes"] == sum(outcome.cause == cause for outcome in slow_fast)
        assert report["refresh_seconds"] == sum(outcome.seconds for outcome in slow_fast)
        assert report["dense_fallbacks"] == any(outcome.compact_bytes == 0 for outcome in slow_fast)
        held = (sizes or [0])[-1]
        assert (report["kv_bytes"], report["kv_bytes_dense"]) == (held, 2 * held)
        assert report["kv_bytes_peak"] == max(sizes, default=0)
    for name in ("prefill_steps", "decode_steps", "fast_steps"):
        assert ledger.totals[name] == sum(report[name] for report in reports)
    prompts = [prompt for parts in own for prompt, *_ in parts if prompt is not None]
    assert ledger.totals["prefill_tokens"] == sum(prompts)


def test_drafted_tokens_are_counted_with_the_longest_burst():
    ledger = RequestLedger()
    request = Request()
    account = ledger.open(request, {})
    for proposed, accepted in ((8, 5), (4, 0), (4, 4)):
        ledger.drafted(account, proposed, accepted)
    report = ledger.report(request, prompt_tokens=9, cached_tokens=0)
    assert (report["draft_tokens"], report["accepted_tokens"], report["longest_burst"]) == (16, 9, 6)
    assert (ledger.totals["draft_tokens"], ledger.totals["accepted_tokens"]) == (16, 9)


def test_fast_steps_and_refreshes_are_counted():
    ledger = RequestLedger()
    request = Request()
    steps = [(False, "start", 500), (True, None, 500), (False, "timeout", 500), (False, "trigger", 500)]
    for fast, cause, size in [*steps, (False, None, 0)]:
        step(ledger, request, 0, 1, outcome=Outcome(fast, cause, 0.5 if cause else 0.0, size))
    report = ledger.report(request, prompt_tokens=9, cached_tokens=0)
    assert (report["slow_steps"], report["fast_steps"]) == (4, 1)
    assert (report["timeout_refreshes"], report["trigger_refreshes"]) == (1, 1)
    assert (report["refresh_seconds"], report["dense_fallbacks"], report["compact_bytes"]) == (1.5, 1, 0)
    assert ledger.totals["fast_steps"] == 1


def test_the_time_of_scoring_is_kept_per_request_and_in_total():
    ledger = RequestLedger()
    first, second = Request(), Request()
    for request, seconds in ((first, 0.5), (second, 0.25), (first, 0.5)):
        ledger.scored(ledger.open(request, {}), seconds)
    assert ledger.report(first, prompt_tokens=9, cached_tokens=0)["scoring_seconds"] == 1
    assert ledger.totals["scoring_seconds"] == 1.25


def test_the_time_of_decode_steps_is_told_apart():
    ledger = RequestLedger()
    request, now = Request(), 3.0
    for seconds, fast in ((0.5, False), (0.25, True), (0.125, True)):
        step(ledger, request, now, now + seconds, outcome=Outcome(fast, None, 0.0, 500))
        now += 1
    report = ledger.report(request, prompt_tokens=9, cached_tokens=0)
    assert (report["decode_seconds"], report["fast_seconds"]) == (0.875, 0.375)


def test_steps_that_follow_each_other_share_an_engine_steps_time():
    ledger, request = RequestLedger(), Request()
    slow, fast = Outcome(False, "timeout", 0.1, 50), Outcome(True, None, 0.0, 50)
    account = ledger.open(request, {})
    parts = [
        Part(request, account, NOTHING, outcome=each, timed=True, share=0.25)
        for each in (slow, fast, fast, fast)
    ]
    ledger.settle(Launched(1, None, parts), 3)
    report = ledger.report(request, 10, 0)
    assert (report["decode_seconds"], report["fast_seconds"]) == (2, 1.5)
    assert (report["decode_steps"], report["fast_steps"], report["timeout_refreshes"]) == (4, 3, 1)


def test_steps_that_overlap_share_no_time():
    """The second is launched while the first runs: its time begins with the first one's end."""
    ledger = RequestLedger()
    request = Request()
    for began, end in ((0, 4), (1, 6), (5, 7)):
        step(ledger, request, began, end)
    assert ledger.report(request, prompt_tokens=9, cached_tokens=0)["decode_seconds"] == 4 + 2 + 1


def test_an_account_dies_with_its_request():
    ledger = RequestLedger()
    request = Request()
    ledger.open(request, {})
    del request
    gc.collect()
    assert len(ledger) == 0


def test_an_account_that_nobody_will_report_is_not_open():
    ledger = RequestLedger()
    request = Request()
    ledger.open(request, {})
    assert len(ledger) == 1
    request.ended = True
    assert len(ledger) == 0


def test_a_request_that_never_ran_has_an_empty_report():
    report = RequestLedger().report(Request(), prompt_tokens=9, cached_tokens=0)
    assert (report["kv_bytes"], report["decode_steps"], report["first_token_time"]) == (0, 0, None)


def test_the_account_of_a_request_that_is_aborted_while_it_waits_is_closed():
    """Taken back first, it has an account; SGLang lets go of it without saying that it has ended."""
    ledger, request, told = RequestLedger(), Request(), []
    ledger.open(request, {})
    request.cache_request_handle = "its handle"
    scheduler = object.__new__(FathomScheduler)
    scheduler.tree_cache = SimpleNamespace(finish=lambda *args: told.append(args[0]))
    scheduler.tp_worker = SimpleNamespace(ledger=ledger)
    scheduler.session_controller = SimpleNamespace(forget=told.append)
    assert len(ledger) == 1
    scheduler._release_aborted_request(request)
    assert len(ledger) == 0 and told == ["its handle", request]
