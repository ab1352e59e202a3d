"""Which tokens go on above the selection layer, and which KV entries each head keeps.

Tokens of a layer are counted by their index among those that reached it: ``0 .. present - 1`` in ascending
position, the window last. Scores rank the ``present - window`` tokens before the window; they come from
``kernels/window_scores.row_mean_scores`` and ``pool_saliency``.
"""

from dataclasses import dataclass

import torch

from fathom.runtime.fastkv.policies import RetentionContext, RetentionPolicy
from fathom.runtime.retain import kept_count, top_indices
from fathom.runtime.staging import send


@dataclass(frozen=True)
class Sizes:
    """Token counts of one request at one layer.

    Attributes:
        entered: M, tokens that entered the model: the base of every rate, at every layer.
        present: tokens that reached this layer, at most ``entered``.
        window: last tokens that always stay; fewer where fewer are present.
    """

    entered: int
    present: int
    window: int

    def __post_init__(self) -> None:
        if not 1 <= self.present <= self.entered or self.window < 1:
            raise ValueError(f"{self.present} of {self.entered} tokens present, window of {self.window}")

    @property
    def ranked(self) -> int:
        """Tokens before the window."""
        return max(self.present - self.window, 0)

    def budget(self, rate: float) -> int:
        """Tokens that stay: ⌈rate · entered⌉ with the window in it, at least the window, at most all."""
        return min(max(kept_count(rate, self.entered), self.window), self.present)


def propagated_tokens(
    saliency: torch.Tensor, sizes: Sizes, rate: float, forced: torch.Tensor | None = None
) -> torch.Tensor:
    """The tokens that go on above the selection layer (section 4.2).

    Args:
        saliency: [1, ranked] or [ranked], averaged over all heads (Eq. 2).
        sizes: at the selection layer.
        rate: share of the tokens that entered the model.
        forced: [f] distinct indices that go on whatever their score, because a deeper step needs them; they count
            in the budget, and where they and the window exceed it, all of them stay. They may lie in the window. On
            the host, wherever the scores are.

    Returns:
        [kept] int64, ascending indices among the layer's tokens; the last ``window`` ones are always there.

    Raises:
        ValueError: when the scores do not fit the sizes.
    """
    return _with_window(saliency.reshape(1, -1), sizes, sizes.budget(rate), forced)[0]


def retained_entries(scores: torch.Tensor, sizes: Sizes, rate: float) -> torch.Tensor:
    """The entries that each KV head keeps at one layer (section 4.4).

    Args:
        scores: [kv_heads, ranked] from a retention policy.
        sizes: at this layer; above the selection layer fewer tokens are present, and the budget is the same.
        rate: share of the tokens that entered the model.

    Returns:
        [kv_heads, kept] int64, ascending indices among the layer's tokens; each row ends with the window.

    Raises:
        ValueError: when the scores do not fit the sizes.
    """
    return _with_window(scores, sizes, sizes.budget(rate), None)


def retain(policy: RetentionPolicy, context: RetentionContext, sizes: Sizes, rate: float) -> torch.Tensor:
    """:func:`retained_entries` under a policy; ``context.positions`` are those of the ``sizes.ranked`` tokens."""
    return retained_entries(policy.scores(context), sizes, rate)


def _with_window(
    scores: torch.Tensor, sizes: Sizes, budget: int, forced: torch.Tensor | None
) -> torch.Tensor:
    rows, ranked = scores.shape
    if ranked != sizes.ranked:
        raise ValueError(f"{ranked} scores for {sizes.ranked} tokens before the window")
    if forced is not None:
        forced = send(forced[forced < ranked], scores.device)
    window = torch.arange(ranked, sizes.present, device=scores.device)
    best = top_indices(scores, budget - len(window), forced)
    return torch.cat([best, window.expand(rows, -1)], 1)
