"""Requests that control the engine, seen from HTTP: what failed in the engine is status 400 with the reason."""

import logging
import os
from typing import Any

from fastapi import Query
from sglang.srt.entrypoints import http_server
from sglang.srt.environ import envs
from sglang.srt.managers.communicator import FanOutCommunicator
from sglang.srt.managers.io_struct import ConfigureLoggingReq, ProfileReq, ProfileReqType
from sglang.srt.utils.auth import AuthLevel, auth_level

from fathom.runtime.sglang_host.scheduling.control import reason_of
from fathom.server.answers.errors import ControlError
from fathom.server.command.checks import StartError
from fathom.server.command.files import check_folder

MOST_LOGGED = 3
"""SGLang's highest level of logging requests (``--log-requests-level``)."""
LOG_FORMATS = ("text", "json")
ACTIVITIES, OF_A_GPU = ("CPU", "GPU"), ("MEM", "CUDA_PROFILER")
"""What a profile can be of."""


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


def check_logging(obj: ConfigureLoggingReq) -> None:
    """See that a request of ``/configure_logging`` asks for what there is.

    Raises:
        ControlError: naming the field and what is legal.
    """
    known = logging.getLevelNamesMapping()
    if obj.log_level is not None and obj.log_level.upper() not in known:
        legal = ", ".join(name.lower() for name in known)
        raise ControlError(f"log_level must be one of {legal}, got {obj.log_level[:40]!r}")
    level, form = obj.log_requests_level, obj.log_requests_format
    if level is not None and not 0 <= level <= MOST_LOGGED:
        raise ControlError(f"log_requests_level must be an integer in [0, {MOST_LOGGED}], got {level}")
    if form is not None and form not in LOG_FORMATS:
        raise ControlError(f"log_requests_format must be {' or '.join(LOG_FORMATS)}, got {form[:40]!r}")
    if (threshold := obj.dump_requests_threshold) is not None and threshold < 1:
        raise ControlError(f"dump_requests_threshold must be an integer of 1 or more, got {threshold}")
    for field in ("dump_requests_folder", "crash_dump_folder"):
        _check_folder(field, getattr(obj, field))


def check_profile(req: ProfileReq, on_gpu: bool) -> None:
    """See that a request of ``/start_profile`` asks for what there is; one of ``/stop_profile`` always does.

    Raises:
        ControlError: naming the field and what is legal.
    """
    if req.req_type != ProfileReqType.START_PROFILE:
        return
    _check_folder("output_dir", os.path.expanduser(req.output_dir or ""))
    legal = (*ACTIVITIES, *OF_A_GPU) if on_gpu else ACTIVITIES
    if (asked := req.activities) is not None and not (asked and set(asked) <= set(legal)):
        raise ControlError(
            f"activities must be a list of one or more of {', '.join(legal)}, got {asked}"[:200]
        )
    for field, least in (("num_steps", 1), ("start_step", 0)):
        if (value := getattr(req, field)) is not None and value < least:
            raise ControlError(f"{field} must be an integer of {least} or more, got {value}")
    if req.profile_by_stage and req.num_steps is None:
        raise ControlError("profile_by_stage needs num_steps, the number of steps of each stage")
    if req.profile_stages is not None and not envs.SGLANG_PROFILE_V2.get():
        raise ControlError("profile_stages needs a server that was started with SGLANG_PROFILE_V2=1")
    for field in ("profile_prefix", "profile_id"):
        if os.sep in (getattr(req, field) or ""):
            raise ControlError(f"{field} is part of a file's name: it must be without {os.sep}")


def _check_folder(field: str, folder: str | None) -> None:
    if folder:
        try:
            check_folder(field, folder)
        except StartError as error:
            raise ControlError(str(error)) from None


@auth_level(AuthLevel.ADMIN_OPTIONAL)
async def reset_prefix_cache(timeout: float = Query(60.0, ge=0.0)) -> Any:
    """SGLang's ``/flush_cache``, which waits for as many seconds until no request is left."""
    return await http_server.flush_cache(timeout)


def install() -> None:
    """Serve vLLM's name for emptying the prefix cache."""
    http_server.app.add_api_route("/reset_prefix_cache", reset_prefix_cache, methods=["POST"])
