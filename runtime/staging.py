"""Numbers that the host has worked out, on their way to the device: pinned, and not waited for.

PyTorch keeps a pinned block until the copies from it are done, so a staged tensor may be dropped at once.
"""

from collections.abc import Sequence

import numpy as np
import torch


def staged(shape: int | tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Host memory, not initialised, from which a copy to ``device`` runs beside the host."""
    return torch.empty(shape, dtype=dtype, pin_memory=device.type == "cuda")


def send(
    values: np.ndarray | torch.Tensor, device: torch.device | str, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """The values on ``device``, in order with the current stream's work; the values themselves on a CPU."""
    tensor = torch.from_numpy(values) if isinstance(values, np.ndarray) else values
    tensor = tensor if dtype is None else tensor.to(dtype)
    if torch.device(device).type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def take(tensor: torch.Tensor, places: Sequence[int]) -> torch.Tensor:
    """Some rows of a tensor, in the order of ``places``. PyTorch's own indexing would wait to send a list."""
    return tensor.index_select(0, send(np.array(places, np.int64), tensor.device))
