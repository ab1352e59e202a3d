"""What one field of a policy means and which values of it are legal: the form of ``config.Policy``'s fields."""

from dataclasses import dataclass
from typing import Any, Protocol


class Bounds(Protocol):
    """Upper bounds that depend on what is served; None while nothing is."""

    @property
    def layers(self) -> int | None: ...

    @property
    def span(self) -> int: ...

    @property
    def sfi_selected(self) -> int | None: ...


@dataclass(frozen=True)
class Spec:
    """One field's meaning and legal values.

    Attributes:
        help: what the field decides, in one clause.
        unit: unit of a number, or what the words stand for.
        source: the paper's section or table that defines it.
        kind: type of a value that is not one of ``words``; None where only words are legal.
        low, high: bounds of a number. A float must be in (low, high], an int in [low, high].
        bound: for an int without ``high``, the one of :class:`Bounds` that takes its place.
        words: string values.
        mechanism: what has to run unless the value is ``neutral``.
        neutral: the value that asks for nothing.
        tunes: the field that this one only refines; without it, it has no effect.
        several: the value is a list of ``words``, none to all of them.
    """

    help: str
    unit: str
    source: str
    kind: type | None = None
    low: float = 0
    high: float | None = None
    bound: str = "layers"
    words: tuple[str, ...] = ()
    mechanism: str | None = None
    neutral: Any = None
    tunes: str | None = None
    several: bool = False

    def legal(self, limits: Bounds) -> str:
        """The legal values in words, for messages and help."""
        return self._numbers(limits) + self._or_words()

    def _numbers(self, limits: Bounds) -> str:
        if self.kind is bool:
            return "true or false"
        if self.kind is float:
            return f"in ({self.low:g}, {self.high:g}]"
        if self.kind is int:
            high = getattr(limits, self.bound) if self.high is None else self.high
            if self.high is None and self.bound == "layers" and high and limits.span > 1:
                return f"a multiple of {limits.span} in [{limits.span}, {high}]"
            return f"an integer in [{self.low:.0f}, {high:.0f}]" if high else f"an integer >= {self.low:.0f}"
        return ""

    def _or_words(self) -> str:
        quoted = ", ".join(f'"{word}"' for word in self.words)
        if self.several:
            return f"a list of none to all of {quoted}"
        if not self.words or self.kind is not None:
            return f" or {quoted}" if quoted else ""
        return f"one of {quoted}" if len(self.words) > 1 else quoted

    def accepts(self, value: Any, limits: Bounds) -> bool:
        """Whether ``value`` has the right type and lies in range."""
        if self.several:
            return isinstance(value, list | tuple) and all(each in self.words for each in value)
        if isinstance(value, str):
            return value in self.words
        if self.kind is bool or isinstance(value, bool):
            return self.kind is bool and isinstance(value, bool)
        if self.kind is float:
            return isinstance(value, int | float) and self.low < value <= (self.high or 0)
        if self.kind is int:
            high = getattr(limits, self.bound) if self.high is None else self.high
            return isinstance(value, int) and value >= self.low and (high is None or value <= high)
        return False

    def schema(self) -> dict[str, Any]:
        """JSON Schema of one value."""
        forms: list[dict[str, Any]] = [{"enum": list(self.words)}] if self.words else []
        if self.kind is bool:
            forms.insert(0, {"type": "boolean"})
        elif self.kind is float:
            forms.insert(0, {"type": "number", "exclusiveMinimum": self.low, "maximum": self.high})
        elif self.kind is int:
            bounds = {"minimum": self.low} | ({"maximum": self.high} if self.high else {})
            forms.insert(0, {"type": "integer"} | bounds)
        form = forms[0] if len(forms) == 1 else {"anyOf": forms}
        if self.several:
            form = {"type": "array", "items": form}
        return form | {"description": f"{self.help} ({self.unit}; {self.source})"}

    def from_text(self, text: str) -> Any:
        """A command-line word as a value of the right type; the text itself where it is not a number."""
        try:
            return self.kind(text) if self.kind in (int, float) else text
        except ValueError:
            return text
