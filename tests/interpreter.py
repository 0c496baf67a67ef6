"""Triton's interpreter without costs of its own, which are more than half of what its tests take.

At each call of a device function it replaces the functions of `triton.language`, hundreds of them, although
the launch around the call has done so, and puts them back only when the launch ends: each call wraps what the
calls before it have wrapped. It makes a table of dtypes each time it asks for one. It checks the shape of
each tensor and wraps its lengths, again and again the same ones. And it computes whether integers overflow,
in six more operations for one, although the assertion that would read this is off.
"""

import builtins
import math

import triton.language as tl
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

NAMES = {
    interpreter: ("_LangPatchScope", "_patch_lang", "_get_np_dtype"),
    core: ("block_type", "constexpr", "tensor", "tuple", "_unwrap_if_constexpr"),
    TritonSemantic: ("binary_op_sanitize_overflow_impl", "broadcast_impl_value"),
}


def quicken():
    """Replace these parts; nothing for a Triton made otherwise."""
    if all(hasattr(place, name) for place, names in NAMES.items() for name in names):
        replace_language_once_a_launch()
        remember_dtypes()
        remember_shapes()
        leave_plain_values_as_they_are()
        leave_out_checks_that_nobody_reads()


def replace_language_once_a_launch():
    replaced: set[int] = set()
    replace = interpreter._patch_lang

    class Scope(interpreter._LangPatchScope):
        def restore(self):
            super().restore()
            replaced.clear()

    def replace_once(function):
        wanted = {id(value) for value in function.__globals__.values() if value is tl or value is tl.core}
        if wanted <= replaced:
            return Scope()
        scope = replace(function)
        replaced.update(wanted)
        return scope

    interpreter._LangPatchScope = Scope
    interpreter._patch_lang = replace_once


def remember_dtypes():
    dtype_of, known = interpreter._get_np_dtype, {}

    def remembered(dtype):
        name = dtype.scalar.name
        if name not in known:
            known[name] = dtype_of(dtype)
        return known[name]

    interpreter._get_np_dtype = remembered


def remember_shapes():
    """Of blocks, checked once; and the lengths of tensors as constants. Nothing changes either of them."""
    make_block, broadcast, blocks, lengths = (
        core.block_type.__init__, TritonSemantic.broadcast_impl_value, {}, {}
    )  # fmt: skip

    def block(self, element_ty, shape):
        values = shape.values if isinstance(shape, core.tuple) else shape
        key = builtins.tuple([each.value if isinstance(each, core.constexpr) else each for each in values])
        if key not in blocks:
            make_block(self, element_ty, shape)
            blocks[key] = self.shape, self.numel, str(self.shape)
        self.element_ty = element_ty
        self.shape, self.numel, text = blocks[key]
        self.name = f"<{text}, {element_ty}>"

    def tensor(self, handle, type):
        self.handle, self.type, self.dtype = handle, type, type.scalar
        key = builtins.tuple(type.shape.values) if type.is_block() else ()
        if key not in lengths:
            constants = core.tuple([core.constexpr(length) for length in key])
            lengths[key] = core.constexpr(math.prod(key)), constants
        self.numel, self.shape = lengths[key]

    def broadcast_others(self, lhs, rhs):
        left, right = lhs.type, rhs.type
        if left.is_block() and right.is_block() and left.shape is right.shape:
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    core.block_type.__init__ = block
    core.tensor.__init__ = tensor
    TritonSemantic.broadcast_impl_value = broadcast_others


def leave_plain_values_as_they_are():
    unwrap = core._unwrap_if_constexpr
    plain = {int, float, bool, str, type(None), core.tensor, core.dtype, core.block_type, core.pointer_type}

    def unwrapped(value):
        return value if type(value) in plain else unwrap(value)

    core._unwrap_if_constexpr = unwrapped


def leave_out_checks_that_nobody_reads():
    check = TritonSemantic.binary_op_sanitize_overflow_impl

    def checked(self, lhs, rhs, binary_op):
        if self.builder.options.debug:
            check(self, lhs, rhs, binary_op)

    TritonSemantic.binary_op_sanitize_overflow_impl = checked
