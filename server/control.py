"""Requests that control the engine, seen from HTTP: what failed in the engine is status 400 with the reason."""

from typing import Any

from fastapi import Query
from sglang.srt.entrypoints import http_server
from sglang.srt.managers.communicator import FanOutCommunicator
from sglang.srt.utils.auth import AuthLevel, auth_level

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


@auth_level(AuthLevel.ADMIN_OPTIONAL)
async def reset_prefix_cache(timeout: float = Query(60.0, ge=0.0)) -> Any:
    """SGLang's ``/flush_cache``, which waits for as many seconds until no request is left."""
    return await http_server.flush_cache(timeout)


def install() -> None:
    """Serve vLLM's name for emptying the prefix cache."""
    http_server.app.add_api_route("/reset_prefix_cache", reset_prefix_cache, methods=["POST"])
