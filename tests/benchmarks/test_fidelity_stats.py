"""Intervals and pairing against values worked out by hand."""

import pytest

from fathom.benchmarks import fidelity_stats as stats


@pytest.mark.parametrize(
    ("right", "n", "low", "high"),
    [
        (0, 10, 0.0, 0.27754),  # z² / (n + z²) = 3.84146 / 13.84146
        (10, 10, 0.72246, 1.0),
        (5, 10, 0.23659, 0.76341),  # 0.5 ± z/2 · sqrt(1 / (n + z²)) = 0.5 ± 0.26341
        (38, 40, 0.83496, 0.98617),
    ],
)
def test_wilson(right, n, low, high):
    assert stats.wilson(right, n) == pytest.approx((low, high), abs=2e-5)


@pytest.mark.parametrize(("right", "n"), [(0, 0), (3, 2), (-1, 4)])
def test_a_share_of_nothing_has_no_interval(right, n):
    with pytest.raises(ValueError):
        stats.wilson(right, n)


@pytest.mark.parametrize(
    ("better", "worse", "p"),
    [
        (0, 0, 1.0),
        (1, 0, 1.0),
        (0, 5, 0.0625),  # 2 / 2^5
        (1, 5, 14 / 64),  # 2 · (1 + 6) / 2^6
        (3, 3, 1.0),
    ],
)
def test_mcnemar_is_a_sign_test_on_the_pairs_that_differ(better, worse, p):
    assert stats.mcnemar(better, worse) == pytest.approx(p)
    assert stats.mcnemar(worse, better) == pytest.approx(p)


def test_paired_difference():
    baseline = [True] * 8 + [False] * 2
    policy = [True] * 4 + [False] * 4 + [True] + [False]  # four lost, one won
    found = stats.paired(policy, baseline)
    assert (found.better, found.worse) == (1, 4)
    assert found.difference == pytest.approx(-0.3)
    # (1 + 1) / 12 and (4 + 1) / 12: -0.25 ± z · sqrt((7/12 − 1/16) / 12) = -0.25 ± 1.959964 · 0.208333
    assert (found.low, found.high) == pytest.approx((-0.658326, 0.158326), abs=1e-5)
    assert found.p == pytest.approx(2 * (1 + 5) / 32)


def test_equal_answers_have_no_difference_but_an_interval():
    found = stats.paired([True, False] * 10, [True, False] * 10)
    assert (found.better, found.worse, found.difference, found.p) == (0, 0, 0.0, 1.0)
    # ± z · sqrt((2 / 22) / 22)
    assert (found.low, found.high) == pytest.approx((-0.125991, 0.125991), abs=1e-5)


def test_the_order_of_pairs_matters_and_not_the_totals():
    same = stats.paired([True, True, False, False], [True, True, False, False])
    crossed = stats.paired([True, True, False, False], [False, False, True, True])
    assert same.difference == crossed.difference == 0
    assert (crossed.better, crossed.worse) == (2, 2)
    assert crossed.high > same.high


@pytest.mark.parametrize(("mine", "theirs"), [([True], []), ([], [])])
def test_unpaired_answers_are_refused(mine, theirs):
    with pytest.raises(ValueError):
        stats.paired(mine, theirs)
