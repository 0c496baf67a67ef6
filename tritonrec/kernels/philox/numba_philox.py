"""Philox4x32-10 and its two users on the CPU, one counter block of four words at a time."""

from __future__ import annotations

import numpy as np
import torch

from tritonrec.kernels.philox import reference
from tritonrec.kernels.philox.reference import derive_seed, halves
from tritonrec.kernels.row_layout import flat

from ..caches import njit

MULTIPLIER_0 = np.uint64(0xD2511F53)
MULTIPLIER_1 = np.uint64(0xCD9E8D57)
WEYL_0 = np.uint32(0x9E3779B9)
WEYL_1 = np.uint32(0xBB67AE85)
HALF = np.uint64(32)
U = np.uintp


def initial_rows(seed: int, table: int, keys: torch.Tensor, dim: int, scale: float) -> torch.Tensor:
    """See `tritonrec.ops.initial_rows`."""
    tables, dims = (torch.full(keys.shape, each, dtype=torch.int64, device="cpu") for each in (table, dim))
    scales = torch.full(keys.shape, scale, dtype=torch.float32, device="cpu")
    return initial_rows_of_tables(seed, tables, keys, dims, scales, dim)


def initial_rows_of_tables(seed, tables, keys, dims, scales, width) -> torch.Tensor:
    """See `tritonrec.ops.initial_rows_of_tables`."""
    rows = torch.empty(keys.numel(), width, dtype=torch.float32, device="cpu")
    identity = *map(np.uint32, halves(seed)), np.uint64(reference.INITIAL_ROWS)
    given = (each.contiguous().numpy() for each in (tables, keys, dims, scales))
    _initial_rows(*identity, *given, flat(rows), U(width))
    return rows


def random_indices(seed, stream, step, sample_ids, positions, count, upper) -> torch.Tensor:
    """See `tritonrec.ops.random_indices`."""
    indices = torch.empty(sample_ids.numel(), count, dtype=torch.int64, device="cpu")
    identity = *map(np.uint32, halves(derive_seed(seed, stream, step))), np.uint64(reference.RANDOM_INDICES)
    rows = sample_ids.contiguous().numpy(), positions.contiguous().numpy()
    _random_indices(*identity, *rows, np.uint64(upper), flat(indices), U(count))
    return indices


@njit(cache=True, nogil=True, inline="always")
def philox4x32(c0, c1, c2, c3, k0, k1):
    """Ten rounds of Philox: counter (c0..c3) and key (k0, k1), all uint32, to four uint32 words.

    Inlined because a loop over counters vectorises only without a call in it.
    """
    for _ in range(10):
        # Two 32 x 32-bit products; their high halves change places, mixed with the other words and the key.
        product_0 = MULTIPLIER_0 * np.uint64(c0)
        product_1 = MULTIPLIER_1 * np.uint64(c2)
        c0 = np.uint32(np.uint32(product_1 >> HALF) ^ c1 ^ k0)
        c1 = np.uint32(product_1)
        c2 = np.uint32(np.uint32(product_0 >> HALF) ^ c3 ^ k1)
        c3 = np.uint32(product_0)
        # The key moves by the golden ratio and by sqrt(3) - 1, as fractions of 2**32.
        k0 = np.uint32(k0 + WEYL_0)
        k1 = np.uint32(k1 + WEYL_1)
    return c0, c1, c2, c3


@njit(cache=True, nogil=True)
def signed_unit(word):
    """The 24 high bits of a word as a float32 in [-1, 1), exactly."""
    # 24 bits are what float32 holds: the conversion and the product are exact.
    return np.float32(np.int32(word >> np.uint32(8)) - np.int32(1 << 23)) * np.float32(2.0**-23)


@njit(cache=True, nogil=True)
def bounded(word, upper):
    """The high half of word * upper: uniform in [0, upper) up to a bias of upper / 2**32."""
    return np.int64((np.uint64(word) * upper) >> HALF)


@njit(cache=True, nogil=True)
def _initial_rows(k0, k1, tag, tables, keys, dims, scales, rows, width):
    """rows is flat (keys, width). Positions have no sign: one that could wrap around does not vectorise."""
    for i in range(keys.shape[0]):
        low = np.uint32(keys[i] & 0xFFFFFFFF)
        high = np.uint32((keys[i] >> 32) & 0xFFFFFFFF)
        table, scale = np.uint32(tables[i] & 0xFFFFFFFF), scales[i]
        dim = U(min(max(dims[i], 0), np.int64(width)))
        blocks = dim // U(4)
        first = U(i) * width
        for block in range(blocks):
            # A counter block gives four columns; the key of a row and the block number are its identity.
            w0, w1, w2, w3 = philox4x32(low, high, np.uint32(tag | block), table, k0, k1)
            at = first + U(4) * block
            rows[at] = signed_unit(w0) * scale
            rows[at + U(1)] = signed_unit(w1) * scale
            rows[at + U(2)] = signed_unit(w2) * scale
            rows[at + U(3)] = signed_unit(w3) * scale
        if dim > U(4) * blocks:
            words = philox4x32(low, high, np.uint32(tag | blocks), table, k0, k1)
            for j in range(dim - U(4) * blocks):
                rows[first + U(4) * blocks + j] = signed_unit(words[j]) * scale
        for column in range(dim, width):
            rows[first + column] = np.float32(0.0)


@njit(cache=True, nogil=True)
def _random_indices(k0, k1, tag, sample_ids, positions, upper, indices, count):
    """indices is flat (tokens, count)."""
    blocks = count // U(4)
    for i in range(sample_ids.shape[0]):
        low = np.uint32(sample_ids[i] & 0xFFFFFFFF)
        high = np.uint32((sample_ids[i] >> 32) & 0xFFFFFFFF)
        position = np.uint32(positions[i] & 0xFFFFFFFF)
        first = U(i) * count
        for block in range(blocks):
            w0, w1, w2, w3 = philox4x32(low, high, np.uint32(tag | block), position, k0, k1)
            at = first + U(4) * block
            indices[at] = bounded(w0, upper)
            indices[at + U(1)] = bounded(w1, upper)
            indices[at + U(2)] = bounded(w2, upper)
            indices[at + U(3)] = bounded(w3, upper)
        if count > U(4) * blocks:
            words = philox4x32(low, high, np.uint32(tag | blocks), position, k0, k1)
            for j in range(count - U(4) * blocks):
                indices[first + U(4) * blocks + j] = bounded(words[j], upper)
