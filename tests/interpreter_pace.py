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
    # What a builtin is wrapped in asks for the keyword.
    call = getattr(member, "__wrapped__", member) if core.is_builtin(member) else member

    def patched(*args, **kwargs):
        kwargs["_semantic"] = semantic
        return call(*args, **kwargs)

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


def _constants():
    """Most of what might be a constant of the compiler is a tensor or a number; types of one name are the same."""
    plain, unwrap = {core.tensor, core.dtype, int, float, bool}, core._unwrap_if_constexpr

    def unwrapped(o):
        kind = type(o)
        return o if kind in plain else o.value if kind is core.constexpr else unwrap(o)

    core._unwrap_if_constexpr = unwrapped
    equal = core.dtype.__eq__
    core.dtype.__eq__ = lambda self, other: (
        self.name == other.name if type(other) is core.dtype else equal(self, other)
    )
    known, fits = {}, interpreter._validate_np_data_size

    def sized(array, dtype):
        key = array.itemsize, dtype.name
        if key not in known:
            known[key] = fits(array, dtype)
        return known[key]

    interpreter._validate_np_data_size = sized


MOST_CONSTANTS = 10_000
INTEGERS = ("int32", "int64")
ALIKE = frozenset(("fp32", "int1", *INTEGERS))
"""Of two such operands of one type, whatever the operation, neither is cast."""


def _constant(semantic, number, type_of_other, made):
    """A number as an operand beside another; None where that takes more than this.

    Args:
        made: what there is already, which nobody writes.
    """
    kind, dtype = type(number), type_of_other.scalar
    if dtype.name == "fp32" and kind in (int, float):
        wanted = dtype
    elif (dtype.name in INTEGERS or dtype.is_ptr()) and kind is int and -(2**31) <= number < 2**31:
        wanted = core.int32 if dtype.is_ptr() else dtype
    else:
        return None
    key = kind, number or repr(number), type_of_other.name
    if key not in made:
        constant = semantic.scalar_constant(number, wanted)
        if type_of_other.is_block():
            constant = _spread(semantic, constant, core.block_type(wanted, type_of_other.shape))
        constant.handle.data.flags.writeable = False
        if len(made) > MOST_CONSTANTS:
            made.clear()
        made[key] = constant
    return made[key]


def _spread(semantic, x, type):
    return semantic.make_tensor(semantic.builder.create_splat(type, x.handle), type)


def _operands():
    """Operands that need no cast are only given one shape, and what shapes give is looked up."""
    check, broadcast = TritonSemantic.binary_op_type_checking_impl, TritonSemantic.broadcast_impl_value
    known, made = {}, {}

    def checked(self, lhs, rhs, allow_lhs_ptr=False, allow_rhs_ptr=False, *args, **kwargs):
        left, right = lhs, rhs
        if type(right) is not core.tensor and type(left) is core.tensor:
            right = _constant(self, right, left.type, made)
        elif type(left) is not core.tensor and type(right) is core.tensor and not right.dtype.is_ptr():
            left = _constant(self, left, right.type, made)
        if type(left) is type(right) is core.tensor:
            of_left, of_right = left.dtype.name, right.dtype.name
            moved = allow_lhs_ptr and of_right in INTEGERS and left.dtype.is_ptr()
            if moved or (of_left == of_right and of_left in ALIKE):
                return self.broadcast_impl_value(left, right)
        return check(self, lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, *args, **kwargs)

    def shaped(self, lhs, rhs):
        left, right = lhs.type, rhs.type
        if not left.is_block():
            if right.is_block():
                lhs = _spread(self, lhs, right.with_element_ty(left.scalar))
            return lhs, rhs
        if not right.is_block():
            return lhs, _spread(self, rhs, left.with_element_ty(right.scalar))
        of_left, of_right = left.shape.values, right.shape.values
        if of_left == of_right:
            return lhs, rhs
        if len(of_left) != len(of_right):
            return broadcast(self, lhs, rhs)
        shapes = *of_left, *of_right
        if shapes not in known:
            known[shapes] = broadcast(self, lhs, rhs)[0].type.shape.values
        return self.broadcast_impl_shape(lhs, known[shapes]), self.broadcast_impl_shape(rhs, known[shapes])

    TritonSemantic.binary_op_type_checking_impl, TritonSemantic.broadcast_impl_value = checked, shaped


def install():
    """Once per process."""
    interpreter._patch_lang = _once(interpreter._patch_lang)
    interpreter._patch_attr = _patch_attr
    # Integers are computed again in 64 bits, for an assertion that is only made where one debugs.
    assert not interpreter.interpreter_builder.options.debug
    TritonSemantic.binary_op_sanitize_overflow_impl = lambda *_: None
    _types()
    _shapes()
    _constants()
    _operands()
