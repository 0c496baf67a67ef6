"""Addresses of the runtime's functions, in the order in which compiled programs know them."""
# mypy: ignore-errors

from __future__ import annotations

from functools import cache

import numpy as np
from numba import types
from numba.core.ccallback import CFunc
from numba.core.sigutils import normalize_signature

from tritonrec.kernels.caches import keep_on_disk

from . import arithmetic, atomics, collectives, memory, scheduler, tensor_cores

WARP_FUNCTIONS = {
    "global_load": memory.global_load, "global_store": memory.global_store,
    "shared_load": memory.shared_load, "shared_store": memory.shared_store,
    "copy_async": memory.copy_async, "commit_copies": memory.commit_copies, "wait_copies": memory.wait_copies,
    "atomic": atomics.atomic, "shuffle": collectives.shuffle, "reduce": collectives.reduce,
    "vote": collectives.vote, "load_matrix": collectives.load_matrix,
    "store_matrix": collectives.store_matrix, "multiply": tensor_cores.multiply,
    "multiply_group": tensor_cores.multiply_group, "branch": scheduler.branch,
    "leave": scheduler.leave, "converge": scheduler.converge,
}  # fmt: skip
FLOAT_FUNCTIONS = {
    "exp2": arithmetic.exp2, "log2": arithmetic.log2, "sin": arithmetic.sin, "cos": arithmetic.cos,
    "tanh": arithmetic.tanh,
}  # fmt: skip
NAMES = (*WARP_FUNCTIONS, *FLOAT_FUNCTIONS)

_OF_WARP = types.int64(*[types.int64] * 6)
_OF_FLOAT = types.float32(types.float32)


def _callable(signature, function):
    """A C function, kept on disk."""
    made = CFunc(function.py_func, normalize_signature(signature), {}, {"nopython": True})
    keep_on_disk(made, function.py_func)
    made.compile()
    return made


@cache
def compiled():
    """The functions as C callables, kept alive, and their addresses."""
    made = [_callable(_OF_WARP, function) for function in WARP_FUNCTIONS.values()]
    made += [_callable(_OF_FLOAT, function) for function in FLOAT_FUNCTIONS.values()]
    return made, np.array([each.address for each in made], dtype=np.int64)
