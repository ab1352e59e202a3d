"""How the entries that fast steps read are chosen: by the Selector, or by one of three controls."""

from dataclasses import dataclass

FUSED, FROZEN, RANDOM, NONE = SELECTION_RULES = ("fused", "frozen", "random", "none")
"""By the Selector at every refresh; by the Selector at the first refresh only; at random, anew at every refresh;
not at all, so that fast steps read sink and recent tokens.

The schedule of slow and fast steps is the same under all of them."""


@dataclass(frozen=True)
class Reading:
    """What the fast steps of one request read.

    Attributes:
        rule: one of ``SELECTION_RULES``.
        selected: entries chosen per KV head at most, None for as many as a compact buffer has room for.
        recent: last tokens that every fast step reads, its own included, None for the server's number.
        seed: of ``random``.
    """

    rule: str = FUSED
    selected: int | None = None
    recent: int | None = None
    seed: int = 0
