"""How a kernel's threads get their work: a function that each of them calls, and what falls to it.

Rows are shared evenly. Tasks that differ are dealt to threads beforehand, and a thread that is done takes over what
others have left: a core that another process uses for a millisecond does not make all threads wait that long.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import get_num_threads, njit, types
from numba.core import cgutils
from numba.core.callconv import excinfo_ptr_t
from numba.extending import intrinsic
from numba.np import arrayobj

from fathom.kernels.numba_cpu import SERIAL_ELEMENTS

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


@intrinsic
def all_threads(typing_context):
    """How many threads :func:`on_threads` can have at once; Numba's own function cannot be cached on disk."""

    def codegen(context, builder, signature, args):
        return _threads(context, builder)

    return types.intp(), codegen


@njit(**_OPTIONS)
def threads_for(elements):
    """How many threads a loop over so many elements is worth: one, or all."""
    return 1 if elements <= SERIAL_ELEMENTS else all_threads()


@njit(**_OPTIONS)
def share_of(n, thread, threads):
    """What falls to a thread of n items in a row: the first, and the one behind the last."""
    return n * thread // threads, n * (thread + 1) // threads


@intrinsic(prefer_literal=True)
def on_threads(typing_context, body, threads, *args):
    """``body(thread, threads, *args)`` for each thread below ``threads``, together as far as Numba's threads go.

    Numba's own parallel loops are compiled four times, one function within the other; this is compiled once. The
    threads are the same, those of ``numba.set_num_threads``; a single one is the caller's.

    Args:
        body: compiled or overloaded function without a result; what it raises is raised, of one thread.
        args: constants are literals where ``body`` is compiled.
    """
    called = typing_context.resolve_function_type(body, (types.intp, types.intp, *args), {})

    def codegen(context, builder, signature, values):
        packed = values[2]
        count = context.cast(builder, values[1], signature.args[1], types.intp)
        data_type = ir.LiteralStructType([packed.type, _WORD, _STATUS, excinfo_ptr_t])
        data = cgutils.alloca_once(builder, data_type)
        fine = ir.Constant(_STATUS, 0), ir.Constant(excinfo_ptr_t, None)
        for place, value in enumerate((packed, count, *fine)):
            builder.store(value, _field(builder, data, place))
        one = _one_thread(context, builder.module, body, called, data_type)
        # A loop over an array of one element that is always the same: each call is told its number by the step.
        nothing = cgutils.alloca_once_value(builder, ir.Constant(_POINTER, None))
        dimension, step = (cgutils.alloca_once_value(builder, x) for x in (count, ir.Constant(_WORD, 1)))
        given = [builder.bitcast(x, _POINTER) for x in (one, nothing, dimension, step, data)]
        with builder.if_else(builder.icmp_signed("==", count, ir.Constant(_WORD, 1))) as (alone, several):
            with alone:
                builder.call(one, [nothing, *given[2:]])
            with several:
                kinds = [_POINTER] * 5 + [_WORD] * 3
                launch = _declared(builder.module, "numba_parallel_for", ir.VoidType(), kinds)
                builder.call(
                    launch, [*given, ir.Constant(_WORD, 0), ir.Constant(_WORD, 1), _threads(context, builder)]
                )
        code, raised = (builder.load(_field(builder, data, place)) for place in (2, 3))
        status = context.call_conv._get_return_status(builder, code, raised)
        with cgutils.if_unlikely(builder, status.is_error):
            context.call_conv.return_status_propagate(builder, status)
        return context.get_dummy_value()

    return types.void(body, threads, types.StarArgTuple(args)), codegen


_POINTER, _WORD, _STATUS = ir.PointerType(ir.IntType(8)), ir.IntType(64), ir.IntType(32)


def _declared(module, name, result, args):
    return cgutils.get_or_insert_function(module, ir.FunctionType(result, args), name)


def _threads(context, builder):
    # Here, and whenever the compiled function is read from the disk: what it calls is known from then on.
    get_num_threads()
    context.active_code_library._reload_init.add(get_num_threads)
    return builder.call(_declared(builder.module, "get_num_threads", _WORD, []), [])


def _field(builder, struct, place):
    return cgutils.gep_inbounds(builder, struct, 0, place)


def _borrowed(context, builder, kind, value):
    """``value`` with arrays that nobody counts references to: threads would wait for each other at every view."""
    if isinstance(kind, types.Array):
        view = context.make_helper(builder, kind, value)
        view.meminfo = ir.Constant(view.meminfo.type, None)
        return view._getvalue()
    if isinstance(kind, types.BaseTuple):
        values = cgutils.unpack_tuple(builder, value, len(kind))
        parts = [_borrowed(context, builder, *pair) for pair in zip(kind.types, values, strict=True)]
        return context.make_tuple(builder, kind, parts)
    return value


def _one_thread(context, module, body, called, data_type):
    """What Numba's threads call: ``(args, dimensions, steps, data)``, where args[0] is the thread's number."""
    packed, *_ = data_type.elements
    inner_type = ir.FunctionType(_STATUS, [_POINTER, ir.PointerType(excinfo_ptr_t), _WORD, _WORD, packed])
    inner = ir.Function(module, inner_type, module.get_unique_name("on_thread"))
    builder = ir.IRBuilder(inner.append_basic_block("entry"))
    *numbers, packed = inner.args[2:]
    given = cgutils.unpack_tuple(builder, packed, len(called.args) - len(numbers))
    args = [
        _borrowed(context, builder, *pair) for pair in zip(called.args[len(numbers) :], given, strict=True)
    ]
    context.get_function(body, called)(builder, [*numbers, *args])
    builder.ret(ir.Constant(_STATUS, 0))

    outer_type = ir.FunctionType(ir.VoidType(), [ir.PointerType(_POINTER), _POINTER, _POINTER, _POINTER])
    outer = ir.Function(module, outer_type, module.get_unique_name("from_pool"))
    builder = ir.IRBuilder(outer.append_basic_block("entry"))
    thread = builder.ptrtoint(builder.load(outer.args[0]), _WORD)
    data = builder.bitcast(outer.args[3], ir.PointerType(data_type))
    raised = builder.alloca(excinfo_ptr_t)
    given, threads = (builder.load(_field(builder, data, place)) for place in (0, 1))
    code = builder.call(inner, [ir.Constant(_POINTER, None), raised, thread, threads, given])
    with cgutils.if_unlikely(builder, builder.icmp_signed("!=", code, ir.Constant(_STATUS, 0))):
        builder.store(code, _field(builder, data, 2))
        builder.store(builder.load(raised), _field(builder, data, 3))
    builder.ret_void()
    inner.linkage = outer.linkage = "internal"
    outer.attributes.add("noinline")
    return outer
