"""Requests that control the engine, seen from HTTP: what failed in the engine is status 400 with the reason."""

from typing import Any

from sglang.srt.managers.communicator import FanOutCommunicator

from fathom.runtime.sglang_host.control import reason_of
from fathom.server.errors import ControlError


class ControlCommunicator(FanOutCommunicator):
    """Asks the engine's processes, and tells the caller when one of them could not do it."""

    async def __call__(self, obj: Any) -> list[Any]:
        """The answers.

        Raises:
            ControlError: when the request failed.
        """
        answers = await super().__call__(obj)
        for answer in answers:
            if (reason := reason_of(answer)) is not None:
                raise ControlError(reason)
        return answers
