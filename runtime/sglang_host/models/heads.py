"""The output's matrix, where it is not the input's: of models that SGLang gives one and never asks it."""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from sglang.srt.model_loader.weight_utils import default_weight_loader

ARCHITECTURES = ("Gemma3ForCausalLM",)
NAME = "lm_head.weight"


def register() -> None:
    """Have SGLang's classes load theirs and use it. In processes that load models, before they do."""
    from sglang.srt.models.registry import ModelRegistry

    for architecture in ARCHITECTURES:
        ModelRegistry.models[architecture] = with_head(ModelRegistry.models[architecture])


def with_head(model: type[torch.nn.Module]) -> type[torch.nn.Module]:
    """A class of SGLang's that has its own head where it is not tied to the input."""

    def init(self: Any, *args: Any, **options: Any) -> None:
        model.__init__(self, *args, **options)
        if not self.config.tie_word_embeddings:
            self.logits_processor.forward = partial(_of_head, self.logits_processor.forward, self.lm_head)

    def load_weights(
        self: Any, weights: Iterable[tuple[str, torch.Tensor]], *args: Any, **options: Any
    ) -> Any:
        if not self.config.tie_word_embeddings:
            weights = _loading(self.lm_head.weight, weights)
        return model.load_weights(self, weights, *args, **options)

    members = {"__init__": init, "load_weights": load_weights, "__module__": model.__module__}
    return type(model.__name__, (model,), members)


def _of_head(
    forward: Callable[..., Any],
    head: torch.nn.Module,
    ids: Any,
    hidden: Any,
    _: Any,
    *args: Any,
    **options: Any,
) -> Any:
    """Logits by this head, whichever is given."""
    return forward(ids, hidden, head, *args, **options)


def _loading(
    head: torch.Tensor, weights: Iterable[tuple[str, torch.Tensor]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights, the head's loaded on the way."""
    for name, tensor in weights:
        if name == NAME:
            getattr(head, "weight_loader", default_weight_loader)(head, tensor)
        yield name, tensor
