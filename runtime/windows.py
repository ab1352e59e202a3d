"""Sliding windows in numbers: which layers have one by a model's ``config.json``, and what tokens see there."""

from collections.abc import Mapping
from typing import Any

FULL_EVERY = {"cohere2": 4, "gemma3_text": 6, "olmo3": 4}
"""Types of models whose layers have the window that their ``config.json`` tells of, and, where it tells no more, at
every how many-th layer there is none."""


def windows_of(config: Mapping[str, Any]) -> tuple[int, ...]:
    """[layers] positions that a token sees at each layer, itself the last of them, 0 for all; empty where no layer
    has a window that the engine knows of.

    Args:
        config: of a text model.

    Raises:
        ValueError: for a window that is none, or kinds of another number of layers.
    """
    window, kind, layers = config.get("sliding_window"), config.get("model_type"), config["num_hidden_layers"]
    if window is None or kind not in FULL_EVERY:
        return ()
    if type(window) is not int or window < 1:
        raise ValueError(f"sliding_window must be a positive integer or null, got {window!r}")
    kinds = config.get("layer_types")
    if kinds is None:
        every = config.get("sliding_window_pattern") or FULL_EVERY[kind]
        return tuple(window if (layer + 1) % every else 0 for layer in range(layers))
    if len(kinds) != layers:
        raise ValueError(f"layer_types has {len(kinds)} entries for {layers} layers")
    return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)


def seen(window: int, share: float, retained: int, generated: int) -> float:
    """Entries that a decode step reads at a layer with a window.

    Args:
        share: of the prompt's tokens that the layer has computed, taken to be spread evenly.
        retained: prompt entries that it holds, its last ones; generated: entries behind them.
    """
    own = min(generated, window)
    return own + min(retained, share * (window - own))


def pairs(sight: float, tokens: int, whole: int) -> float:
    """Pairs of a query and a key where each of the last ``whole`` of ``tokens`` tokens sees ``sight`` of them at
    most, itself the last.
    """
    first = tokens - whole
    full = min(max(sight, first), tokens)  # tokens that see all before them
    return (full * (full + 1) - first * (first + 1)) / 2 + (tokens - full) * sight
