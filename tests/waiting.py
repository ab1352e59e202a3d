"""Waiting for what a server does in its own time."""

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
