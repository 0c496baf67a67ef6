"""What is refused before a kernel looks at shapes: arguments that are no tensors, or on different devices."""

from __future__ import annotations

import math
from typing import Any

import torch


def not_a_tensor(name: str, value: object) -> TypeError:
    """The error for an argument that has to be a tensor."""
    if value is None:
        return TypeError(f"{name} must be a torch.Tensor, got None")
    kind = f"{type(value).__module__}.{type(value).__name__}".removeprefix("builtins.")
    return TypeError(f"{name} must be a torch.Tensor, got {kind}: torch.as_tensor({name}) makes one")


def check_tensors(optional: tuple[str, ...] = (), /, **tensors: object) -> None:
    """Refuse what is no strided tensor (nor None, where it is `optional`), and one on another device."""
    first: torch.Tensor | None = None
    first_name = ""
    for name, tensor in tensors.items():
        if tensor is None and name in optional:
            continue
        if not isinstance(tensor, torch.Tensor):
            raise not_a_tensor(name, tensor)
        if tensor.layout is not torch.strided:
            raise ValueError(f"{name} is {tensor.layout}: give {name}.to_dense()")
        if first is None:
            first, first_name = tensor, name
        elif tensor.device != first.device:
            raise ValueError(
                f"{first_name} is on {first.device}, {name} on {tensor.device}: move one of them"
            )


def check_whole(**numbers: object) -> None:
    """Refuse a number that is not whole by its type; a launcher would round it, or take None for NaN."""
    for name, number in numbers.items():
        if number is None or isinstance(number, float | str | list):
            raise TypeError(f"{name} must be a whole number, got {number!r}")


def check_finite(**numbers: object) -> None:
    """Refuse infinities and NaN, and an epsilon below 0: all that is computed with them would be lost."""
    for name, number in numbers.items():
        if isinstance(number, float) and not -math.inf < number < math.inf:
            raise ValueError(f"{name} must be finite, got {number}")
        if name == "eps" and isinstance(number, float) and number < 0:
            raise ValueError(f"eps must be at least 0, got {number}")


def as_float(name: str, number: Any) -> float:
    """The number as a float; a text is none, though ``float`` reads some."""
    if not isinstance(number, str | bytes):
        try:
            return float(number)
        except (TypeError, ValueError, OverflowError):
            pass
    raise TypeError(f"{name} must be a number, got {number!r}")


def check_shape(name: str, tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Refuse a tensor of another shape or dtype."""
    if tuple(tensor.shape) != tuple(shape) or tensor.dtype != dtype:
        raise ValueError(f"{name} must be {tuple(shape)} {dtype}, got {tuple(tensor.shape)} {tensor.dtype}")


def check_rank(rank: int, world_size: int) -> None:
    """Refuse a world size outside [1, 2**31) and a rank outside [0, world_size), naming both."""
    whole = all(isinstance(number, int) and not isinstance(number, bool) for number in (rank, world_size))
    if not whole or not 0 <= rank < world_size < 1 << 31:
        raise ValueError(
            f"rank must be in [0, world_size) and world_size in [1, 2**31), got rank {rank!r} and "
            f"world_size {world_size!r}"
        )
