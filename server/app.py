"""SGLang's HTTP application with Fathom's middleware, error answers and routes, and its launch."""

import contextlib
import signal
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from fastapi import FastAPI
from fastapi.responses import HTMLResponse
from starlette.middleware import Middleware

from fathom.runtime import config
from fathom.runtime.sglang_host.options import EngineOptions
from fathom.server.answers import errors
from fathom.server.middleware import PolicyMiddleware
from fathom.server.page.live import HEADERS, REFRESH_SECONDS, Live
from fathom.server.requests import decompression, protect, request_ids
from fathom.server.requests.admission import AdmissionMiddleware, Gate
from fathom.server.requests.context import Face
from fathom.server.telemetry.metrics import Scrapes
from fathom.server.version import versions


def configure(
    app: FastAPI,
    face: Face,
    gate: Gate,
    internal_states: Callable[[], Any],
    look: Callable[[], None],
    model_name: str = "",
) -> None:
    """Add Fathom's part to an application that has not started yet.

    Args:
        app: the application.
        face: the server's policy defaults and limits.
        gate: which requests are let in.
        internal_states: coroutine function that asks every scheduler process for its state.
        look: called before metrics are collected.
        model_name: name under which the model is served.
    """
    decompresses = decompression.take(app)
    # Last is innermost: after authentication, and inside CORS.
    app.user_middleware.append(Middleware(Scrapes, look=look))
    app.user_middleware.append(Middleware(AdmissionMiddleware, gate=gate))
    if decompresses:
        app.user_middleware.append(decompression.bounded(gate.max_body_bytes))
    app.user_middleware.append(Middleware(PolicyMiddleware, face=face, model_name=model_name))
    errors.install(app)
    request_ids.install(app)

    async def info() -> dict[str, Any]:
        """What this server is, what its scheduler processes say of themselves, and the legal policies."""
        states = await internal_states()
        return {
            "versions": versions(),
            "policy": face.default.to_wire(),
            "mechanisms": sorted(config.MECHANISMS),
            "left_out": face.choice.left_out,
            "presets": config.describe_presets(face.limits, face.tunings),
            "engine": [state.get("fathom") for state in states],
            "fields": config.describe(face.limits),
            "schema": config.json_schema(),
        }

    app.add_api_route("/fathom/info", info, methods=["GET"])
    live = Live(face, gate, model_name, internal_states)

    async def page(refresh: int = REFRESH_SECONDS) -> HTMLResponse:
        """What this server does now, for people."""
        return HTMLResponse(await live.page(refresh), headers=HEADERS)

    app.add_api_route("/fathom", page, methods=["GET"], response_class=HTMLResponse)


def watch_start(app: FastAPI, started: Callable[[], bool], on_early_end: Callable[[], None]) -> None:
    """Let an application that stops before it has started end at once.

    SGLang's own lifespan would wait for its warm-up, which asks an address that nobody listens on for two minutes.

    Args:
        app: an application that has not started yet.
        started: whether the server can be used.
        on_early_end: ends the process.
    """
    lifespan = app.router.lifespan_context

    @asynccontextmanager
    async def watched(app: FastAPI) -> AsyncIterator[Any]:
        async with lifespan(app) as state:
            yield state
            if not started():
                on_early_end()

    app.router.lifespan_context = watched


def once_it_listens(ask: Callable[[Any], None]) -> Callable[[Any], None]:
    """Let what asks the server itself wait for its port, as its first request does, which may be left out.

    Args:
        ask: a function of SGLang's ``ServerArgs``.
    """

    def wait_and_ask(server_args: Any) -> None:
        url = urlsplit(server_args.url())
        while True:  # a server that ends before it listens takes this thread with it
            with contextlib.suppress(OSError), socket.create_connection((url.hostname, url.port), timeout=1):
                break
            time.sleep(0.05)
        ask(server_args)

    return wait_and_ask


def install(root_path: str) -> None:
    """Put ours in the places of SGLang's that this process relies on, each of them in the seam ledger.

    Args:
        root_path: SGLang's ``--fastapi-root-path``.
    """
    from fathom.runtime.sglang_host import forking
    from fathom.runtime.sglang_host.reports import redact
    from fathom.server.answers import chunks, offsets, preambles, thoughts
    from fathom.server.api import control, detokenize, messages, ollama, parsers, responses, weight_versions
    from fathom.server.requests import aside, keys, templates
    from fathom.server.telemetry import labels, request_log
    from fathom.server.tools import (
        glm_calls,
        tool_arguments,
        tool_blocks,
        tool_calls,
        tool_steps,
        written_values,
    )

    protect.install()
    templates.install()
    aside.install()
    keys.install(root_path)
    redact.install()
    request_log.install()
    labels.install()
    responses.install()
    messages.install()
    chunks.install()
    offsets.install()
    control.install()
    tool_calls.install()
    for module in (tool_steps, tool_arguments, glm_calls, tool_blocks, written_values, thoughts, preambles):
        for place in module.PLACES:
            setattr(*place)
    ollama.install()
    parsers.install()
    detokenize.install()
    weight_versions.install()
    forking.install()


def launch(
    server_args: Any,
    face: Face,
    gate: Gate,
    options: EngineOptions,
    on_ready: Callable[[dict[str, Any]], None],
) -> None:
    """Serve until stopped.

    Args:
        server_args: SGLang's ``ServerArgs``.
        face: the server's policy defaults and limits.
        gate: which requests are let in, and how long the last ones may take.
        options: of the engine's processes, beside SGLang's.
        on_ready: called with the engine process's first report once the first request can be answered.
    """
    from sglang.srt.entrypoints import http_server
    from sglang.srt.entrypoints.engine import init_tokenizer_manager

    from fathom.server import children, ending, quiet
    from fathom.server.drain import ServingTokenizerManager

    async def internal_states() -> list[dict[str, Any]]:
        return await http_server.get_global_state().tokenizer_manager.get_internal_state()

    def look() -> None:
        if (server := http_server.get_global_state()) is not None:
            server.tokenizer_manager.observe_in_flight()

    def background() -> int:
        return len(http_server.app.state.openai_serving_responses.background_tasks)

    gate.background = background

    def init(*args: Any) -> Any:
        signal.signal(
            signal.SIGQUIT, ending.on_engine_failure
        )  # after SGLang's own, which kills without a word
        from fathom.runtime import metric_files

        metric_files.install()  # the folder is chosen by now, which prometheus_client has to know when imported
        manager = partial(
            ServingTokenizerManager,
            face=face,
            gate=gate,
            on_engine_death=ending.on_engine_death,
            leave=partial(ending.end, 0),
        )
        return init_tokenizer_manager(*args, TokenizerManagerClass=manager)

    ready = threading.Event()

    def warmed_up() -> None:
        ready.set()
        on_ready(http_server.get_global_state().scheduler_info)

    quiet.guard_log()
    install(server_args.fastapi_root_path)
    configure(http_server.app, face, gate, internal_states, look, server_args.served_model_name or "")
    watch_start(
        http_server.app, ready.is_set, partial(ending.on_early_end, server_args.host, server_args.port)
    )
    if not server_args.debug_tensor_dump_input_file:
        http_server.kill_process_tree = lambda *_: ending.on_failed_warm_up(gate.draining())
    http_server._freeze_gc_after_server_warmup = once_it_listens(http_server._freeze_gc_after_server_warmup)
    http_server.launch_server(
        server_args,
        init_tokenizer_manager_func=init,
        run_scheduler_process_func=partial(children.run_scheduler_process, options=options),
        run_detokenizer_process_func=children.run_detokenizer_process,
        launch_callback=warmed_up,
    )
