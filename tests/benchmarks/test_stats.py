"""Statistics against values worked out by hand."""

from pathlib import Path

import pytest

from fathom.benchmarks import stats
from fathom.benchmarks.report import portable


def test_percentile_interpolates_between_order_statistics():
    values = [40.0, 10.0, 30.0, 20.0]
    assert stats.percentile(values, 0) == 10
    assert stats.percentile(values, 25) == 17.5  # position 0.75 between 10 and 20
    assert stats.percentile(values, 50) == 25
    assert stats.percentile(values, 100) == 40
    assert stats.percentile([7.0], 90) == 7


@pytest.mark.parametrize(("values", "q"), [([], 50), ([1.0], -1), ([1.0], 101)])
def test_percentile_refuses_what_has_no_answer(values, q):
    with pytest.raises(ValueError):
        stats.percentile(values, q)


def test_summary():
    assert stats.summary([3.0, 1.0, 2.0, 5.0, 4.0]) == {
        "n": 5,
        "median": 3,
        "min": 1,
        "max": 5,
        "q1": 2,
        "q3": 4,
    }


def test_ratios_pair_rounds_and_do_not_divide_medians():
    # The machine is three times slower in the second round; the second server is always twice as fast.
    ratios = stats.pair_ratios([2.0, 6.0, 2.4], [1.0, 3.0, 1.2])
    assert ratios == pytest.approx([2.0, 2.0, 2.0])
    # Medians 6 and 1 would say 6; each round says otherwise.
    assert stats.summary(stats.pair_ratios([6.0, 1.0, 6.0], [12.0, 1.0, 1.0]))["median"] == 1.0


def test_unequal_counts_cannot_be_paired():
    with pytest.raises(ValueError, match="3 measurements cannot be paired with 2"):
        stats.pair_ratios([1.0, 2.0, 3.0], [1.0, 2.0])


def test_order_is_abba():
    taken = [name for i in range(4) for name in stats.order(["A", "B"], i)]
    assert "".join(taken) == "ABBAABBA"


def test_a_kept_result_names_no_folder_of_the_machine():
    text = '{"command": ["/a/b/.venv/bin/python", "/other/m"], "draft": "/a/b/demo/draft"}'
    assert (
        portable(text, Path("/a/b")) == '{"command": [".venv/bin/python", "/other/m"], "draft": "demo/draft"}'
    )
