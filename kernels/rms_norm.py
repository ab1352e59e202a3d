"""RMSNorm, with the residual addition that precedes it: one pass over memory instead of six.

``rms_norm`` is the CPU kernel, ``rms_norm_reference`` the plain-PyTorch reference it is tested against.
"""

import math

import numpy as np
import torch
from numba import njit

from fathom.kernels.numba_cpu import (
    DTYPES,
    LOOPS,
    as_array,
    as_rows,
    from_float32,
    match_torch_threads,
    to_float32,
)
from fathom.kernels.work_sharing_cpu import on_threads, share_of, threads_for


def rms_norm_reference(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Reference for :func:`rms_norm`; same shapes."""
    y = x.float() if residual is None else x.float() + residual.float()
    normed = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps) * weight.float()
    return normed.to(x.dtype), None if residual is None else y.to(x.dtype)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor | None] | None:
    """Root-mean-square norm over the last dimension of ``x``, or of ``x + residual``, on the CPU.

    The norm is taken of the sum in float32, before it is rounded to become the next residual.

    Args:
        x: [..., width], float32, bfloat16 or float16; residual: as x. Rows contiguous and evenly spaced.
        weight: [width], dtype of x.

    Returns:
        The normed tensor and ``x + residual`` (None without residual), contiguous, in x's shape and dtype; None
        where the kernel does not take this layout or combination of dtypes.
    """
    if x.dtype not in DTYPES or weight.dtype != x.dtype or not weight.is_contiguous():
        return None
    source = as_rows(x)
    if source is None:
        return None
    values, stride, rows = source
    normed = x.new_empty(x.shape)
    out = as_array(normed).reshape(rows, -1)
    gain, epsilon = as_array(weight), np.float32(eps)
    if residual is None:
        _norm_rows(values, stride, gain, epsilon, out)
        return normed, None
    other = as_rows(residual) if residual.dtype == x.dtype and residual.shape == x.shape else None
    if other is None:
        return None
    total = x.new_empty(x.shape)
    _add_norm_rows(values, stride, other[0], other[1], gain, epsilon, out, as_array(total).reshape(rows, -1))
    return normed, total


def warm_up(dtype: torch.dtype) -> None:
    """Compile for this dtype now, so that no request waits for it (cached on disk)."""
    match_torch_threads()
    x = torch.ones(1, 8, dtype=dtype)
    rms_norm(x, x[0], 1e-6)
    rms_norm(x, x[0], 1e-6, x)


@njit(**LOOPS)
def norm_row(x, gain, epsilon, out):
    """One row [width] of :func:`rms_norm`, as :func:`as_array` has it; ``epsilon`` float32."""
    squares = np.float32(0)
    for i in range(len(out)):
        y = to_float32(x[i])
        squares += y * y
    factor = np.float32(1) / math.sqrt(squares / np.float32(len(out)) + epsilon)
    for i in range(len(out)):
        out[i] = from_float32(to_float32(x[i]) * factor * to_float32(gain[i]), out)


@njit(**LOOPS)
def add_norm_row(x, residual, gain, epsilon, out, total):
    """The same of ``x + residual``, whose sum goes to ``total``."""
    squares = np.float32(0)
    for i in range(len(out)):
        y = to_float32(x[i]) + to_float32(residual[i])
        squares += y * y
        total[i] = from_float32(y, total)
    factor = np.float32(1) / math.sqrt(squares / np.float32(len(out)) + epsilon)
    for i in range(len(out)):
        y = to_float32(x[i]) + to_float32(residual[i])
        out[i] = from_float32(y * factor * to_float32(gain[i]), out)


@njit(**LOOPS)
def _norm_rows(x, stride, gain, epsilon, out):
    on_threads(_norm_some, threads_for(out.size), x, stride, gain, epsilon, out)


@njit(**LOOPS)
def _norm_some(thread, threads, x, stride, gain, epsilon, out):
    rows, width = out.shape
    begin, end = share_of(rows, thread, threads)
    for t in range(begin, end):
        norm_row(x[t * stride : t * stride + width], gain, epsilon, out[t])


@njit(**LOOPS)
def _add_norm_rows(x, stride, residual, residual_stride, gain, epsilon, out, total):
    on_threads(
        _add_norm_some, threads_for(out.size), x, stride, residual, residual_stride, gain, epsilon, out, total
    )


@njit(**LOOPS)
def _add_norm_some(thread, threads, x, stride, residual, residual_stride, gain, epsilon, out, total):
    rows, width = out.shape
    begin, end = share_of(rows, thread, threads)
    for t in range(begin, end):
        a = x[t * stride : t * stride + width]
        b = residual[t * residual_stride : t * residual_stride + width]
        add_norm_row(a, b, gain, epsilon, out[t], total[t])
