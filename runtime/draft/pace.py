"""How many tokens to draft next for one request, from what the target made of the draft so far."""

from dataclasses import dataclass, field
from itertools import accumulate

EXPECTED = 0.8
"""The acceptance that a request begins with; one token's worth of evidence."""
MEMORY = 0.9
"""What earlier evidence still counts for after one more token of a request."""
SHARED_MEMORY = 0.98
"""The same after one more token of any request."""
FIRST_REST = 16
LONGEST_REST = 64


def speedups(acceptance: float, most: int, cost: float) -> list[float]:
    """Tokens in a target step's time when 0 .. ``most`` tokens are drafted per step.

    Source: Leviathan et al., 2023, "Fast inference from transformers via speculative decoding", Theorem 3.8.

    Args:
        acceptance: probability in [0, 1] that a drafted token stands, given that those before it do.
        cost: time of a draft step as a share of a target step's.
    """
    tokens = accumulate(acceptance**i for i in range(most + 1))
    return [each / (1 + width * cost) for width, each in enumerate(tokens)]


@dataclass
class Evidence:
    """What the target made of drafted tokens; the older, the less it counts.

    Attributes:
        memory: what remains of it after one more token.
        stood, tried: in tokens.
    """

    memory: float
    stood: float = EXPECTED
    tried: float = 1.0

    @property
    def acceptance(self) -> float:
        """Estimated probability that a drafted token stands."""
        return min(self.stood / self.tried, 1.0)

    def add(self, stood: float, tried: float) -> None:
        """``tried`` more tokens, of which ``stood`` were, or would have been, accepted."""
        kept = self.memory**tried
        self.stood, self.tried = kept * self.stood + stood, kept * self.tried + tried


def shared_evidence() -> Evidence:
    """Of all requests of a draft."""
    return Evidence(SHARED_MEMORY)


@dataclass
class Pace:
    """The width with the greatest expected speed-up; where that is none, the request rests.

    A request drafts before it may rest, since what the draft would have said is a hint, and one hint is little; but
    where drafting has not paid for the requests before it, that hint decides. While a request rests the draft reads
    nothing until :attr:`patience` tokens have piled up. It then reads them in one pass, which shows how many of
    them it would have foreseen; each look that changes nothing doubles the rest.

    Attributes:
        most: tokens to draft at most.
        cost: time of a draft step as a share of a target step's.
        shared: evidence from all requests, this one's included.
        own: from this one.
    """

    most: int
    cost: float
    shared: Evidence = field(default_factory=shared_evidence)
    own: Evidence = field(default_factory=lambda: Evidence(MEMORY))
    _began: bool = False
    _rest: int = 0

    def __post_init__(self) -> None:
        self._doubtful = self.shared.acceptance <= self.cost
        if self._doubtful:
            self.own.stood = self.shared.acceptance

    @property
    def patience(self) -> int | None:
        """Tokens to wait for until the draft looks again; None while it drafts."""
        return self._rest or None

    def width(self) -> int:
        """Tokens to draft in the next step."""
        if self._rest:
            return 0
        best = self._best()
        if best == 0:
            self._rest = LONGEST_REST if self._doubtful and not self._began else FIRST_REST
        return best

    def _best(self) -> int:
        # Where a wider draft gains nothing, the narrower one.
        least = 0 if self._began or self._doubtful else 1
        found = speedups(self.own.acceptance, self.most, self.cost)
        return max(range(least, self.most + 1), key=found.__getitem__)

    def record(self, proposed: int, accepted: int) -> None:
        """What became of a draft: the tokens that stood, and the first that did not."""
        assert 0 <= accepted <= proposed
        if proposed:
            self._began = True
            self.learn(accepted, min(accepted + 1, proposed))

    def learn(self, stood: float, tried: float) -> None:
        """Add evidence from ``tried`` tokens, of which ``stood`` were, or would have been, accepted."""
        for evidence in (self.own, self.shared):
            evidence.add(stood, tried)
        rest, self._rest = self._rest, 0
        if rest and self._best() == 0:
            self._rest = min(2 * rest, LONGEST_REST)
