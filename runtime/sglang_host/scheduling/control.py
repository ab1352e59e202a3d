"""Requests that control the engine: one that fails gets an answer that says so, and the engine lives on.

In SGLang an exception in the handler of such a request ends the scheduler, and with it everybody's generations.
And where a model is spread over nodes, what one of them cannot read, SGLang takes for loaded if the first one can.
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
    LoadLoRAAdapterFromTensorsReqInput,
    LoadLoRAAdapterReqInput,
    LoRAUpdateOutput,
    ShutdownReq,
    TokenizedEmbeddingReqInput,
    TokenizedGenerateReqInput,
    UnloadLoRAAdapterReqInput,
    UpdateWeightFromDiskReqInput,
    UpdateWeightsFromDistributedReqInput,
    UpdateWeightsFromIPCReqInput,
    UpdateWeightsFromTensorReqInput,
)

from fathom.runtime.sglang_host.scheduling.adapter_turns import Late

logger = logging.getLogger(__name__)

NOT_GUARDED = (
    TokenizedGenerateReqInput,
    TokenizedEmbeddingReqInput,
    BatchTokenizedGenerateReqInput,
    BatchTokenizedEmbeddingReqInput,
    AbortReq,
    ShutdownReq,
    Late,
)
"""Requests whose failure leaves generations in an unknown state."""

OF_ADAPTERS = (LoadLoRAAdapterReqInput, LoadLoRAAdapterFromTensorsReqInput)
MEETING = (UpdateWeightsFromTensorReqInput, UpdateWeightsFromIPCReqInput)
"""Requests whose handlers wait, before they answer, for those of all other processes."""
LOADING = (*OF_ADAPTERS, *MEETING, UpdateWeightFromDiskReqInput, UpdateWeightsFromDistributedReqInput)
"""Requests that each process tries by itself, and whose answers say whether it could."""
IN_PARTS = (UpdateWeightsFromTensorReqInput, LoadLoRAAdapterFromTensorsReqInput)
"""Requests that bring a part for each process."""

ONLY_SOME = "not all processes of the model could load the adapter; the log says why"

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
        answer: Any = None
        error: Exception | None = None
        try:
            if isinstance(request, IN_PARTS):
                self._check_parts(request)
            answer = self._dispatcher(request)
        except Exception as failure:
            error = failure
            if isinstance(request, MEETING):
                self._meet()
        failed = error is not None or (isinstance(request, LOADING) and not answer.success)
        if not self._all_agree(failed):
            if not isinstance(request, OF_ADAPTERS):
                raise RuntimeError(f"{type(request).__name__} failed in some processes only") from error
            if error is None:
                return self._undone(request, answer)
        if error is None:
            return answer
        place = traceback.extract_tb(error.__traceback__)[-1]
        logger.error("%s failed at %s:%s: %r", type(request).__name__, place.filename, place.lineno, error)
        return failure_of(request, f"{error} ({type(error).__name__})")

    def _undone(self, request: Any, answer: LoRAUpdateOutput) -> LoRAUpdateOutput:
        """Let an adapter go that others could not load."""
        if not answer.success:
            logger.error("adapter %s was not loaded: %s", request.lora_name, answer.error_message)
            return answer
        unload = UnloadLoRAAdapterReqInput(lora_name=request.lora_name, lora_id=request.lora_id)
        without = self._scheduler.unload_lora_adapter(unload)
        return LoRAUpdateOutput(
            success=False, error_message=ONLY_SOME, loaded_adapters=without.loaded_adapters
        )

    def _check_parts(self, request: Any) -> None:
        parts, size = len(request.serialized_named_tensors), self._size()
        if parts < size:
            raise ValueError(f"serialized_named_tensors has {parts} parts, each of {size} devices needs one")

    def _size(self) -> int:
        return torch.distributed.get_world_size(self._scheduler.tp_cpu_group)

    def _meet(self) -> None:
        """Let go those who wait for a handler that failed."""
        if self._size() > 1:
            torch.distributed.barrier(group=self._scheduler.tp_cpu_group)

    def _all_agree(self, failed: bool) -> bool:
        """Whether the request failed in all processes of the model, or in none."""
        if (size := self._size()) == 1:
            return True
        count = torch.tensor(int(failed))
        torch.distributed.all_reduce(count, group=self._scheduler.tp_cpu_group)
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
