"""Requests that control the engine: one that fails gets an answer that says so, and the engine lives on.

In SGLang an exception in the handler of such a request ends the scheduler, and with it everybody's generations.
"""

import logging
import traceback
from typing import Any

import torch
from sglang.srt.managers import io_struct
from sglang.srt.managers.io_struct import (
    AbortReq,
    BatchTokenizedEmbeddingReqInput,
    BatchTokenizedGenerateReqInput,
    ShutdownReq,
    TokenizedEmbeddingReqInput,
    TokenizedGenerateReqInput,
)

logger = logging.getLogger(__name__)

NOT_GUARDED = (
    TokenizedGenerateReqInput,
    TokenizedEmbeddingReqInput,
    BatchTokenizedGenerateReqInput,
    BatchTokenizedEmbeddingReqInput,
    AbortReq,
    ShutdownReq,
)
"""Requests whose failure leaves generations in an unknown state."""

FAILED = "fathom failed: "
"""How the ``rid`` of an answer begins that says that its request failed; the reason follows."""

UNSUCCESSFUL: dict[str, Any] = {
    "success": False,
    "updated": False,
    "parameter": None,
    "internal_state": {},
    "response": [],
}
"""Values of the fields that an answer must have."""


class GuardedDispatcher:
    """SGLang's dispatcher of requests to their handlers, whose control requests may fail.

    Attributes:
        scheduler: whose requests these are.
    """

    def __init__(self, dispatcher: Any, scheduler: Any) -> None:
        self._dispatcher = dispatcher
        self._scheduler = scheduler

    def __call__(self, request: Any) -> Any:
        """What the handler answers; for a control request that failed, the answer that says so, if it has any.

        Raises:
            RuntimeError: when a request failed in some of a model's processes only, which then differ.
        """
        if isinstance(request, NOT_GUARDED):
            return self._dispatcher(request)
        answer, error = None, None
        try:
            answer = self._dispatcher(request)
        except Exception as failure:
            error = failure
        if not self._all_agree(error is not None):
            raise RuntimeError(f"{type(request).__name__} failed in some processes only") from error
        if error is None:
            return answer
        place = traceback.extract_tb(error.__traceback__)[-1]
        logger.error("%s failed at %s:%s: %r", type(request).__name__, place.filename, place.lineno, error)
        return failure_of(request, f"{error} ({type(error).__name__})")

    def _all_agree(self, failed: bool) -> bool:
        """Whether the request failed in all processes of the model, or in none."""
        group = self._scheduler.tp_cpu_group
        size = torch.distributed.get_world_size(group)
        if size == 1:
            return True
        count = torch.tensor(int(failed))
        torch.distributed.all_reduce(count, group=group)
        return int(count) in (0, size)


def failure_of(request: Any, reason: str) -> Any:
    """The answer to a control request that failed; None for one that is not answered."""
    kind = getattr(io_struct, type(request).__name__.removesuffix("Input") + "Output", None)
    if kind is None:
        return None
    values = UNSUCCESSFUL | {"message": reason, "error_message": reason}
    values["session_id"] = getattr(request, "session_id", None)
    return kind(
        rid=FAILED + reason, **{name: values[name] for name in kind.__struct_fields__ if name in values}
    )


def reason_of(answer: Any) -> str | None:
    """Why a control request failed, by its answer; None where it did not."""
    rid = answer.rid or ""
    return rid.removeprefix(FAILED) if rid.startswith(FAILED) else None
