"""A pair's arrays are the tensors' own memory, whatever order slots and heads have in it."""

import numpy as np
import pytest
import torch

from fathom.kernels.kv_pair import KvPair

SLOTS, HEADS, DIMS = 5, 3, (8, 16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("heads_first", [False, True])
def test_lines_and_rows_are_the_tensors_memory(dtype, heads_first):
    shapes = [(HEADS, SLOTS, dim) if heads_first else (SLOTS, HEADS, dim) for dim in DIMS]
    tensors = [torch.randn(shape).to(dtype) for shape in shapes]
    pair = KvPair(*(x.transpose(0, 1) for x in tensors) if heads_first else tensors)
    assert KvPair.of(pair) is pair and KvPair.of(tuple(pair)).lines[1:3] == pair.lines[1:3]
    for x, (lines, slot, head) in zip(pair, (pair.lines[:3], pair.lines[3:]), strict=True):
        line = np.arange(SLOTS)[:, None] * slot + np.arange(HEADS) * head
        lines[line] = 0  # every line of it, and nothing else
        assert not x.any() and lines.size == x.numel()
    if heads_first:
        assert pair.rows is None
        return
    for x, rows in zip(pair, pair.rows, strict=True):
        rows[2] = 1
        assert rows.shape == (SLOTS, x[0].numel()) and x[2].all() and not x[[0, 1, 3, 4]].any()
