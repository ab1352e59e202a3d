"""SFI's numbers: when a decode step reads everything, and how the entries that the other steps read are chosen."""

from dataclasses import dataclass, field, fields
from typing import Any


def _number(default: float, low: float, high: float | None, unit: str, source: str) -> Any:
    return field(default=default, metadata={"low": low, "high": high, "unit": unit, "source": source})


def _check(config: Any) -> None:
    for item in fields(config):
        value, low, high = getattr(config, item.name), item.metadata["low"], item.metadata["high"]
        kinds: Any = (int, float) if item.type is float else int
        if isinstance(value, bool) or not isinstance(value, kinds):
            raise ValueError(f"{item.name} must be a number of type {item.type}, got {value!r}")
        if not low <= value or (high is not None and value > high):
            legal = f"in [{low:g}, {high:g}]" if high is not None else f">= {low:g}"
            raise ValueError(f"{item.name} must be {legal} ({item.metadata['unit']}), got {value!r}")


@dataclass(frozen=True)
class SelectorConfig:
    """Hyper-parameters of the Selector (Slow-Fast Inference, sections 3.2 and 3.3).

    Each field's metadata holds its legal range, unit and source.
    """

    power: float = _number(0.5, 1e-3, 1, "exponent alpha", "Eq. 7; released configuration")
    norm_decay: float = _number(0.5, 0, 4, "exponent gamma", "Eq. 9; released configuration")
    position_decay: float = _number(0.568, 0, None, "factor beta", "Eq. 11; -ln(0.6) / 0.9")
    position_curve: float = _number(1.8, 1, None, "exponent p", "Eq. 11; released configuration")
    tail_brake: float = _number(0.4, 0, None, "exponent eta", "Eq. 11; released configuration")
    prior_clip: float = _number(0.02, 0, 1, "largest lambda", "Eq. 17; section 5.1")
    nms_strength: float = _number(0.5, 0, None, "factor alpha_soft", "Eq. 21; section 5.1")
    nms_radius: int = _number(16, 0, None, "positions to each side", "Eq. 20; released configuration")
    cross_head: float = _number(0.35, 0, None, "factor alpha_cross", "Eq. 23; section 5.1")
    temperature: float = _number(2.0, 1e-3, None, "temperature T", "Eq. 22; released configuration")
    epsilon: float = _number(1e-8, 1e-30, 1e-3, "constant", "section 3.2")

    def __post_init__(self) -> None:
        _check(self)


@dataclass(frozen=True)
class SfiConfig:
    """What one fast step reads and when a step is slow (Slow-Fast Inference, sections 3.1 and 5.1).

    A fast step reads ``sink`` first tokens, ``selected`` chosen ones per KV head and the ``recent`` last ones, its
    own token included.

    Raises:
        ValueError: for a value out of range.
    """

    sink: int = _number(4, 0, None, "tokens", "section 5.1")
    recent: int = _number(256, 1, None, "tokens", "section 5.1")
    selected: int = _number(2048, 1, None, "tokens per KV head", "section 5.1")
    refresh_budget: int = _number(64, 1, None, "fast steps in a row (T_max)", "sections 3.1 and 5.1")
    minimum_gap: int = _number(0, 0, None, "fast steps after a slow one", "0: Eq. 5 as it stands")

    def __post_init__(self) -> None:
        _check(self)
        if self.minimum_gap > self.refresh_budget:
            raise ValueError(
                f"minimum_gap must be at most refresh_budget = {self.refresh_budget}, got {self.minimum_gap}"
            )

    @property
    def compact_tokens(self) -> int:
        """Tokens per KV head that a request's compact buffer holds at most."""
        return self.sink + self.selected
