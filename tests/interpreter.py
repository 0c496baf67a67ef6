"""Triton's interpreter without two costs of its own, which are a third of what its tests take.

At each call of a device function it replaces the functions of `triton.language`, hundreds of them, although
the launch around the call has done so, and puts them back only when the launch ends: each call wraps what the
calls before it have wrapped. And it makes a table of dtypes each time it asks for one.
"""

import triton.language as tl
from triton.runtime import interpreter


def quicken():
    """Replace the language once a launch, and remember dtypes; nothing for a Triton made otherwise."""
    names = ("_LangPatchScope", "_patch_lang", "_get_np_dtype")
    if not all(hasattr(interpreter, name) for name in names):
        return
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

    dtype_of, known = interpreter._get_np_dtype, {}

    def remembered(dtype):
        name = dtype.scalar.name
        if name not in known:
            known[name] = dtype_of(dtype)
        return known[name]

    interpreter._LangPatchScope = Scope
    interpreter._patch_lang = replace_once
    interpreter._get_np_dtype = remembered
