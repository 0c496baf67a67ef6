"""The check that nothing an op writes to shares memory with its other arguments.

Row numbers, offsets and counts are checked once and then used. An op that wrote over them in between would
write anywhere; one that wrote over its inputs would read its own results. torch's own ops refuse such
arguments too.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace

import numpy as np
import torch

# Steps of the exact search. A pair of matrices with one row stride takes a few, whatever their size.
SEARCH = 10_000


def check_no_overlap(
    written: Mapping[str, torch.Tensor | None], read: Mapping[str, torch.Tensor | None]
) -> None:
    """Refuse arguments that share memory with one that is written to.

    Disjoint parts of one storage pass, also columns of one matrix that lie between each other.

    Args:
        written: arguments by name that the op writes to. Each is also refused if its own elements share
            memory, as those of `expand` do.
        read: its other arguments by name. These may share memory among themselves. None has no memory.
    Raises:
        ValueError: two arguments share memory, or two elements of one that is written to; or they lie so
            that `SEARCH` steps do not tell.
    """
    places: list[tuple[str, torch.Tensor, int, int]] = []
    for name, tensor in {**written, **read}.items():
        if tensor is None or tensor.numel() == 0:
            continue
        start = tensor.data_ptr()
        if start == 0:  # on the meta device
            continue
        if tensor.is_contiguous():
            stop = start + tensor.nbytes
        else:
            if name in written:
                _check_elements(name, tensor)
            stop = start + tensor.element_size() * _extent(tensor.shape, tensor.stride())
        for other, earlier, first, end in places:
            if start < end and first < stop and (other in written or name in written):
                _check_pair(other, earlier, name, tensor, written)
        places.append((name, tensor, start, stop))


def _extent(sizes: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Elements from the first to the last, inclusive."""
    return 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))


def _check_elements(name: str, tensor: torch.Tensor) -> None:
    reach = 1
    dimensions = (pair for pair in zip(tensor.stride(), tensor.shape, strict=True) if pair[1] > 1)
    # By ascending stride: each dimension has to step over all
    # that the smaller ones reach, or two places coincide.
    for stride, size in sorted(dimensions):
        if stride < reach:
            raise ValueError(
                f"{name} is written to, and elements of it share memory: it has shape {tuple(tensor.shape)} "
                f"and strides {tensor.stride()}; give {name}.clone()"
            )
        reach += (size - 1) * stride


def _check_pair(
    one: str,
    first: torch.Tensor,
    other: str,
    second: torch.Tensor,
    written: Mapping[str, torch.Tensor | None],
) -> None:
    if _columns_apart(first, second):
        return
    try:
        shared = np.shares_memory(_described(first), _described(second), max_work=SEARCH)  # type: ignore
    except np.exceptions.TooHardError:
        shared = True
    if not shared:
        return
    target, source = (one, other) if one in written else (other, one)
    raise ValueError(f"{target} is written to and shares memory with {source}: give {source}.clone()")


def _columns_apart(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether these are columns of one matrix, side by side: the usual case, told without a search."""
    if first.dim() < 2 or second.dim() < 2:
        return False
    row = first.element_size() * first.stride(0)
    if row == 0 or second.element_size() * second.stride(0) != row:
        return False
    width, other = (
        tensor.element_size() * _extent(tensor.shape[1:], tensor.stride()[1:]) for tensor in (first, second)
    )
    # Where the second begins in a row of the first: behind its columns, and ending before the next row's.
    between = (second.data_ptr() - first.data_ptr()) % row
    return width <= between and between + other <= row


def _described(tensor: torch.Tensor) -> np.ndarray:
    """An array of the tensor's addresses, whatever its dtype and device; nothing reads from it."""
    size = tensor.element_size()
    place = {
        "data": (tensor.data_ptr(), False),
        "shape": tuple(tensor.shape),
        "strides": tuple(size * stride for stride in tensor.stride()),
        "typestr": f"|V{size}",
        "version": 3,
    }
    return np.asarray(SimpleNamespace(__array_interface__=place))
