"""A real server that ends between loading and its first answer. About 10 s on two cores."""

import contextlib
import os
import signal
import socket
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from waiting import wait_until

from fathom.benchmarks.servers import free_port
from fathom.server.app import once_it_listens


def words(model, port):
    return ["serve", str(model), "--port", str(port), "--max-total-tokens", "2048"]


def test_a_port_that_was_taken_while_loading(template, tiny_model, tmp_path):
    port = free_port()
    (log := tmp_path / "log").touch()
    script = Path(__file__).parents[1] / "taken.py"
    with template.start(words(tiny_model, port), log, dict(os.environ), script=script) as process:
        assert process.wait(100) == 1
    said = log.read_text()
    assert said.startswith(f"Fathom is loading {tiny_model} ...\n") and "Fathom is ready" not in said
    assert said.splitlines()[-1] == (
        f"fathom serve: error: port {port} on 127.0.0.1 is already in use; choose another one with --port"
    )


def test_being_stopped_before_the_first_answer_is_no_error(template, tiny_model, tmp_path):
    port = free_port()
    (log := tmp_path / "log").touch()
    with template.start(words(tiny_model, port), log, dict(os.environ), hasty=False) as process:
        wait_until(lambda: listens(port), 100)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    assert "Traceback" not in log.read_text()


def test_a_first_request_that_is_not_answered_is_an_error(start_server, tiny_model):
    """The server's own: the prompt is longer than this context."""
    told = r"server ended with 1:[\s\S]*fathom serve: error: the server's own first request was not answered"
    with pytest.raises(RuntimeError, match=told):
        start_server(tiny_model, "--dtype", "float32", "--max-total-tokens", "2048", "--context-length", "5")


def test_what_asks_the_server_itself_waits_until_it_listens():
    """As with --skip-server-warmup, where nothing else waits before the line that says it is ready."""
    port, asked = free_port(), threading.Event()
    arguments = SimpleNamespace(url=lambda: f"http://127.0.0.1:{port}")
    ask = once_it_listens(lambda given: given is arguments and asked.set())
    threading.Thread(target=ask, args=[arguments], daemon=True).start()
    assert not asked.wait(0.3)
    with socket.create_server(("127.0.0.1", port)):
        assert asked.wait(10)


def test_an_http_server_that_does_not_start_is_an_error_of_ours(start_server, tiny_model):
    """And not the status of another SGLang, which is uvicorn's for that."""
    told = r"server ended with 1:[\s\S]*fathom serve: error: the HTTP server did not start; its own report is above"
    flags = ("--dtype", "float32", "--max-total-tokens", "2048", "--tool-server", "nobody:1")
    with pytest.raises(RuntimeError, match=told):
        start_server(tiny_model, *flags, script=Path(__file__).parents[1] / "broken_tools.py")


def listens(port):
    with contextlib.suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port)):
        return True
    return False
