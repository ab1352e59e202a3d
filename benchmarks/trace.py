"""What PyTorch's profiler saw of an engine: with what the device was busy, and how long it waited for the host."""

import gzip
import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}
"""Kinds of events on a GPU."""
OPERATOR = {"cpu_op"}
"""What is looked at where there are none: operators on the host's threads, which call each other."""
LONGEST_NAMES = 30
"""Kernels that are told apart; the others are one line."""
LAUNCH_GAP = 20.0
"""Microseconds; launches that the host has ready follow each other sooner."""
NAME = 120
"""Letters of a kernel's name that are kept."""


def summary(events: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Seconds from the first event to the end of the last, and what they were spent with.

    Args:
        events: Chrome's trace events; times in microseconds.

    Returns:
        ``device``: whether there were events on a GPU. ``seconds``; ``busy``: those with at least one event;
        ``waits`` and ``waited``: how often, and how long in all, there was none for longer than ``LAUNCH_GAP``.
        ``kernels``: of each name ``calls``, ``seconds`` without those of what it calls, longest first.

    Raises:
        ValueError: where there are no events.
    """
    complete = [event for event in events if event.get("ph") == "X"]
    found = [event for event in complete if event.get("cat") in DEVICE]
    device = bool(found)
    found = found or [event for event in complete if event.get("cat") in OPERATOR]
    if not found:
        raise ValueError("the profile has no events")
    # What calls another one begins before it, or is longer.
    found.sort(key=lambda event: (event["ts"], -event["dur"]))
    begin = end = found[0]["ts"]
    busy = waited = 0.0
    waits = 0
    for event in found:
        start, stop = event["ts"], event["ts"] + event["dur"]
        if start - end > LAUNCH_GAP:
            waits, waited = waits + 1, waited + start - end
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return {
        "device": device,
        "seconds": (end - begin) / 1e6,
        "busy": busy / 1e6,
        "waits": waits,
        "waited": waited / 1e6,
        "kernels": _kernels(found),
    }


def _kernels(events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Calls and own seconds by name, longest first; ``events`` by their begin."""
    calls: dict[str, int] = defaultdict(int)
    seconds: dict[str, float] = defaultdict(float)
    # By thread or stream: what has begun and not ended, as (name, end).
    open_: dict[tuple[Any, Any], list[tuple[str, float]]] = defaultdict(list)
    for event in events:
        lane, name = open_[event.get("pid"), event.get("tid")], event["name"][:NAME]
        while lane and lane[-1][1] <= event["ts"]:
            lane.pop()
        if lane:
            seconds[lane[-1][0]] -= event["dur"] / 1e6
        lane.append((name, event["ts"] + event["dur"]))
        calls[name] += 1
        seconds[name] += event["dur"] / 1e6
    names = sorted(seconds, key=lambda name: -seconds[name])
    found = [{"name": name, "calls": calls[name], "seconds": seconds[name]} for name in names]
    if rest := names[LONGEST_NAMES:]:
        together = {"calls": sum(map(calls.get, rest)), "seconds": sum(map(seconds.get, rest))}  # type: ignore[arg-type]
        found[LONGEST_NAMES:] = [{"name": f"{len(rest)} others", **together}]
    return found


def read(folder: Path) -> list[dict[str, Any]]:
    """The events of the newest trace in a folder.

    Raises:
        FileNotFoundError: where there is none.
    """
    files = sorted(folder.glob("*.trace.json.gz"), key=lambda file: file.stat().st_mtime)
    if not files:
        raise FileNotFoundError(f"the engine has left no trace in {folder}")
    with gzip.open(files[-1], "rt") as trace:
        return json.load(trace)["traceEvents"]
