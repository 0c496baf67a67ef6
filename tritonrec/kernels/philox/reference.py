"""Philox4x32-10 in Python integers, and what is drawn from it, one element at a time."""

from __future__ import annotations

import numpy as np
import torch

MASK = 0xFFFFFFFF


def philox4x32(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Salmon et al. 2011, section 5.3 ("Philox-4x32"), 10 rounds: four words of a counter and a key."""
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


def halves(number: int) -> tuple[int, int]:
    """Low and high 32 bits of a 64-bit integer in two's complement."""
    return number & MASK, (number >> 32) & MASK


def initial_rows(
    key: tuple[int, int], table: int, tag: int, keys: torch.Tensor, dim: int, scale: float
) -> torch.Tensor:
    rows = torch.empty(keys.numel(), dim, dtype=torch.float32)
    for i, row_key in enumerate(keys.tolist()):
        for column in range(dim):
            words = philox4x32((*halves(row_key), tag | column // 4, table), key)
            unit = np.float32((words[column % 4] >> 8) - 2**23) * np.float32(2.0**-23)
            rows[i, column] = float(unit * np.float32(scale))
    return rows


def random_indices(
    key: tuple[int, int],
    tag: int,
    sample_ids: torch.Tensor,
    positions: torch.Tensor,
    count: int,
    upper: int,
) -> torch.Tensor:
    indices = torch.empty(sample_ids.numel(), count, dtype=torch.int64)
    for i, (sample, position) in enumerate(zip(sample_ids.tolist(), positions.tolist(), strict=True)):
        for j in range(count):
            words = philox4x32((*halves(sample), tag | j // 4, position & MASK), key)
            indices[i, j] = (words[j % 4] * upper) >> 32
    return indices
