"""What the tests share: servers that outlive a file, and another try where clocks are compared."""

from types import SimpleNamespace

import pytest
from conftest import renewed
from waiting import one_of_three


def test_a_server_that_has_ended_is_started_again():
    started = []

    def start():
        started.append(SimpleNamespace(process=SimpleNamespace(poll=lambda: None)))
        return started[-1]

    server = renewed(start)
    assert server() is server() is started[0]
    started[0].process.poll = lambda: 1
    assert server() is server() is started[1]
    assert len(started) == 2


@pytest.mark.parametrize(("failures", "runs"), [(0, 1), (2, 3), (3, 3)])
def test_what_is_wrong_each_time_is_wrong(failures, runs):
    seen = []

    @one_of_three
    def test(number):
        seen.append(number)
        assert len(seen) > failures

    if failures == 3:
        with pytest.raises(AssertionError):
            test(7)
    else:
        test(number=7)
    assert seen == [7] * runs
