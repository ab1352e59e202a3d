"""The end of a server: after SIGTERM running requests finish, up to a limit; a dead engine ends the process."""

import asyncio
import sys
import threading
import time
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from sglang.srt.managers.io_struct import AbortReq
from sglang.srt.managers.tokenizer_manager import SignalHandler

from fathom.server.requests.admission import Gate
from fathom.server.requests.context import Face
from fathom.server.tokenizer_manager import FathomTokenizerManager

ABORT_SECONDS = 10.0
"""How long the scheduler may take to give up what it runs when the limit is reached."""
CLOSE_SECONDS = 10.0
"""How long clients may take to read the last of their answers."""
SHUTTING_DOWN = "the server is shutting down; the answer was cut off at its time limit"


class ServingTokenizerManager(FathomTokenizerManager):
    """The tokenizer manager of a server that others operate."""

    def __init__(
        self,
        server_args: Any,
        port_args: Any,
        face: Face,
        gate: Gate,
        on_engine_death: Callable[[], None],
        leave: Callable[[], None],
    ):
        super().__init__(server_args, port_args, face)
        self._gate = gate
        self._leave = leave
        gate.draining = lambda: self.gracefully_exit
        self.signal_handler_class = _signal_handler(on_engine_death)

    async def sigterm_watchdog(self) -> None:
        """Wait for SIGTERM, let requests end, then stop as SGLang does."""
        while not self.gracefully_exit:
            await asyncio.sleep(0.2)
        await self._drain()
        await super().sigterm_watchdog()
        closer = threading.Timer(CLOSE_SECONDS, self._leave)
        closer.daemon = True
        closer.start()

    async def _drain(self) -> None:
        await self._until_empty(self._gate.drain_seconds)
        left = len(self.rid_to_state)
        if not left:
            return
        limit = f"{self._gate.drain_seconds:g} s"
        print(
            f"fathom serve: {left} generations were cut off {limit} after SIGTERM",
            file=sys.stderr,
            flush=True,
        )
        reason = {"type": "abort", "status_code": HTTPStatus.SERVICE_UNAVAILABLE, "message": SHUTTING_DOWN}
        self._dispatch_to_scheduler(
            AbortReq(abort_all=True, abort_message=SHUTTING_DOWN, finished_reason=reason)
        )
        await self._until_empty(ABORT_SECONDS)
        self.rid_to_state.clear()  # what is left here belongs to an engine that no longer answers

    async def _until_empty(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while (self.rid_to_state or self._gate.in_flight) and time.monotonic() < deadline:
            await asyncio.sleep(0.1)


def _signal_handler(on_engine_death: Callable[[], None]) -> type[SignalHandler]:
    class Handler(SignalHandler):
        def running_phase_sigquit_handler(self, signum: Any = None, frame: Any = None) -> None:
            """An engine process died: SGLang's watchdog said which, and asks to end."""
            self.tokenizer_manager.dump_requests_before_crash()
            on_engine_death()

    return Handler
