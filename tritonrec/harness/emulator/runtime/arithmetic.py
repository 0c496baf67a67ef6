"""Functions of one float32 that no CPU has as an instruction; the result is rounded once."""
# mypy: ignore-errors

from __future__ import annotations

import math

import numpy as np

from tritonrec.kernels.caches import njit


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
