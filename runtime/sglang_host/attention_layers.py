"""What the attention layers of a model ask for, whatever SGLang's classes tell of it."""

from typing import TYPE_CHECKING

import torch
from sglang.srt.layers.radix_attention import RadixAttention

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner


def layers_of(model: torch.nn.Module) -> list[RadixAttention]:
    """Of a model that Transformers implements, too: SGLang keeps their attention beside the modules."""
    beside = getattr(model, "attention_instances", {}).values()
    return [each for each in (*model.modules(), *beside) if isinstance(each, RadixAttention)]


def window_of(runner: "ModelRunner") -> int:
    """Tokens of the longest sliding window of any layer; 0 where none has one.

    SGLang's own number is that of classes which offer it; those of Cohere2, and of Transformers' models, give their
    layers windows and do not.
    """
    return max(
        runner.sliding_window_size or 0, *(each.sliding_window_size for each in layers_of(runner.model)), 0
    )


def refuse_scaling(model: torch.nn.Module, name: str) -> None:
    """Refuse a model whose attention weighs queries by their positions.

    Raises:
        NotImplementedError: with the backend's name.
    """
    if any(layer.use_irope or layer.xai_temperature_len > 0 for layer in layers_of(model)):
        raise NotImplementedError(f"the {name} attention backend does not scale attention by positions")
