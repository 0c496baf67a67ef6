# mypy: ignore-errors
"""The logits of a DLRM in one call of the CPU: the loops of its ops, a few samples after the others.

Dimensions: B samples, F dense features, C rows of a sample.
"""

import numpy as np

from tritonrec.kernels.caches import njit
from tritonrec.kernels.dot_interaction.numba_dot_interaction import forward
from tritonrec.kernels.linear.numba_linear import ROWS, rows_times

from .numba_layers import _of

U = np.uintp


@njit(cache=True, nogil=True)
def _apply(weights, at, widths, first, last, x, samples, rectify_last):
    """Layers [first, last) of x, with ReLU between them."""
    for layer in range(first, last):
        inner, columns = widths[layer, 0], widths[layer, 1]
        y = np.empty(samples * columns, np.float32)
        weight, bias = _of(weights, at, 2 * layer), _of(weights, at, 2 * layer + 1)
        rows_times(x, inner, weight, bias, y, U(0), samples, inner, columns)
        if rectify_last or layer + 1 < last:
            for i in range(samples * columns):
                y[i] = np.float32(0.0) if y[i] < np.float32(0.0) else y[i]  # as torch: -0 and NaN stay
        x = y
    return x


@njit(cache=True, nogil=True)
def logits(weights, at, widths, bottom, dense, rows, count, dim, out, start, stop):
    """Logits of samples [start, stop) in out (B,).

    Args:
        weights: of each layer weight, as `rows_times` reads it, and bias, part n at [at[n, 0], at[n, 1]).
        widths: (layers, 2), inputs and outputs; the first `bottom` layers are of the dense features.
        dense: flat (B, F). rows: flat (B, C, dim), `count` is C.
    """
    own = dim if bottom else U(0)
    vectors = count + (U(1) if bottom else U(0))
    pairs = vectors * (vectors - U(1)) // U(2)
    for first in range(start, stop, ROWS):
        samples = min(ROWS, stop - first)
        together = np.empty(samples * vectors * dim, np.float32)
        joined = np.empty(samples * (own + pairs), np.float32)
        products = np.empty(samples * pairs, np.float32)
        x = dense[first * widths[0, 0] :] if bottom else dense
        x = _apply(weights, at, widths, 0, bottom, x, samples, True)
        for i in range(samples):
            to, of = i * vectors * dim, (first + i) * count * dim
            for d in range(own):
                together[to + d] = x[i * dim + d]
                joined[i * (own + pairs) + d] = x[i * dim + d]
            for d in range(count * dim):
                together[to + own + d] = rows[of + d]
        forward(together, products, U(0), samples, vectors, dim)
        for i in range(samples):
            for p in range(pairs):
                joined[i * (own + pairs) + own + p] = products[i * pairs + p]
        x = _apply(weights, at, widths, bottom, len(widths), joined, samples, False)
        for i in range(samples):
            out[first + i] = x[i]
