"""Kept KV entries into other slots, on the CPU; contract and plain version are in ``compact_kv.py``."""

from typing import Any

import torch
from numba import njit

from fathom.kernels.numba_cpu import LINE_BYTES, as_lines, match_torch_threads, prefetch
from fathom.kernels.work_sharing_cpu import all_threads, on_threads, share_of

_OPTIONS: dict[str, Any] = {"error_model": "numpy", "cache": True}

ENTRIES = 32
"""Entries that one task copies, with all their heads: what is written lies together."""

AHEAD = 4
"""How many entries ahead their lines are asked for."""

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def compact_kv_cpu(
    keys: torch.Tensor, values: torch.Tensor, source: torch.Tensor, destination: torch.Tensor
) -> None:
    """``compact_kv`` on the CPU; same arguments, source and destination int64.

    Raises:
        IndexError: a slot is outside the pool; nothing is copied.
        ValueError: slots or heads are not a whole number of lines apart.
    """
    slots = len(keys)
    for given in (source, destination):
        if not 0 <= int(given.min()) <= int(given.max()) < slots:
            raise IndexError(f"slot outside 0 .. {slots - 1}")
    places = source.contiguous().numpy(), destination.contiguous().numpy()
    for buffer in (keys, values):
        bits: Any = buffer.view(_BITS[buffer.itemsize])
        _copy(*as_lines(bits), *places, LINE_BYTES // buffer.itemsize)


def warm_up(dtype: torch.dtype) -> None:
    """Compile for this dtype now, so that no request waits for it (cached on disk)."""
    match_torch_threads()
    pair = torch.zeros(2, 1, 1, dtype=dtype), torch.zeros(2, 1, 1, dtype=dtype)
    compact_kv_cpu(*pair, torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, dtype=torch.int64))


@njit(**_OPTIONS)
def _copy(lines, slot, head, source, destination, line):
    on_threads(_copy_some, all_threads(), lines, slot, head, source, destination, line)


@njit(**_OPTIONS)
def _copy_some(thread, threads, lines, slot, head, source, destination, line):
    kv_heads, kept = source.shape
    begin, end = share_of(-(-kept // ENTRIES), thread, threads)
    for task in range(begin, end):
        for i in range(task * ENTRIES, min(task * ENTRIES + ENTRIES, kept)):
            ahead = min(i + AHEAD, kept - 1)
            for h in range(kv_heads):
                for d in range(0, lines.shape[1], line):
                    prefetch(lines, source[h, ahead] * slot + h * head, d)
                origin = lines[source[h, i] * slot + h * head]
                target = lines[destination[i] * slot + h * head]
                for d in range(len(origin)):
                    target[d] = origin[d]
