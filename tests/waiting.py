"""Waiting for what a server does in its own time."""

import contextlib
import functools
import sys
import time


def wait_until(condition, seconds=30.0, show=lambda: ""):
    """Seconds until the condition held. It fails, with what ``show`` returns, when that takes too long."""
    begin = time.monotonic()
    while not condition():
        assert time.monotonic() - begin < seconds, f"not so after {seconds:g} s: {show()}"
        time.sleep(0.05)
    return time.monotonic() - begin


def held(server):
    """KV slots and accounts that requests hold."""
    engine = server.engine()
    return engine["kv_pool"]["held"] + engine["open_accounts"]


@contextlib.contextmanager
def slowed(server, seconds):
    """Within the block every step takes so much longer: what is to happen meanwhile need not hurry."""

    def slow_down(seconds):
        reply = server.client.post("/slow_down", json={"forward_sleep_time": seconds})
        assert reply.status_code == 200, reply.text

    slow_down(seconds)
    try:
        yield
    finally:
        slow_down(None)


def one_of_three(test):
    """For a test that compares clocks: where a machine stands still for a moment, what it says is not so.

    What is wrong with a product is wrong in each of three runs.
    """

    @functools.wraps(test)
    def run(*args, **kwargs):
        for _ in range(2):
            try:
                return test(*args, **kwargs)
            except AssertionError as failed:
                print(f"once more: {failed}", file=sys.stderr)
        return test(*args, **kwargs)

    return run
