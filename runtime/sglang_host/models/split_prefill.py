"""A model's layers a few at a time, for models that SGLang cannot split itself.

Some of SGLang's models have ``forward_split_prefill``, which runs layers ``start .. end - 1`` on the hidden states
that the forward batch holds. It may refuse, be wrong, or be inherited by a model whose forward does more: that of
known models alone counts. Others get the same here, out of their own ``forward``: layers before the interval are
passed over, its first one is given the hidden states, its last one ends the pass.
"""

import inspect
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from fathom.runtime.sglang_host.seams import seams
from fathom.runtime.sglang_host.seams.split_seams import CHECKED, SEAMS_BY_ARCHITECTURE

if TYPE_CHECKING:
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch


logger = logging.getLogger(__name__)


PASSED_ON = ("residual", "kv_states")
"""What layers that are given it return too, in the order of their parameters."""


class _Reached(Exception):
    """The end of the interval: what follows is not to run."""


class SplitPrefill:
    """Takes the place of ``forward_split_prefill`` of one model.

    Args:
        model: SGLang's model; ``model.model.layers`` is run in order by its forward, each layer called with
            ``hidden_states``, with as much more as it returns, a ``residual`` and what nobody uses, and with what
            the forward makes of the rows' positions.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._forward = model.forward  # before a step puts its own there
        layers: Any = model.model.layers
        self._last = len(layers) - 1
        self._interval: tuple[int, int] | None = None
        self._batch: ForwardBatch
        for number, layer in enumerate(layers):
            layer.forward = self._step(number, layer.forward)

    def __call__(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        forward_batch: "ForwardBatch",
        split_interval: tuple[int, int],
    ) -> "LogitsProcessorOutput | None":
        """Run layers ``start .. end - 1``; the logits after the last layer, None before."""
        self._interval, self._batch = split_interval, forward_batch
        try:
            return self._forward(input_ids, positions, forward_batch)
        except _Reached:
            return None
        finally:
            self._interval = None

    def _step(self, number: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(forward)
        more = [name for name in signature.parameters if name in PASSED_ON]
        has_residual = "residual" in more

        def step(*args: Any, **kwargs: Any) -> Any:
            if self._interval is None:
                return forward(*args, **kwargs)
            (start, end), batch = self._interval, self._batch
            given = signature.bind(*args, **kwargs)
            if number < start:
                passed = tuple(given.arguments.get(name) for name in ("hidden_states", *more))
                return passed if more else passed[0]
            if number == start > 0:
                given.arguments["hidden_states"] = batch.hidden_states
                if has_residual:
                    given.arguments["residual"] = batch.residual
            found = forward(*given.args, **given.kwargs)
            if number == end - 1 < self._last:
                batch.hidden_states, batch.residual = found[:2] if has_residual else (found, None)
                raise _Reached
            return found

        return step


def possible(model: Any) -> bool:
    """Whether a model's layers can be run a few at a time."""
    return getattr(model, "forward_split_prefill", None) is not None


def distrust(model: torch.nn.Module) -> None:
    """Take SGLang's ``forward_split_prefill`` from a model of which it is not known to do what forward does."""
    whole, inner = type(model), type(getattr(model, "model", None))
    if not hasattr(whole, "forward_split_prefill"):
        return
    parts = whole.forward_split_prefill, whole.forward, getattr(inner, "forward", None)
    if not CHECKED.issuperset(getattr(each, "__module__", None) for each in parts):
        model.forward_split_prefill = None


def install(model: torch.nn.Module) -> None:
    """Give a model the means to run its layers a few at a time, if it lacks them and is known to allow it.

    Not where somebody else has put functions in the places of its layers' own: SGLang's offloading of weights puts
    its own back after each call, over ours.

    Raises:
        SeamError: when SGLang's class is not as we know it.
    """
    distrust(model)
    needed = SEAMS_BY_ARCHITECTURE.get(type(model).__name__)
    if needed is None or possible(model):
        return
    for seam in needed:
        seams.check(seam)
    if any("forward" in vars(layer) for layer in model.model.layers):
        logger.warning("this model's layers cannot be run a few at a time while --cpu-offload-gb runs them")
        return
    model.forward_split_prefill = SplitPrefill(model)
