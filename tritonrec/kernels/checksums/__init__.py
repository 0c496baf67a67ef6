"""Checksums of bits, by row and of whole tensors: any single flipped bit changes them.

    checksum of a row = sum over its 32-bit words i of  word[i] * weight(i)   mod 2**64

Words are signed. Weights are odd numbers below 2**31 that differ by place, so a flipped bit k changes the sum
by 2**k times an odd number, which is not 0; other changes go unseen by chance. Sums of integers do not depend
on their order: devices and threads agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch

CHUNK = 1024
"""Words of a tensor that `checksum` adds up as one row."""


def as_bytes(values: torch.Tensor) -> torch.Tensor:
    """(n,) uint8, the bytes of `values`, of any shape and dtype; a view where they lie without gaps."""
    flat = values.detach().contiguous().view(-1)
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8)  # one element is contiguous with any stride


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are equal in shape, dtype and bits: NaN is equal to itself, 0.0 is not to -0.0."""
    alike = one.shape == other.shape and one.dtype == other.dtype
    return alike and torch.equal(as_bytes(one), as_bytes(other))


def row_checksums(values: torch.Tensor) -> torch.Tensor:
    """(K,) int64 of the rows of `values` (K, n), of any dtype of four bytes."""
    words = values.detach().contiguous().view(torch.int32)
    weights = _weights(words.shape[1], words.device)
    if not words.is_cpu:
        return (words.to(torch.int64) * weights).sum(1)
    from .numba_checksums import add_words

    sums = torch.empty(len(words), dtype=torch.int64, device="cpu")
    add_words(words.numpy(), weights.numpy(), sums.numpy())
    return sums


def sums_of_bits(tensors: Sequence[torch.Tensor], parts: int = 1) -> torch.Tensor:
    """(P * parts,) int64, for each of P tensors, of a dtype of four bytes, the sums of so many `parts` of its
    signed 32-bit words, in their order.

    Two changes of a part may cancel out, which they do not in a `checksum`; in turn many small tensors are
    one call.
    """
    if not all(each.is_cpu and each.is_contiguous() for each in tensors):
        words = [each.detach().view(torch.int32) for each in tensors]
        if parts == 1:
            return torch.stack([each.sum() for each in words])
        flat = [each.contiguous().view(-1) for each in words]
        cuts = [[len(each) * i // parts for i in range(1, parts)] for each in flat]
        pairs = zip(flat, cuts, strict=True)
        return torch.stack([part.sum() for each, at in pairs for part in each.tensor_split(at)])
    from .numba_checksums import add_bits

    table = np.array([(each.data_ptr(), each.numel()) for each in tensors], np.int64).reshape(-1, 2)
    if parts > 1:
        bounds = table[:, 1:] * np.arange(parts + 1) // parts
        table = np.stack([table[:, :1] + 4 * bounds[:, :-1], np.diff(bounds, axis=1)], 2).reshape(-1, 2)
    sums = np.empty(len(table), np.int64)
    add_bits(table, sums)
    return torch.from_numpy(sums)


def checksum(values: torch.Tensor) -> torch.Tensor:
    """() int64 of the bytes of `values`, of any shape and dtype, and of their number.

    Rows of `CHUNK` words, the last one filled up with zeros, whose checksums are added up like words.
    """
    flat = as_bytes(values)
    if not flat.is_cpu:
        chunks = len(flat) // (4 * CHUNK) + 1
        of_chunks = _weights(chunks, flat.device)
        filled = torch.cat([flat, flat.new_zeros(chunks * 4 * CHUNK - len(flat))])
        return (row_checksums(filled.view(torch.int32).view(chunks, CHUNK)) * of_chunks).sum() + len(flat)
    return torch.tensor(_on_host(flat.numpy()), dtype=torch.int64, device="cpu")


def part_checksums(values: torch.Tensor, sizes: list[int], without: int) -> torch.Tensor:
    """(P,) int64, the `checksum` of each part of `values`, of `sizes` rows; 0 for the part `without`."""
    if not values.is_cpu:
        zero = torch.zeros((), dtype=torch.int64, device=values.device)
        parts = enumerate(values.split(sizes))
        return torch.stack([zero if number == without else checksum(part) for number, part in parts])
    flat, sums, end = as_bytes(values).numpy(), [], 0
    row = len(flat) // max(len(values), 1)
    for number, size in enumerate(sizes):
        start, end = end, end + size * row
        sums.append(0 if number == without else _on_host(flat[start:end]))
    return torch.tensor(sums, dtype=torch.int64, device="cpu")


def write_row_checksums(sums: torch.Tensor, handles: torch.Tensor, values: torch.Tensor) -> None:
    """``sums[handles[i]] = row_checksums(values)[i]``, on the CPU; a handle of -1 is left out."""
    from .numba_checksums import write_rows

    words = values.detach().contiguous().view(torch.int32)
    weights = _weights(words.shape[1], words.device)
    write_rows(words.numpy(), weights.numpy(), handles.numpy(), sums.numpy())


def first_other_row(
    sums: torch.Tensor, handles: torch.Tensor, values: torch.Tensor, skipped: torch.Tensor
) -> int:
    """The first i with ``sums[handles[i]] != row_checksums(values)[i]``, on the CPU; -1: there is none.

    Handles of -1 are left out, and so are the positions `skipped` (n,) int64, where -1 is no position.
    """
    from .numba_checksums import first_other

    words = values.detach().contiguous().view(torch.int32)
    weights = _weights(words.shape[1], words.device)
    return first_other(words.numpy(), weights.numpy(), handles.numpy(), sums.numpy(), skipped.numpy())


def _on_host(content: Any) -> int:
    """`checksum` of an array of bytes."""
    from .numba_checksums import add_chunks

    whole = len(content) // 4 * 4
    words = content[:whole].view("<i4")
    if not words.flags.aligned:
        words = words.copy()
    chunks = len(content) // (4 * CHUNK) + 1
    return add_chunks(words, content[whole:], _on_host_weights(CHUNK), _on_host_weights(chunks))


@lru_cache(maxsize=1024)
def _on_host_weights(count: int) -> Any:
    """`_weights` as an array."""
    return _weights(count, torch.device("cpu")).numpy()


def _weights(count: int, device: torch.device) -> torch.Tensor:
    """(count,) int32, odd and positive, the first of a longer list."""
    return _all_weights(1 << max(count - 1, CHUNK - 1).bit_length(), device)[:count]


@lru_cache(maxsize=64)
def _all_weights(count: int, device: torch.device) -> torch.Tensor:
    """Bits of multiples of the golden ratio, as Fibonacci hashing takes them."""
    # Odd, so that a flipped bit never vanishes modulo 2**64;
    # different, so that values that change places show.
    multiples = (torch.arange(1, count + 1, dtype=torch.int64, device="cpu") * 0x9E3779B1) & 0x7FFFFFFF
    return (multiples | 1).to(torch.int32).to(device)
