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
    def layout(self) -> tuple[int, ...]:
        """Lines, and how many of them apart two slots and two heads are, of the keys and then of the values."""
        keys, *key_strides, values, value_slot, value_head = self.lines
        return len(keys), *key_strides, len(values), value_slot, value_head

    @cached_property
    def addresses(self) -> tuple[int, int]:
        """Where the memory of the keys and of the values begins."""
        return self[0].data_ptr(), self[1].data_ptr()

    @cached_property
    def rows(self) -> tuple[np.ndarray, np.ndarray] | None:
        """Each as an array of one row per slot; None where the slots of one are not one block of memory."""
        from fathom.kernels.numba_cpu import as_array

        if not all(x.is_contiguous() for x in self):
            return None
        keys, values = (as_array(x).reshape(len(x), -1) for x in self)
        return keys, values
