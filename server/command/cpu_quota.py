"""Threads on a machine that gives this process less than its cores: a container with a CPU limit."""

import os
from collections.abc import MutableMapping

from fathom.runtime import control_groups

OMP_NUM_THREADS = "OMP_NUM_THREADS"


def limit_threads(environment: MutableMapping[str, str] = os.environ) -> None:
    """Let OpenMP, which counts cores, start no more threads than the quota pays for; what is set stays.

    Before the first import of PyTorch. Child processes inherit it.
    """
    found = control_groups.processors()
    if found is not None and found < len(os.sched_getaffinity(0)):
        environment.setdefault(OMP_NUM_THREADS, str(max(1, int(found))))
