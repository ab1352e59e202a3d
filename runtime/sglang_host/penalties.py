"""Penalties and minimal lengths of a request that was taken out of the batch go on from what it has said.

SGLang counts a request's tokens from the last time that it was let in: after a retraction it may repeat itself, and
has its minimal length once more before it.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from sglang.srt.sampling.penaltylib import (
    BatchedFrequencyPenalizer,
    BatchedMinNewTokensPenalizer,
    BatchedPresencePenalizer,
    BatchedRepetitionPenalizer,
)

from fathom.runtime.staging import send

Said = tuple[int, torch.Tensor]
"""A request's row in the batch, and its tokens: [tokens] int64."""


def frequency(penalizer: Any, row: int, said: torch.Tensor) -> None:
    each = penalizer.frequency_penalties[row].expand(len(said))
    penalizer.cumulated_frequency_penalties[row].index_add_(0, said, each)


def presence(penalizer: Any, row: int, said: torch.Tensor) -> None:
    penalizer.cumulated_presence_penalties[row, said] = penalizer.presence_penalties[row]


def repetition(penalizer: Any, row: int, said: torch.Tensor) -> None:
    penalizer.cumulated_repetition_penalties[row, said] = penalizer.repetition_penalties[row]


def least(penalizer: Any, row: int, said: torch.Tensor) -> None:
    penalizer.len_output_tokens[row] = len(said)


COUNTS: Mapping[type[Any], Callable[[Any, int, torch.Tensor], None]] = {
    BatchedFrequencyPenalizer: frequency,
    BatchedPresencePenalizer: presence,
    BatchedRepetitionPenalizer: repetition,
    BatchedMinNewTokensPenalizer: least,
}
"""What each of SGLang's penalizers knows of the tokens that a request has put out, noted at once."""

_PREPARE = {penalizer: penalizer._prepare for penalizer in COUNTS}


def prepare(self: Any) -> None:
    """SGLang's ``_prepare``, and then what was said before."""
    _PREPARE[type(self)](self)
    for row, said in _said(self.orchestrator.reqs(), self.orchestrator.device):
        COUNTS[type(self)](self, row, said)


def _said(requests: Any, device: Any) -> Iterator[Said]:
    for row, request in enumerate(requests):
        if request.output_ids:
            yield row, send(torch.tensor(list(request.output_ids)), device)


def install() -> None:
    """Put the function in SGLang's place."""
    for penalizer in COUNTS:
        penalizer._prepare = prepare
