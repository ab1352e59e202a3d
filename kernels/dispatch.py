"""Which implementation of an operation a tensor gets: Triton's, or the one for CPUs."""

import torch
from triton import knobs

INTERPRETED = bool(knobs.runtime.interpret)
"""Whether this process runs Triton kernels in Triton's interpreter (``TRITON_INTERPRET=1``), on tensors in the
host's memory. Triton looks when a kernel is decorated; so does this, once."""


def runs_triton(tensor: torch.Tensor) -> bool:
    """Whether Triton kernels are launched for this tensor: on a GPU, and everywhere in the interpreter."""
    return tensor.is_cuda or INTERPRETED
