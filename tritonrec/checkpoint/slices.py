"""Slices of the hash ring: of keys, of ranks and of files.

The upper 32 bits of a key's murmur hash are its place on a ring of 2**32 places. The upper 16 bits cut the
ring into 65,536 slices. Rank r of W owns a contiguous range of places, as by `ops.owner_of`::

    place    0                                                      2**32
    slice    0 ................................................. 65535
    W = 2    |           rank 0          |           rank 1          |
    W = 3    |     rank 0      |     rank 1      |     rank 2        |    bounds lie inside slices
    W = 4    |   rank 0    |   rank 1    |   rank 2    |   rank 3    |
"""

from __future__ import annotations

from itertools import pairwise
from math import prod

import numpy as np
import torch
from torch import Tensor

from ..kernels import launch
from ..kernels.arguments import check_rank

SLICES = 1 << 16
PLACES = 1 << 32
_WIDTH = PLACES // SLICES

Range = tuple[int, int]
"""Places [begin, end) of the ring."""

PART_BYTES = 1 << 20
MAX_PARTS = 256


def slice_of(keys: Tensor) -> Tensor:
    """The slice (K,) int64 of each key: the upper 16 bits of its hash."""
    return launch.owner_of(keys, SLICES)


def range_of(rank: int, world_size: int) -> Range:
    """The range of places p that `rank` owns: ``p * world_size >> 32 == rank``.

    Raises ValueError for a rank that is not in [0, world_size).
    """
    check_rank(rank, world_size)
    # The least p with p * world_size >= rank * 2**32, by a division that rounds up.
    return -(-rank * PLACES // world_size), -(-(rank + 1) * PLACES // world_size)


def slices_of(part: Range) -> Range:
    """First and last slice that overlap a range of places."""
    return part[0] // _WIDTH, (part[1] - 1) // _WIDTH


def order_of(keys: Tensor) -> np.ndarray:
    """The order (K,) of `keys` by (slice, key as a signed number)."""
    by_key = np.argsort(keys.numpy())
    slices = np.take(slice_of(keys).numpy().astype(np.uint16), by_key)
    return np.take(by_key, np.argsort(slices, kind="stable"))  # of 16 bits: a radix sort


def take_rows(values: Tensor, positions: np.ndarray) -> Tensor:
    """``values[positions]`` for a contiguous tensor of any dtype.

    By numpy, in the calling thread: torch would start a pool of threads beside the training.
    """
    shape = (len(positions), *values.shape[1:])
    width = values.element_size() * prod(values.shape[1:])
    raw = values.reshape(-1).view(torch.uint8).numpy().reshape(len(values), width)
    taken = np.take(raw, positions, axis=0)
    return torch.from_numpy(taken.reshape(-1)).view(values.dtype).reshape(shape)


def parts_of(owned: Range, num_bytes: int) -> list[Range]:
    """Cut the range of a rank into parts of about PART_BYTES, one file each.

    Cuts are multiples of the ring divided by a power of two, at most MAX_PARTS, so that ranks of another
    world size find their shards in few files.
    """
    begin, end = owned
    # What the whole table would have at this rank's density, so that ranks of one run cut alike.
    whole_table = num_bytes * PLACES // (end - begin)
    parts = 1
    while parts < MAX_PARTS and parts * PART_BYTES < whole_table:
        parts *= 2
    stride = PLACES // parts
    cuts = [begin, *range((begin // stride + 1) * stride, end, stride), end]
    return list(pairwise(cuts))


def overlaps(left: Range, right: Range) -> bool:
    return left[0] < right[1] and right[0] < left[1]


def tiling_error(parts: list[Range]) -> str | None:
    """An error about the first gap or overlap of `parts`; None if they tile the ring."""
    reached = 0
    # The empty part at the end shows a gap behind the last one.
    for begin, end in [*sorted(parts), (PLACES, PLACES)]:
        if begin > reached:
            first, last = slices_of((reached, begin))
            return f"nothing holds slices {first} to {last}"
        if begin < reached:
            first, last = slices_of((begin, min(end, reached)))
            return f"two files hold slices {first} to {last}"
        reached = end
    return None
