"""A request from whose logits no token can be taken ends with an error.

Where a model's weights or activations overflow, or a grammar comes to where it allows nothing, SGLang puts out any
tokens, with status 200. The rows are marked on the device beside the tokens, and reach the host in the same copy:
nothing waits for them.
"""

import logging
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import torch
from sglang.srt.managers import utils
from sglang.srt.managers.schedule_batch import FINISH_ABORT, ScheduleBatch
from sglang.srt.managers.utils import GenerationBatchResult

logger = logging.getLogger(__name__)

REASON = "the model's logits are no numbers (NaN or infinite)"
MARKS = "unsound"
"""The member of SGLang's output of logits that holds the marks."""
NO_TOKEN = "the grammar came to where it allows no token"


@dataclass(frozen=True)
class Fault:
    """Why requests with marked rows end, and how loud the log says so."""

    reason: str
    status: HTTPStatus
    kind: str
    level: int


FAULTS = {
    MARKS: Fault(REASON, HTTPStatus.INTERNAL_SERVER_ERROR, "InternalServerError", logging.ERROR),
    "forbidden": Fault(NO_TOKEN, HTTPStatus.BAD_REQUEST, "BadRequestError", logging.INFO),
}
"""By the member of SGLang's output of logits that holds their marks."""

_copy_to_cpu = GenerationBatchResult.copy_to_cpu


def mark(output: Any, has_grammar: bool = False) -> None:
    """Mark the rows of an output whose logits no token can be taken from, before the sampler writes over them."""
    most = output.next_token_logits.amax(-1)
    setattr(output, MARKS, ~(most < float("inf")))
    if has_grammar:
        output.forbidden = most == float("-inf")


def copy_to_cpu(self: GenerationBatchResult, *args: Any, **kwargs: Any) -> None:
    """SGLang's copy of a result to the host, with the marks."""
    for name in FAULTS:
        marks = getattr(self.logits_output, name, None)
        if isinstance(marks, torch.Tensor):
            setattr(self.logits_output, name, utils._async_d2h(marks))
    _copy_to_cpu(self, *args, **kwargs)


def end(batch: ScheduleBatch, output: Any) -> None:
    """End the requests of a step, whose result is on the host, that have marked rows; nobody finds their KV."""
    for name, fault in FAULTS.items():
        marks = getattr(output, name, None)
        if marks is None or len(marks) != len(batch.reqs) or not any(marked := marks.tolist()):
            continue
        for request, is_marked in zip(batch.reqs, marked, strict=True):
            over = request.finished() or request.is_retracted or request.inflight_middle_chunks > 0
            if is_marked and not over and request.beam_group is None:
                logger.log(fault.level, "request %r: %s", request.rid[:80], fault.reason)
                request.to_finish = FINISH_ABORT(fault.reason, fault.status, fault.kind)
                request.skip_radix_cache_insert = True


def install() -> None:
    """Put the copy in SGLang's place."""
    GenerationBatchResult.copy_to_cpu = copy_to_cpu
