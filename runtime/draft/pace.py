"""How many tokens to draft next for one request, from what the target made of the draft so far."""

from dataclasses import dataclass

EXPECTED = 0.8
"""The acceptance that a request begins with; one token's worth of evidence."""
MEMORY = 0.9
"""What earlier evidence still counts for after one more token."""
FIRST_REST = 16
LONGEST_REST = 32


def speedup(acceptance: float, width: int, cost: float) -> float:
    """Tokens in a target step's time when ``width`` tokens are drafted per step.

    Source: Leviathan et al., 2023, "Fast inference from transformers via speculative decoding", Theorem 3.8.

    Args:
        acceptance: probability in [0, 1] that a drafted token stands, given that those before it do.
        cost: time of a draft step as a share of a target step's.
    """
    return sum(acceptance**i for i in range(width + 1)) / (1 + width * cost)


@dataclass
class Pace:
    """The width with the greatest expected speed-up; where that is none, the request rests.

    No request rests before it has drafted: what the draft would have said is a hint, and one hint is little. While
    it rests the draft reads nothing until :attr:`patience` tokens have piled up. It then reads them in one pass,
    which shows how many of them it would have foreseen; each look that changes nothing doubles the rest.

    Attributes:
        most: tokens to draft at most.
        cost: time of a draft step as a share of a target step's.
        stood, tried: evidence, in tokens; the older, the less it counts.
    """

    most: int
    cost: float
    stood: float = EXPECTED
    tried: float = 1.0
    _began: bool = False
    _rest: int = 0

    @property
    def acceptance(self) -> float:
        """Estimated probability that a drafted token stands."""
        return min(self.stood / self.tried, 1.0)

    @property
    def patience(self) -> int | None:
        """Tokens to wait for until the draft looks again; None while it drafts."""
        return self._rest or None

    def width(self) -> int:
        """Tokens to draft in the next step."""
        if self._rest:
            return 0
        # Where a wider draft gains nothing, the narrower one.
        widths = range(0 if self._began else 1, self.most + 1)
        return max(widths, key=lambda width: (speedup(self.acceptance, width, self.cost), -width))

    def record(self, proposed: int, accepted: int) -> None:
        """What became of a draft: the tokens that stood, and the first that did not."""
        assert 0 <= accepted <= proposed
        if proposed:
            self._began = True
            self.learn(accepted, min(accepted + 1, proposed))

    def learn(self, stood: float, tried: float) -> None:
        """Add evidence from ``tried`` tokens, of which ``stood`` were, or would have been, accepted."""
        kept = MEMORY**tried
        self.stood, self.tried = kept * self.stood + stood, kept * self.tried + tried
        rest, self._rest = self._rest, 0
        if self.width() == 0:
            self._rest = min(2 * rest, LONGEST_REST) if rest else FIRST_REST
