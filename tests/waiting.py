"""Waiting for what a server does in its own time, and comparing its clock with a client's."""

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


ROUNDS = 3


def assert_clocks_agree(measure, share):
    """Server and client agree on their times to within a share of them, after one round or two more.

    ``measure`` does one round and returns both sides' times by name, each over all rounds so far: a stall of the
    machine that only one side has seen weighs less each time, an error in what is measured does not.
    """
    for _ in range(ROUNDS):
        server, client = measure()
        apart = {name: round(server[name] / client[name] - 1, 4) for name in client}
        print("apart:", apart)
        if all(abs(difference) < share for difference in apart.values()):
            return
    raise AssertionError((apart, server, client))
