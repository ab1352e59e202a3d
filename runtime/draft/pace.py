"""How many tokens to draft next for one request, from what the target accepted so far."""

from dataclasses import dataclass

FIRST_REST = 4
LONGEST_REST = 64
MISSES = 3


@dataclass
class Pace:
    """Width goes up by one after a draft that stood whole and down to what stood otherwise; drafts that all miss
    in a row lead to a rest, each rest twice as long as the last, after which one token is tried.

    Attributes:
        most: tokens to draft at most.
        width: tokens to draft next.
        rest: steps still to be taken without drafting.
        proposed, accepted: totals, tokens.
    """

    most: int
    width: int = 0
    rest: int = 0
    proposed: int = 0
    accepted: int = 0
    _next_rest: int = FIRST_REST
    _misses: int = 0

    def __post_init__(self) -> None:
        self.width = self.width or self.most

    def next(self) -> int:
        """Tokens to draft in this step; a step of rest passes with the call."""
        if self.rest:
            self.rest -= 1
            return 0
        return self.width

    def record(self, proposed: int, accepted: int) -> None:
        """What became of a draft."""
        assert 0 <= accepted <= proposed
        self.proposed += proposed
        self.accepted += accepted
        if proposed == 0:
            return
        if accepted == proposed:
            self.width = min(self.width + 1, self.most)
        else:
            self.width = max(accepted + 1, 1) if accepted + 1 < self.width else self.width
        if accepted:
            self._misses, self._next_rest = 0, FIRST_REST
            return
        self._misses += 1
        if self._misses >= MISSES:
            self.rest, self.width = self._next_rest, 1
            self._next_rest = min(2 * self._next_rest, LONGEST_REST)
            # After the rest, one miss is enough for the next one.
            self._misses = MISSES - 1
