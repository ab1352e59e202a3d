"""What the attention layers of a model ask for, whatever SGLang's classes tell of it."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from sglang.srt.layers.radix_attention import RadixAttention

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner


def layers_of(model: torch.nn.Module) -> list[RadixAttention]:
    """Of a model that Transformers implements, too: SGLang keeps their attention beside the modules."""
    beside = getattr(model, "attention_instances", {}).values()
    return [each for each in (*model.modules(), *beside) if isinstance(each, RadixAttention)]


def is_windowed(layer: RadixAttention) -> bool:
    """Whether the layer's tokens see some of the positions before them only."""
    return layer.sliding_window_size >= 0


def windowed(model: torch.nn.Module) -> frozenset[int]:
    """The layers that have a sliding window, counted from 0."""
    return frozenset(each.layer_id for each in layers_of(model) if is_windowed(each))


def windows_of(model: torch.nn.Module, spans: int, span_of: Callable[[int], int]) -> list[list[int]]:
    """By span the sizes of its layers' sliding windows: earlier positions that a token sees, ascending."""
    found: list[set[int]] = [set() for _ in range(spans)]
    for layer in filter(is_windowed, layers_of(model)):
        found[span_of(layer.layer_id)].add(layer.sliding_window_size)
    return [sorted(sizes) for sizes in found]


def shares_kv(model: torch.nn.Module) -> bool:
    """Whether keys and values of a layer are read by other attention layers too."""
    numbers = [layer.layer_id for layer in layers_of(model)]
    return len(set(numbers)) < len(numbers)


def has_whole_layer(model: torch.nn.Module) -> bool:
    """Whether some layer's tokens see all positions before them."""
    return not all(map(is_windowed, layers_of(model)))


def window_of(runner: "ModelRunner") -> int:
    """Tokens of the longest sliding window of any layer; 0 where none has one.

    SGLang's own number is that of classes which offer it; those of Cohere2, and of Transformers' models, give their
    layers windows and do not.
    """
    return max(
        runner.sliding_window_size or 0, *(each.sliding_window_size for each in layers_of(runner.model)), 0
    )


def refuse_kv_scales(model: torch.nn.Module, most: float) -> None:
    """Refuse a model with keys or values that 8 bits without scales cannot hold.

    A scale, the checkpoint's or that of ``--quantization-param-path``, maps the largest number to that of e4m3.

    Args:
        most: the largest number of the type that is stored.

    Raises:
        NotImplementedError: with the largest number that the scales tell of.
    """
    scales = [scale for each in layers_of(model) for scale in (each.k_scale, each.v_scale)]
    largest = torch.finfo(torch.float8_e4m3fn).max * max(
        (float(scale) for scale in scales if scale is not None), default=0.0
    )
    if largest > most:
        raise NotImplementedError(
            f"KV of 8 bits is stored without scales, up to {most:g}, and by its scales this model's goes up to "
            f"{largest:g}; use --kv-cache-dtype bfloat16"
        )


def refuse_scaling(model: torch.nn.Module, name: str) -> None:
    """Refuse a model whose attention weighs queries by their positions.

    Raises:
        NotImplementedError: with the backend's name.
    """
    if any(layer.use_irope or layer.xai_temperature_len > 0 for layer in layers_of(model)):
        raise NotImplementedError(f"the {name} attention backend does not scale attention by positions")
