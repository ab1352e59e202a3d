"""Times of single calls on a GPU, and the limits of the same card that they are held against."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from fathom.benchmarks import stats
from fathom.benchmarks.kernel_case import call_seconds

LEAST_FLUSH = 256 << 20
"""Bytes that are read before a call is timed, at least. The read takes the card a while, in which the host can
launch all that the call consists of."""
COPY_BYTES = 2 << 30
MATMUL_SIDE = 8192
ROW_SECONDS = 5.0
"""After these a row has been repeated often enough, if it was repeated `FEWEST` times."""
FEWEST = 3
WARM_UP = 2


class Clock:
    """Times calls on a device: between CUDA events with an empty L2 cache, or by the host's clock."""

    def __init__(self, device: torch.device, repeats: int) -> None:
        self.device, self.repeats = device, repeats
        self._other: torch.Tensor | None = None
        if device.type == "cuda":
            cached = torch.cuda.get_device_properties(device).L2_cache_size
            self._other = torch.ones(max(4 * cached, LEAST_FLUSH) // 4, device=device)

    def flush(self) -> None:
        """Fill the L2 cache with something else. Read, not written: what is written would have to leave the cache
        while the call is timed."""
        if self._other is not None:
            self._other.sum()

    def samples(self, call: Callable[[], Any], fewest: int = FEWEST) -> list[float]:
        """Seconds of each repetition."""
        taken: list[float] = []
        begun = time.monotonic()
        while len(taken) < self.repeats:
            if len(taken) >= fewest and time.monotonic() - begun > ROW_SECONDS:
                break
            self.flush()
            taken.append(call_seconds(call, self.device))
        return taken

    def measure(self, call: Callable[[], Any]) -> dict[str, Any]:
        """Summaries of a call that was made before.

        Returns:
            seconds: of the call on the device, between events around it (of the host, where there is no GPU).
            graph_seconds: of one replay of it as a CUDA graph, None where there is none; no_graph says why.
            host_seconds: that the host needs to launch it; None without a GPU.
        """
        for _ in range(WARM_UP if self.device.type == "cuda" else 0):
            call()
        found: dict[str, Any] = {"seconds": stats.summary(self.samples(call))}
        if self.device.type != "cuda":
            return found | {"graph_seconds": None, "no_graph": "no GPU", "host_seconds": None}
        launches = []
        for _ in range(max(FEWEST, min(self.repeats, 10))):
            torch.cuda.synchronize()
            self.flush()
            begun = time.perf_counter()
            call()
            launches.append(time.perf_counter() - begun)
        graph, why_not = capture(call)
        replays = None
        if graph is not None:
            graph.replay()
            replays = stats.summary(self.samples(graph.replay))
        return found | {
            "graph_seconds": replays,
            "no_graph": why_not,
            "host_seconds": stats.summary(launches),
        }


def capture(call: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph | None, str | None]:
    """The call as a CUDA graph, or why there is none: it waits for the device, or something else forbids it."""
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        call()
    except RuntimeError as error:
        return None, f"waits for the device: {str(error).strip().splitlines()[0]}"
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            call()
    except RuntimeError as error:
        return None, f"cannot be captured: {str(error).strip().splitlines()[0]}"
    return graph, None


def limits(clock: Clock, dtype: torch.dtype) -> dict[str, Any]:
    """What the card does at its best: bytes per second of a copy, operations per second of a matrix product.

    Returns:
        By "copy" and the name of each dtype what was done, the summary of its times, and the rate; empty without
        a GPU.
    """
    if clock.device.type != "cuda":
        return {}
    found = {"copy": _copy(clock)} | {
        str(kind).removeprefix("torch."): _product(clock, kind) for kind in (torch.bfloat16, dtype)
    }
    torch.cuda.empty_cache()
    return found


def _copy(clock: Clock) -> dict[str, Any]:
    """From memory to memory; bytes read and bytes written."""
    source = torch.randn(COPY_BYTES // 2, device=clock.device, dtype=torch.bfloat16)
    target = torch.empty_like(source)
    target.copy_(source)
    seconds = stats.summary(clock.samples(lambda: target.copy_(source)))
    return {
        "bytes": 2 * COPY_BYTES,
        "seconds": seconds,
        "bytes_per_s": 2 * COPY_BYTES / seconds["median"],
    }


def _product(clock: Clock, dtype: torch.dtype) -> dict[str, Any]:
    """Of two square matrices."""
    left, right = (torch.randn(MATMUL_SIDE, MATMUL_SIDE, device=clock.device).to(dtype) for _ in range(2))
    torch.mm(left, right)
    seconds = stats.summary(clock.samples(lambda: torch.mm(left, right)))
    flops = 2 * MATMUL_SIDE**3
    return {"flops": flops, "seconds": seconds, "flops_per_s": flops / seconds["median"]}


def rates(row: dict[str, Any], found: dict[str, Any], dtype: str) -> dict[str, Any]:
    """Rates of a timed row, as shares of the card's limits too, and which of the two limits binds it.

    The time is the graph's where there is one. Without limits (no GPU) nothing is claimed: all values are None.
    """
    names = ("gb_per_s", "share_of_copy", "tflop_per_s", "share_of_matmul", "bound", "floor_seconds")
    if not found:
        return dict.fromkeys((*names, "share_of_bound"))
    seconds = (row["graph_seconds"] or row["seconds"])["median"]
    by_bytes = row["bytes"] / found["copy"]["bytes_per_s"]
    by_flops = row["flops"] / found[dtype]["flops_per_s"]
    floor = max(by_bytes, by_flops)
    return {
        "gb_per_s": row["bytes"] / seconds / 1e9,
        "share_of_copy": by_bytes / seconds,
        "tflop_per_s": row["flops"] / seconds / 1e12,
        "share_of_matmul": by_flops / seconds,
        "bound": "bytes" if by_bytes >= by_flops else "operations",
        "floor_seconds": floor,
        "share_of_bound": floor / seconds,
    }
