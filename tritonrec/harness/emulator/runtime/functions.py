"""Addresses of the runtime's functions, in the order in which compiled programs know them."""
# mypy: ignore-errors

from __future__ import annotations

import math
from functools import cache

import numpy as np
from numba import types
from numba.core.ccallback import CFunc
from numba.core.sigutils import normalize_signature

from tritonrec.kernels.caches import keep_on_disk, njit

from . import atomics, collectives, memory, scheduler, tensor_cores

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

# of one float32, which no CPU has as an instruction; the result is rounded once


@njit(cache=True)
def exp2(x):
    return np.float32(2.0 ** np.float64(x))


@njit(cache=True)
def log2(x):
    if x < 0:
        return np.float32(np.nan)
    if x == 0:
        return np.float32(-np.inf)
    return np.float32(math.log2(np.float64(x)))


@njit(cache=True)
def sin(x):
    return np.float32(math.sin(np.float64(x))) if abs(x) < np.inf else np.float32(np.nan)


@njit(cache=True)
def cos(x):
    return np.float32(math.cos(np.float64(x))) if abs(x) < np.inf else np.float32(np.nan)


@njit(cache=True)
def tanh(x):
    return np.float32(math.tanh(np.float64(x)))


FLOAT_FUNCTIONS = {"exp2": exp2, "log2": log2, "sin": sin, "cos": cos, "tanh": tanh}
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
