"""Tasks that are dealt to threads beforehand, of which a thread that is done takes over what others have left.

A core that another process uses for a millisecond does not make all threads wait that long.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np import arrayobj

_OPTIONS: dict[str, Any] = {"error_model": "numpy", "cache": True}


@njit(**_OPTIONS)
def even_shares(tasks, threads):
    """[threads + 1] int64: where each thread's tasks begin, about as many for each."""
    shares = np.empty(threads + 1, np.int64)
    for i in range(threads + 1):
        shares[i] = tasks * i // threads
    return shares


@njit(**_OPTIONS)
def take(taken, shares, thread):
    """The next task for a thread: one of its own, else another's, else -1.

    Args:
        taken: [threads] int64, where each thread's remaining tasks begin: at first a copy of ``shares[:-1]``.
        shares: [threads + 1] int64, where each thread's tasks begin.
    """
    threads = len(taken)
    for i in range(threads):
        whose = (thread + i) % threads
        if taken[whose] < shares[whose + 1]:
            task = _fetch_and_add_one(taken, whose)
            if task < shares[whose + 1]:
                return task
    return -1


@intrinsic
def _fetch_and_add_one(typing_context, array, place):
    """``array[place]`` as it was before it is made one more, which no other thread gets."""

    def codegen(context, builder, signature, args):
        kind, index = signature.args[0], context.cast(builder, args[1], signature.args[1], types.intp)
        view = arrayobj.make_array(kind)(context, builder, args[0])
        pointer = cgutils.get_item_pointer(context, builder, kind, view, [index], wraparound=False)
        return builder.atomic_rmw("add", pointer, ir.Constant(ir.IntType(64), 1), "monotonic")

    if array.dtype == types.int64:
        return types.int64(array, place), codegen
