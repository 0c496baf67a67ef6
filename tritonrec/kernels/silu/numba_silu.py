# mypy: ignore-errors
"""SiLU on the CPU in one pass; every element takes the same path (`kernels.numba_float`)."""

import numpy as np
import torch

from tritonrec.kernels.numba_float import exp
from tritonrec.kernels.row_layout import flat
from tritonrec.kernels.workers import over_ranges

from ..caches import njit

ONE = np.float32(1.0)
U = np.uintp


@njit(cache=True, nogil=True, error_model="numpy")
def forward(x, y, start, stop):
    """start and stop are uintp: positions with a sign could wrap around, and the loop would not vectorise."""
    for i in range(start, stop):
        y[i] = x[i] / (ONE + exp(-x[i]))


@njit(cache=True, nogil=True, error_model="numpy")
def backward(dy, x, dx, start, stop):
    for i in range(start, stop):
        s = ONE / (ONE + exp(-x[i]))
        dx[i] = dy[i] * (s * (ONE + x[i] * (ONE - s)))


@njit(cache=True, nogil=True, error_model="numpy")
def backward_in_place(dy, x, start, stop):
    """dy becomes dx. Of its own because a loop vectorises only where its arrays are apart."""
    for i in range(start, stop):
        s = ONE / (ONE + exp(-x[i]))
        dy[i] = dy[i] * (s * (ONE + x[i] * (ONE - s)))


def silu(x: torch.Tensor) -> torch.Tensor:
    """See `tritonrec.kernels.silu.op.silu`."""
    y = x.new_empty(x.shape)
    arrays = flat(x), flat(y)
    over_ranges(lambda start, stop: forward(*arrays, U(start), U(stop)), x.numel(), 10.0 * x.numel())
    return y


def silu_backward(dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """dx, contiguous."""
    dx = x.new_empty(x.shape)
    arrays = flat(dy), flat(x), flat(dx)
    over_ranges(lambda start, stop: backward(*arrays, U(start), U(stop)), x.numel(), 20.0 * x.numel())
    return dx
