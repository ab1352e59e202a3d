"""Drafting backs off where nothing is accepted, and returns."""

from fathom.runtime.draft.pace import LONGEST_REST, Pace


def run(pace: Pace, stands: list[int]) -> list[int]:
    """Widths of the steps, when the target accepts up to ``stands[i]`` of step i's tokens."""
    widths = []
    for right in stands:
        width = pace.next()
        pace.record(width, min(width, right))
        widths.append(width)
    return widths


def test_a_draft_that_always_stands_stays_at_full_width():
    assert run(Pace(4), [9] * 10) == [4] * 10


def test_width_follows_what_stands():
    assert run(Pace(4), [1, 1, 2, 4, 4, 4]) == [4, 2, 2, 3, 4, 4]


def test_misses_lead_to_longer_and_longer_rests():
    pace = Pace(4)
    widths = run(pace, [0] * 1000)
    assert sum(width > 0 for width in widths) < 1000 / LONGEST_REST + 12
    assert pace.accepted == 0 and pace.proposed == sum(widths)


def test_drafting_returns_when_it_pays_again():
    pace = Pace(4)
    run(pace, [0] * 200)
    widths = run(pace, [9] * 100)
    assert widths[-1] == 4
    assert sum(widths) > 100


def test_one_miss_is_no_rest():
    assert 0 not in run(Pace(4), [0, 4, 0, 4, 0, 4])
