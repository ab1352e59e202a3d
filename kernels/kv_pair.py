"""A layer's keys and values together with what the CPU kernels make of their layout, worked out once."""

from functools import cached_property

import numpy as np
import torch


class KvPair(tuple[torch.Tensor, torch.Tensor]):
    """Keys [slots, kv_heads, head_dim] and values [slots, kv_heads, value_dim] of a layer that stay where they are.

    It can be given wherever a kernel takes such a pair; one that is given a plain tuple looks at the layout anew in
    every call.
    """

    def __new__(cls, keys: torch.Tensor, values: torch.Tensor) -> "KvPair":
        return super().__new__(cls, (keys, values))

    @classmethod
    def of(cls, pool: tuple[torch.Tensor, torch.Tensor]) -> "KvPair":
        """The pair itself, or a plain tuple as one."""
        return pool if isinstance(pool, cls) else cls(*pool)

    @cached_property
    def lines(self) -> tuple[np.ndarray, int, int, np.ndarray, int, int]:
        """Of the keys and of the values what ``numba_cpu.as_lines`` says."""
        from fathom.kernels.numba_cpu import as_lines

        return *as_lines(self[0]), *as_lines(self[1])

    @cached_property
    def rows(self) -> tuple[np.ndarray, np.ndarray] | None:
        """Each as an array of one row per slot; None where the slots of one are not one block of memory."""
        from fathom.kernels.numba_cpu import as_array

        if not all(x.is_contiguous() for x in self):
            return None
        keys, values = (as_array(x).reshape(len(x), -1) for x in self)
        return keys, values
