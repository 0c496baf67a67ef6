# mypy: ignore-errors
"""Common keys of two buffers: a table over the smaller one, probed with the larger one.

Slots are int32 positions into the smaller buffer, plus one, so that zeroed memory is an empty table and no
key is special. The keys of a buffer are distinct, so building compares no keys at all.
"""

import numpy as np
import torch

from tritonrec.kernels import murmur
from tritonrec.kernels.intersect.op import pad_common
from tritonrec.kernels.murmur.numba_murmur import mix64
from tritonrec.kernels.numba_intrinsics import prefetch
from tritonrec.kernels.padding import first_valid

from ..caches import njit

BLOCK = 128
_ONE = np.uint64(1)
_ZERO = np.uint64(0)


def intersect(left, right, left_count, right_count, _table, padded) -> tuple[torch.Tensor, ...]:
    """See `tritonrec.ops.intersect`."""
    size = min(left.numel(), right.numel())
    left, right = first_valid(left, left_count), first_valid(right, right_count)
    small, large = (right, left) if right.numel() <= left.numel() else (left, right)
    matched = torch.empty(large.numel(), dtype=torch.int64, device="cpu")
    small_keys, large_keys = (keys.contiguous().numpy().view("uint64") for keys in (small, large))
    common = match(small_keys, large_keys, matched.numpy(), np.uint64(murmur.SECRET))
    # The result goes by positions of `left`, whichever of the two was probed with.
    if large is not left:
        in_left = torch.empty(left.numel(), dtype=torch.int64, device="cpu")
        invert(matched.numpy(), in_left.numpy())
        matched = in_left
        common = int((in_left >= 0).sum())  # fewer, where keys of `right` are there twice
    left_positions, right_positions = (torch.empty(common, dtype=torch.int64, device="cpu") for _ in range(2))
    compact(matched.numpy(), left_positions.numpy(), right_positions.numpy())
    return pad_common(left_positions, right_positions, size, padded)


@njit(inline="always")
def _hash_block(keys, start, size, shift, secret, slots, homes):
    for i in range(size):
        # The high bits of the hash number the slots; a slot is two words.
        homes[i] = (mix64(keys[start + i] ^ secret) >> shift) << _ONE
    for i in range(size):
        prefetch(slots, homes[i])


@njit(inline="always")
def _bits_for(count):
    bits = 4
    while (1 << bits) < 2 * count:
        bits += 1
    return bits


@njit(cache=True, nogil=True)
def fill(small, secret):
    """Slots of the keys of `small`, two words each: a key, and 1 + its position."""
    bits = _bits_for(len(small))
    slots = np.zeros(2 << bits, np.uint64)
    shift, last, step = np.uint64(64 - bits), np.uint64((2 << bits) - 1), np.uint64(2)
    homes = np.empty(BLOCK, np.uint64)
    for start in range(0, len(small), BLOCK):
        size = min(BLOCK, len(small) - start)
        _hash_block(small, start, size, shift, secret, slots, homes)
        for i in range(size):
            word = homes[i]
            # Keys are distinct: only a free slot is looked for.
            while slots[word + _ONE] != _ZERO:
                word = (word + step) & last
            slots[word] = small[start + i]
            slots[word + _ONE] = np.uint64(start + i + 1)
    return slots


@njit(cache=True, nogil=True)
def match(small, large, matched, secret):
    """``matched[p]`` = position in `small` of ``large[p]``, or -1. Returns how many matched."""
    slots = fill(small, secret)
    shift = np.uint64(64 - _bits_for(len(small)))
    last, step = np.uint64(len(slots) - 1), np.uint64(2)
    homes = np.empty(BLOCK, np.uint64)
    common = 0
    for start in range(0, len(large), BLOCK):
        size = min(BLOCK, len(large) - start)
        _hash_block(large, start, size, shift, secret, slots, homes)
        for i in range(size):
            key = large[start + i]
            word = homes[i]
            position = slots[word + _ONE]
            while position != _ZERO and slots[word] != key:
                word = (word + step) & last
                position = slots[word + _ONE]
            matched[start + i] = np.int64(position) - 1
            common += position != _ZERO
    return common


@njit(cache=True, nogil=True)
def compact(matched, left_positions, right_positions):
    """`matched` over the left buffer: list the matches in order of the left position."""
    out = 0
    for position in range(len(matched)):
        if matched[position] >= 0:
            left_positions[out] = position
            right_positions[out] = matched[position]
            out += 1


@njit(cache=True, nogil=True)
def invert(matched, inverse):
    """``inverse[matched[p]] = p`` for every match."""
    inverse[:] = -1
    for position in range(len(matched)):
        if matched[position] >= 0:
            inverse[matched[position]] = position
