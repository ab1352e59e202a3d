"""Penalties and minimal lengths of a request that was taken out of the batch go on from what it has said.

SGLang counts a request's tokens from the last time that it was let in: after a retraction it may repeat itself, and
has its minimal length once more before it.

Nor does a minimal length leave nothing that may be said: where a grammar has come to its end, and allows only what
ends the answer, the answer ends. SGLang forbids that by minus infinity, as a grammar does all the rest, and makes
probabilities of it that are no numbers, of which a draw with top-k, top-p or min-p ends the engine.

And penalties that are added come before those that scale, as SGLang has it where steps overlap. Elsewhere it takes
them in the order of a set of classes, which is another one in each process.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.sampling import sampling_batch_info
from sglang.srt.sampling.penaltylib import (
    BatchedFrequencyPenalizer,
    BatchedMinNewTokensPenalizer,
    BatchedPenalizerOrchestrator,
    BatchedPresencePenalizer,
    BatchedRepetitionPenalizer,
    repetition_penalty,
)

from fathom.runtime.staging import send

UNWANTED = -1e30
"""What makes a logit less likely than any that it is not added to, and is a number at any legal temperature."""


def frequency(penalizer: Any, row: int, said: torch.Tensor) -> None:
    each = penalizer.frequency_penalties[row].expand(len(said))
    penalizer.cumulated_frequency_penalties[row].index_add_(0, said, each)


def presence(penalizer: Any, row: int, said: torch.Tensor) -> None:
    penalizer.cumulated_presence_penalties[row, said] = penalizer.presence_penalties[row]


def repetition(penalizer: Any, row: int, said: torch.Tensor) -> None:
    penalizer.cumulated_repetition_penalties[row, said] = penalizer.repetition_penalties[row]


def least(penalizer: Any, row: int, said: torch.Tensor) -> None:
    penalizer.len_output_tokens[row] = len(said)


@dataclass(frozen=True)
class Count:
    """What a penalizer knows of the tokens that a request has put out, noted at once.

    Attributes:
        parameter: of requests that ask for it; neutral: its value where they do not.
    """

    parameter: str
    neutral: float
    note: Callable[[Any, int, torch.Tensor], None]


COUNTS: Mapping[type[Any], Count] = {
    BatchedFrequencyPenalizer: Count("frequency_penalty", 0, frequency),
    BatchedPresencePenalizer: Count("presence_penalty", 0, presence),
    BatchedRepetitionPenalizer: Count("repetition_penalty", 1, repetition),
    BatchedMinNewTokensPenalizer: Count("min_new_tokens", 0, least),
}
"""By SGLang's penalizer."""

_PREPARE = {penalizer: penalizer._prepare for penalizer in COUNTS}


def prepare(self: Any) -> None:
    """SGLang's ``_prepare``, and then what was said before."""
    _PREPARE[type(self)](self)
    count = COUNTS[type(self)]
    for row, request in enumerate(self.orchestrator.reqs()):
        if request.output_ids and getattr(request.sampling_params, count.parameter) != count.neutral:
            said = send(torch.tensor(list(request.output_ids)), self.orchestrator.device)
            count.note(self, row, said)
    if isinstance(self, BatchedMinNewTokensPenalizer):
        self.stop_token_penalties.clamp_(min=UNWANTED)


_begin = BatchedPenalizerOrchestrator.__init__


def begin(self: Any, *given: Any, **named: Any) -> None:
    """SGLang's ``__init__``; what scales comes last."""
    _begin(self, *given, **named)
    self.penalizers = dict(
        sorted(self.penalizers.items(), key=lambda item: (item[0].is_multiplicative, item[0].__name__))
    )


def install(native: bool) -> None:
    """Put the functions in SGLang's places; on a platform of ours, also a repetition penalty that is not compiled.

    SGLang's is: everybody would wait for the compiler when the first request comes that asks for one.
    """
    for penalizer in COUNTS:
        penalizer._prepare = prepare
    BatchedPenalizerOrchestrator.__init__ = begin
    if native:
        scale = inspect.unwrap(repetition_penalty.apply_scaling_penalties)
        for module in (repetition_penalty, sampling_batch_info):
            module.apply_scaling_penalties = scale
