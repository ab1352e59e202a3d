"""Numbers for people, and from them; JSON on command lines."""

import argparse
import json
from typing import Any


def token_count(text: str) -> int:
    """A word of a command line: ``8192`` or ``8k``.

    Raises:
        ArgumentTypeError: for anything else.
    """
    digits, scale = (text[:-1], 1024) if text[-1:] in ("k", "K") else (text, 1)
    if not digits.isdecimal() or int(digits) < 1:
        raise argparse.ArgumentTypeError(f"must be an integer >= 1, such as 8192 or 8k, got {text!r}")
    return int(digits) * scale


def json_object(text: str) -> dict[str, Any]:
    """A word of a command line that is a JSON object.

    Raises:
        ArgumentTypeError: for anything else.
    """
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object")
    return value


def flops(value: float) -> str:
    """FLOPs in the largest unit that leaves a digit before the point."""
    if value == 0:
        return "0"
    for unit, name in ((1e15, "PFLOP"), (1e12, "TFLOP"), (1e9, "GFLOP")):
        if value >= unit:
            return f"{value / unit:.2f} {name}"
    return f"{value / 1e6:.2f} MFLOP"


def size(value: float) -> str:
    """Bytes in the largest binary unit that leaves a digit before the point."""
    for shift, name in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if value >= 1 << shift:
            return f"{value / (1 << shift):.2f} {name}"
    return f"{value:.0f} B"


def seconds(value: float | None) -> str:
    """A duration in seconds or milliseconds, to three digits or so; a dash for None."""
    if value is None:
        return "–"
    if value >= 1:
        return f"{value:.2f} s"
    return f"{value * 1000:.0f} ms" if value >= 0.01 else f"{value * 1000:.1f} ms"


def percent(value: float | None) -> str:
    """A share as a whole percentage; a dash for None."""
    return "–" if value is None else f"{100 * value:.0f} %"
