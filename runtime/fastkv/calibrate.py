"""Where to put the selection layer: how far final hidden states move for each candidate (FastKV, section 4.3)."""

from collections.abc import Mapping

import torch


def hidden_distance(full: torch.Tensor, selected: torch.Tensor) -> float:
    """Mean over the inputs of the squared L2 distance ``‖H - H'‖² / ‖H‖²`` (Eq. 3, normalised as in Figure 3).

    Args:
        full: [inputs, hidden] final hidden state of the last prompt token, all tokens in all layers.
        selected: [inputs, hidden], the same with propagation at one candidate layer.

    Raises:
        ValueError: when the shapes differ, there is no input, or a state of ``full`` is zero.
    """
    if full.shape != selected.shape or full.dim() != 2 or not len(full):
        raise ValueError(
            f"hidden states {list(full.shape)} and {list(selected.shape)}: not [inputs, hidden] twice"
        )
    norms = full.double().square().sum(1)
    if not bool((norms > 0).all()):
        raise ValueError("a hidden state of the full run is zero or not a number")
    return float(((full.double() - selected.double()).square().sum(1) / norms).mean())


def recommend_layer(distances: Mapping[int, float], max_layer: int, tolerance: float = 0.0) -> int:
    """The candidate layer up to ``max_layer`` whose output stays closest to the full run (Eq. 3).

    Args:
        distances: distance per candidate layer, from :func:`hidden_distance`.
        max_layer: L_max, so that enough layers are left to save work in.
        tolerance: take the earliest layer within this absolute distance of the best one; 0 is Eq. 3, ties to the
            earlier layer.

    Raises:
        ValueError: when no candidate lies at or below ``max_layer``, or its distance is not a number.
    """
    candidates = {layer: value for layer, value in distances.items() if layer <= max_layer}
    if not candidates or any(value != value for value in candidates.values()):
        raise ValueError(f"no usable candidate up to layer {max_layer} among {sorted(distances)}")
    best = min(candidates.values())
    return min(layer for layer, value in candidates.items() if value <= best + tolerance)
