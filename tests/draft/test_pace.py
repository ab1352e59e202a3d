"""Drafting as wide as it pays, and not where it does not."""

import itertools
import random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fathom.runtime.draft.pace import (
    EXPECTED,
    FIRST_REST,
    LONGEST_REST,
    Evidence,
    Pace,
    shared_evidence,
    speedups,
)


def play(pace: Pace, foreseen, steps: int) -> tuple[list[int], float, int]:
    """Decode ``steps`` target steps as the engine does.

    Args:
        foreseen: whether the draft would say what the target says, token after token.

    Returns:
        The widths, the time in target steps, and the tokens put out.
    """
    stream, widths, time, tokens, waiting = iter(foreseen), [], 0.0, 0, []
    for _ in range(steps):
        width = pace.width()
        widths.append(width)
        if width:
            accepted = len(list(itertools.takewhile(bool, itertools.islice(stream, width))))
            pace.record(width, accepted)
        else:
            accepted = 0
            waiting.append(next(stream))
            if pace.patience is not None and len(waiting) >= pace.patience:
                pace.learn(sum(waiting), len(waiting))
                waiting, time = [], time + pace.cost
        time += 1 + width * pace.cost
        tokens += accepted + 1
    return widths, time, tokens


@pytest.mark.parametrize("cost", [0.0, 0.1, 0.5])
def test_a_draft_that_always_stands_is_used_to_the_full(cost):
    widths, _, _ = play(Pace(4, cost), itertools.repeat(True), 30)
    assert 0 not in widths
    assert widths[-25:] == [4] * 25


@given(
    acceptance=st.floats(0, 1),
    cost=st.floats(0.05, 1),
    most=st.integers(1, 16),
)
@example(acceptance=0.5, cost=EXPECTED, most=4)
def test_no_width_is_better_than_the_chosen_one(acceptance, cost, most):
    """The speed-up of every width, token by token: 1 + a + a^2 + ... for 1 + width * cost."""
    pace = Pace(most, cost)
    assert (pace.width() > 0) == (cost < EXPECTED)
    pace.record(1, 0)
    pace.own.stood, pace.own.tried, pace._rest = acceptance, 1.0, 0
    chosen = pace.width()
    assert 0 <= chosen <= most
    for width in range(most + 1):
        expected, stands = 1.0, 1.0
        for _ in range(width):
            stands *= acceptance
            expected += stands
        assert expected / (1 + width * cost) <= speedups(acceptance, chosen, cost)[-1] + 1e-9
    assert (chosen > 0) == (acceptance > cost)


@pytest.mark.parametrize("cost", [0.1, 0.5])
def test_a_draft_that_never_stands_costs_a_few_steps_and_then_a_look_in_a_while(cost):
    widths, time, tokens = play(Pace(4, cost), itertools.repeat(False), 1000)
    assert tokens == 1000
    assert not any(widths[20:])
    assert time <= 1000 + 1.5 + 1000 / LONGEST_REST * cost


def test_one_token_is_tried_and_then_only_looked_back_at():
    pace = Pace(4, 0.5)
    pace.learn(0, 1)
    assert pace.width() == 1 and pace.patience is None
    pace.record(1, 0)
    assert pace.width() == 0 and pace.patience == 16
    for patience in (32, 64, 64):
        pace.learn(0, pace.patience)
        assert pace.patience == patience


def test_drafting_returns_when_it_pays_again():
    pace = Pace(4, 0.5)
    play(pace, itertools.repeat(False), 200)
    widths, _, tokens = play(pace, itertools.repeat(True), 100)
    assert widths[-1] == 4 and tokens > 240


@pytest.mark.parametrize("acceptance", [0.0, 0.2, 0.5, 0.8, 0.95])
@pytest.mark.parametrize("cost", [0.1, 0.3, 0.5])
def test_it_is_close_to_the_best_fixed_width_and_never_far_below_none(acceptance, cost):
    chance = random.Random(7)
    stream = (chance.random() < acceptance for _ in itertools.count())
    _, time, tokens = play(Pace(4, cost), stream, 3000)
    best = max(speedups(acceptance, 4, cost))
    assert tokens / time >= 0.96 * best


def test_drawn_tokens_count_as_much_as_the_draft_was_sure_of_them():
    """Eight tokens, each drawn with probability 1/4 by draft and target alike: two are all it can foresee."""
    pace = Pace(4, 0.5)
    for _ in range(20):
        pace.learn(2, 8 * 0.25)
    assert pace.width() == 4


@pytest.mark.parametrize("cost", [0.1, 0.5])
def test_where_drafting_has_not_paid_a_request_that_guesses_wrong_drafts_nothing(cost):
    shared = shared_evidence()
    for place in range(80):
        pace = Pace(4, cost, shared)
        pace.learn(0, 1)
        widths, _, _ = play(pace, itertools.repeat(False), 40)
        if place >= 4 / cost:
            assert Pace(4, cost, shared).width() == 0, "with nothing that speaks for it"
            assert not any(widths) and pace.patience == LONGEST_REST


def good_start_in_bad_times():
    """Of a request whose first guess stood, after many of whose none did."""
    shared = shared_evidence()
    for _ in range(40):
        play(Pace(4, 0.5, shared), itertools.repeat(False), 40)
    pace = Pace(4, 0.5, shared)
    pace.learn(1, 1)
    return pace


def test_a_good_request_drafts_to_the_full_after_many_bad_ones():
    pace = good_start_in_bad_times()
    widths, _, tokens = play(pace, itertools.repeat(True), 30)
    assert widths[0] > 0 and widths[-10:] == [4] * 10 and tokens > 100


def test_a_bad_request_after_good_ones_gets_its_chance():
    shared = shared_evidence()
    for _ in range(5):
        play(Pace(4, 0.5, shared), itertools.repeat(True), 20)
    pace = Pace(4, 0.5, shared)
    pace.learn(0, 1)
    assert pace.width() == 1


def test_a_good_start_in_bad_times_is_no_reason_to_rest_longer():
    pace = good_start_in_bad_times()
    while width := pace.width():
        pace.record(width, 0)
    assert pace.patience == FIRST_REST


@given(st.lists(st.tuples(st.integers(0, 9), st.floats(0.1, 9)), max_size=8), st.floats(0.5, 0.99))
def test_each_token_counts_less_the_more_came_after_it(added, memory):
    """More may stand than a draft was sure of; no more than all are expected to."""
    evidence = Evidence(memory)
    for stood, tried in added:
        evidence.add(stood, tried)
    after = [sum(tried for _, tried in added[place + 1 :]) for place in range(len(added))]
    weights = [memory**count for count in (sum(tried for _, tried in added), *after)]
    stood, tried = (
        sum(weight * part for weight, part in zip(weights, parts, strict=True))
        for parts in zip((EXPECTED, 1.0), *added, strict=True)
    )
    assert (evidence.stood, evidence.tried) == pytest.approx((stood, tried))
    assert evidence.acceptance == pytest.approx(min(stood / tried, 1))
