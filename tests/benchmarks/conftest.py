"""Servers of known behaviour that live in the test's own process."""

import contextlib
import threading

import pytest
import uvicorn
from waiting import wait_until


@contextlib.contextmanager
def _running(app):
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))
    thread = threading.Thread(target=server.run)
    thread.start()
    wait_until(lambda: server.started or not thread.is_alive())
    assert server.started
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = server.force_exit = True  # a stream that sleeps is not waited for
    thread.join()


@pytest.fixture(scope="module")
def run_app():
    """``run_app(app)``: the URL of an ASGI application that is served until the test's file ends."""
    with contextlib.ExitStack() as apps:
        yield lambda app: apps.enter_context(_running(app))
