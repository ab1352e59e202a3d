"""Retention policies: which KV entries a head keeps after prefill. ``docs/add-a-retention-policy.md`` adds one.

The names are those of the request field ``retention_policy``. This file imports nothing heavy: the HTTP face reads
the names, the engine loads the policies.
"""

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

RETENTION_POLICIES: dict[str, str] = {
    "saliency": "fathom.runtime.fastkv.saliency:Saliency",
    "streaming": "fathom.runtime.fastkv.streaming:Streaming",
    "random": "fathom.runtime.fastkv.random_control:Random",
}
"""Name in a request: module and class."""


@dataclass(frozen=True)
class RetentionContext:
    """What a policy may look at: one request at one layer, after its prefill.

    Attributes:
        positions: [ranked] int64, original positions of the layer's tokens before the window: those to rank.
        kv_heads: KV heads of the layer on this device.
        layer: layer index, counted from 0.
        seed: the request's own number; equal requests with equal seeds keep the same entries.
        saliency: [kv_heads, ranked] float32 from the window's attention; None unless the policy asks for it.
    """

    positions: "torch.Tensor"
    kv_heads: int
    layer: int
    seed: int = 0
    saliency: "torch.Tensor | None" = None


class RetentionPolicy(Protocol):
    """One pure method. Budget, window, top-k and the copy of the kept entries are not a policy's business."""

    @property
    def needs_saliency(self) -> bool:
        """Whether the engine has to score the window's attention for it."""

    def scores(self, context: RetentionContext) -> "torch.Tensor":
        """[kv_heads, ranked] floating, on the positions' device: higher is kept sooner, ties to the lower index."""


def load_policy(name: str) -> RetentionPolicy:
    """The policy of that name.

    Raises:
        ValueError: when there is none.
    """
    if name not in RETENTION_POLICIES:
        raise ValueError(f"no retention policy {name!r}; known: {', '.join(RETENTION_POLICIES)}")
    module, _, attribute = RETENTION_POLICIES[name].partition(":")
    return getattr(import_module(module), attribute)()


def propagation_problem(cutoff: int | str, layer: int | None) -> str | None:
    """Why no tokens can be selected above a layer, with what is legal; None when they can.

    Args:
        cutoff: SPEED's, or a word for none.
        layer: of the selection; 0 where the model has none, None while that is unknown.
    """
    if layer == 0:
        return "has no boundary between spans to select at; legal: 1.0"
    if layer is not None and isinstance(cutoff, int) and cutoff <= layer:
        problem = f"selects above layer {layer}, where depth_cutoff {cutoff} leaves nothing"
        return f"{problem}; legal: 1.0, or a depth_cutoff above {layer}"
    return None
