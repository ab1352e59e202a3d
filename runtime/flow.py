"""READ FIRST. One engine step, one call per stage, in the order a request meets them.

The scheduler decides *which* requests run; this file is what happens to them in one step. A stage works on the
whole batch. The engine behind the stages is :class:`StepHost`, implemented by ``sglang_host/worker.py``.
"""

from contextlib import AbstractContextManager
from typing import Any, Protocol


class StepHost(Protocol):
    """What a step needs from the engine. ``batch`` and the result are the engine's own types."""

    def open_accounts(self, batch: Any) -> list[Any]:
        """The account of each request in the batch, with the policy the request came with."""

    def draft(self, batch: Any) -> None:
        """Let the draft model read what is new, judge the prompts that are complete, and propose tokens."""

    def phases(self, batch: Any) -> AbstractContextManager[None]:
        """Within it, a decoding request reads what its phase says (``decode.py``): everything, or a selection."""

    def narrows(self, batch: Any) -> bool:
        """Whether rows of the batch leave it below its last layer: a policy drops them, or nobody reads more than
        their keys and values."""

    def forward(self, batch: Any, **options: Any) -> Any:
        """Run the batch through all layers and sample: the dense path, and every decode step."""

    def climb(self, batch: Any, **options: Any) -> Any:
        """Run the batch span by span, dropping rows in between (``staircase.py``), sample, and settle proposals."""

    def proposed(self) -> bool:
        """Whether the draft proposed tokens in this step."""

    def verify(self, batch: Any, **options: Any) -> Any:
        """Run a decode batch with the proposed tokens beside it, sample, and settle what stands."""

    def follow(self, batch: Any, result: Any, **options: Any) -> Any:
        """Run the decode steps of the batch that follow before the scheduler is asked again, if there are any."""

    def close_accounts(self, batch: Any, accounts: list[Any]) -> None:
        """Write down what this step computed for each request."""


def step(host: StepHost, batch: Any, **options: Any) -> Any:
    """Run one scheduled batch (prefill chunk, decode step, or a mix) and return the engine's result."""
    accounts = host.open_accounts(batch)
    host.draft(batch)
    with host.phases(batch):
        if host.narrows(batch):
            result = host.climb(batch, **options)
        else:
            result = host.verify(batch, **options) if host.proposed() else host.forward(batch, **options)
    result = host.follow(batch, result, **options)
    host.close_accounts(batch, accounts)
    return result
