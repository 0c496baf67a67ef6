"""Philox4x32-10 in integers, and what is drawn from it."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import torch

MASK = 0xFFFFFFFF
# The use of a word, in the four high bits of its counter's third word.
INITIAL_ROWS = 0 << 28
RANDOM_INDICES = 1 << 28
DROPOUT = 2 << 28


def philox4x32(counter: tuple[Any, Any, Any, Any], key: tuple[int, int]) -> tuple[Any, Any, Any, Any]:
    """Salmon et al. 2011, section 5.3 ("Philox-4x32"), 10 rounds: four words of a counter and a key.

    Words of the counter are integers, or arrays of uint64, for all of their elements.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        product_0 = 0xD2511F53 * c0
        product_1 = 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (
            (product_1 >> 32) ^ c1 ^ k0,
            product_1 & MASK,
            (product_0 >> 32) ^ c3 ^ k1,
            product_0 & MASK,
        )
        k0 = (k0 + 0x9E3779B9) & MASK
        k1 = (k1 + 0xBB67AE85) & MASK
    return c0, c1, c2, c3


def halves(number: Any) -> tuple[Any, Any]:
    """Low and high 32 bits of a 64-bit integer in two's complement, or of each uint64 of an array."""
    return number & MASK, (number >> 32) & MASK


def derive_seed(seed: int, stream: int, step: int) -> int:
    """See `tritonrec.ops.derive_seed`."""
    for name, number in (("seed", seed), ("stream", stream), ("step", step)):
        if not -(1 << 63) <= number < 1 << 63:
            raise ValueError(f"{name} must lie in [-2**63, 2**63), got {number}")
    return _derived(seed, stream, step)


@lru_cache(maxsize=1024)  # the micro-batches of a window derive the same seeds
def _derived(seed: int, stream: int, step: int) -> int:
    w0, w1, _, _ = philox4x32((*halves(step), *halves(stream)), halves(seed))
    word = w1 << 32 | w0
    return word - (1 << 64) if word >> 63 else word


def initial_rows(seed: int, table: int, keys: torch.Tensor, dim: int, scale: float) -> torch.Tensor:
    """See `tritonrec.ops.initial_rows`."""
    tables, dims = (torch.full(keys.shape, each, dtype=torch.int64, device="cpu") for each in (table, dim))
    scales = torch.full(keys.shape, scale, dtype=torch.float32, device="cpu")
    return initial_rows_of_tables(seed, tables, keys, dims, scales, dim)


def initial_rows_of_tables(seed, tables, keys, dims, scales, width) -> torch.Tensor:
    """See `tritonrec.ops.initial_rows_of_tables`."""
    low, high = halves(keys.cpu().numpy().astype(np.uint64)[:, None])
    table = tables.cpu().numpy().astype(np.uint64)[:, None] & MASK
    blocks = INITIAL_ROWS | np.arange(-(-width // 4), dtype=np.uint64)
    words = np.stack(philox4x32((low, high, blocks, table), halves(seed)), axis=-1)
    units = ((words >> 8).astype(np.float32) - np.float32(2**23)) * np.float32(2.0**-23)
    rows = torch.from_numpy(units.reshape(len(keys), 4 * len(blocks))[:, :width]) * scales.cpu()[:, None]
    own = torch.arange(width, dtype=torch.int64, device="cpu") < dims.cpu()[:, None]
    return torch.where(own, rows, 0.0).to(keys.device)


def random_indices(seed, stream, step, sample_ids, positions, count, upper) -> torch.Tensor:
    """See `tritonrec.ops.random_indices`."""
    key = halves(derive_seed(seed, stream, step))
    indices = np.empty((sample_ids.numel(), count), np.int64)
    for row, sample, position in zip(indices, sample_ids.tolist(), positions.tolist(), strict=True):
        for j in range(0, count, 4):
            words = philox4x32((*halves(sample), RANDOM_INDICES | j // 4, position & MASK), key)
            row[j : j + 4] = [(word * upper) >> 32 for word in words][: count - j]
    return torch.from_numpy(indices).to(sample_ids.device)
