"""Triton's interpreter without what it does over and over: it gives the same in a third of the time."""

import functools
import math
from types import SimpleNamespace

from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

KEPT = SimpleNamespace(restore=lambda: None)
"""What the language's functions are replaced by stays: in such a process every kernel is interpreted."""


def _once(patch):
    """The language of a module is patched once, not at each launch and each call of a function by a kernel."""
    done = {}

    def patch_once(fn):
        names = fn.__globals__
        if id(names) not in done:
            patch(fn)
            done[id(names)] = names
        return KEPT

    return patch_once


def _patch_attr(obj, name, member, builder, scope):
    """As the interpreter's, which copies the keywords that were made for this call."""
    semantic = interpreter.interpreter_semantic

    def patched(*args, **kwargs):
        kwargs["_semantic"] = semantic
        return member(*args, **kwargs)

    scope.set_attr(obj, name, patched)


def _types():
    """A type's kind, and what it is in NumPy, are looked up by its name, not in a table that is made for that."""
    integers = frozenset(core.dtype.SINT_TYPES + core.dtype.UINT_TYPES)
    core.dtype.is_int = lambda self: self.name in integers
    known, find = {}, interpreter._get_np_dtype

    def numpy_type(dtype):
        if dtype.name not in known:
            known[dtype.name] = find(dtype)
        return known[dtype.name]

    interpreter._get_np_dtype = numpy_type


def _shapes():
    """Each shape is checked, wrapped and written out once."""

    @functools.cache
    def wrapped(*sizes):
        return core.tuple([core.constexpr(size) for size in sizes]), core.constexpr(math.prod(sizes))

    def tensor(self, handle, type):
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = wrapped(*type.shape.values) if type.is_block() else wrapped()

    made, known = core.block_type.__init__, {}

    def block_type(self, element_ty, shape):
        given = *(core._unwrap_if_constexpr(size) for size in shape), element_ty.name
        if given not in known:
            made(self, element_ty, shape)
            known[given] = self.shape, self.numel, self.name
        self.element_ty = element_ty
        self.shape, self.numel, self.name = known[given]

    core.tensor.__init__, core.block_type.__init__ = tensor, block_type
    equal = core.tuple.__eq__

    def same(self, other):
        if type(other) is list and all(type(size) is int for size in other):
            return core.constexpr(self.values == other)
        return equal(self, other)

    core.tuple.__eq__ = same


def install():
    """Once per process."""
    interpreter._patch_lang = _once(interpreter._patch_lang)
    interpreter._patch_attr = _patch_attr
    # Integers are computed again in 64 bits, for an assertion that is only made where one debugs.
    assert not interpreter.interpreter_builder.options.debug
    TritonSemantic.binary_op_sanitize_overflow_impl = lambda *_: None
    _types()
    _shapes()
