"""SiLU of one half of the features times the other half, the activation of a gated feed-forward layer.

``silu_and_mul`` is the CPU kernel, ``silu_and_mul_reference`` the plain-PyTorch reference it is tested against.
"""

import numpy as np
import torch
from numba import njit

from fathom.kernels.numba_cpu import (
    DTYPES,
    LOOPS,
    as_array,
    as_rows,
    exp_float32,
    from_float32,
    match_torch_threads,
    to_float32,
)
from fathom.kernels.work_sharing_cpu import on_threads, share_of, threads_for


def silu_and_mul_reference(x: torch.Tensor) -> torch.Tensor:
    """Reference for :func:`silu_and_mul`; same shapes."""
    gate, up = x.float().chunk(2, -1)
    return (torch.nn.functional.silu(gate) * up).to(x.dtype)


def silu_and_mul(x: torch.Tensor) -> torch.Tensor | None:
    """``silu(x[..., :width]) * x[..., width:]`` in float32, rounded once, on the CPU.

    Args:
        x: [..., 2 * width], float32, bfloat16 or float16. Rows contiguous and evenly spaced.

    Returns:
        [..., width] contiguous, dtype of x; None where the kernel does not take this layout or dtype.
    """
    source = as_rows(x) if x.dtype in DTYPES and x.shape[-1] % 2 == 0 else None
    if source is None:
        return None
    values, stride, rows = source
    width = x.shape[-1] // 2
    result = x.new_empty((*x.shape[:-1], width))
    _silu_rows(values, stride, as_array(result).reshape(rows, width))
    return result


def warm_up(dtype: torch.dtype) -> None:
    """Compile for this dtype now, so that no request waits for it (cached on disk)."""
    match_torch_threads()
    silu_and_mul(torch.ones(1, 8, dtype=dtype))


@njit(**LOOPS)
def silu_row(gate, up, out):
    """``silu(gate) * up`` of one row, as :func:`as_array` has it."""
    for i in range(len(out)):
        x = to_float32(gate[i])
        out[i] = from_float32(x / (np.float32(1) + exp_float32(-x)) * to_float32(up[i]), out)


@njit(**LOOPS)
def _silu_rows(x, stride, out):
    on_threads(_silu_some, threads_for(out.size), x, stride, out)


@njit(**LOOPS)
def _silu_some(thread, threads, x, stride, out):
    rows, width = out.shape
    begin, end = share_of(rows, thread, threads)
    for t in range(begin, end):
        middle = t * stride + width
        silu_row(x[middle - width : middle], x[middle : middle + width], out[t])
