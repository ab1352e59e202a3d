"""What processes without a GPU talk over: one device for all of a process's Gloo groups, and no NCCL.

PyTorch gives each group a device of its own, with a thread that wakes a hundred times a second for as long as the
group lives. SGLang makes nine groups, also where there is one rank: of a server with nothing to do they are most of
what it takes from its processor.
"""

import os
from datetime import timedelta
from functools import cache
from typing import Any

INTERFACES = "GLOO_SOCKET_IFNAME"
"""Environment variable in which an operator names what groups talk over: PyTorch makes devices for these."""


def share_device() -> None:
    """Let all groups of this process share a device. Call before the first is made."""
    if os.getenv(INTERFACES):
        return
    from torch.distributed import distributed_c10d

    gloo = getattr(distributed_c10d, "ProcessGroupGloo", None)
    # A PyTorch without Gloo, or without a place to name the device; one that has been told.
    if hasattr(gloo, "_Options") and not hasattr(gloo, "shared_device"):
        distributed_c10d.ProcessGroupGloo = _sharing(gloo)


def _sharing(gloo: Any) -> type:
    """A group's class whose objects have one device."""

    class SharingGloo(gloo):
        shared_device = staticmethod(cache(gloo.create_default_device))

        def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
            options = gloo._Options()
            options._timeout, options._devices = timeout, [self.shared_device()]
            super().__init__(store, rank, size, options)

    return SharingGloo


def without_nccl() -> None:
    """Let SGLang find no NCCL: a PyTorch that was built for CUDA brings it, and it would ask for a GPU."""
    from sglang.srt.distributed.device_communicators import pynccl_wrapper

    pynccl_wrapper.find_nccl_library = _no_library


def _no_library() -> str:
    raise ValueError("NCCL is for GPUs")
