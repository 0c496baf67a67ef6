"""Elementwise functions whose last bit depends on the place of a value in its array.

On a CPU torch computes the whole vectors of an array one way, and what is left at its end another. Some
functions have other bits there, for few values of a hundred: too seldom for a comparison of some samples to
show it for sure. So these functions are looked at by themselves, on the machine that runs.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import lru_cache
from math import gcd
from typing import Any

import torch

NAMES = {
    "sigmoid", "silu", "softplus", "gelu", "mish", "elu", "pow", "exp2", "sinh", "cosh", "tan", "atan2",
    "logaddexp", "logaddexp2",
}  # fmt: skip
"""That were seen to differ, and what may; `differs` decides."""
VALUES = 2048
"""That are compared, about."""


@dataclass(frozen=True)
class Call:
    """A call of such a function for all values of an array.

    Args:
        arguments: by place or name, None for each tensor. count: of values. module: the one whose code made
            it; None for a backward pass.
    """

    func: Any
    arguments: tuple[tuple[int | str, Any], ...]
    dtype: torch.dtype
    count: int
    module: torch.nn.Module | None

    @classmethod
    def of(cls, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Call | None:
        """None where an op is none of these, or its arguments are of several shapes."""
        if not may_differ(func) or not isinstance(out, torch.Tensor) or out.device.type != "cpu":
            return None
        given: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
        tensors = [each for _, each in given if isinstance(each, torch.Tensor)]
        if any((each.shape, each.dtype) != (out.shape, out.dtype) for each in tensors):
            return None
        arguments = tuple((place, None if isinstance(each, torch.Tensor) else each) for place, each in given)
        return cls(func, arguments, out.dtype, out.numel(), _running())


def may_differ(func: Any) -> bool:
    """Whether an op is one of `NAMES`, in place or backward too."""
    return func.overloadpacket.__name__.removesuffix("_").removesuffix("_backward") in NAMES


def first_by_place(whole: list[Call], part: list[Call]) -> Call | None:
    """The first call for a whole batch that has other bits for a part of it, given the calls for both."""
    for one, other in zip(whole, part, strict=False):
        if one.func is not other.func:
            return None  # another path through the model
        width = gcd(one.count, other.count)
        if one.count != other.count and differs(one.func, one.arguments, one.dtype, width):
            return one
    return None


@lru_cache
def differs(func: Any, arguments: tuple[tuple[int | str, Any], ...], dtype: torch.dtype, width: int) -> bool:
    """Whether pieces of `width` values have other bits than an array of several has."""
    # A multiple of `width` of some 2048 values, two pieces at
    # least: the whole has vectors where the pieces have a tail.
    generator, count = torch.Generator().manual_seed(0), width * max(2, -(-VALUES // width))
    values = {
        place: 3 * torch.randn(count, generator=generator, dtype=torch.float32, device="cpu").to(dtype)
        for place, each in arguments
        if each is None
    }

    def called(part: slice) -> torch.Tensor:
        given = {place: values[place][part].clone() if each is None else each for place, each in arguments}
        places = [each for place, each in given.items() if isinstance(place, int)]
        return func(*places, **{name: each for name, each in given.items() if isinstance(name, str)})

    whole, pieces = called(slice(None)), [called(slice(at, at + width)) for at in range(0, count, width)]
    # pow of a negative value is NaN in both, and NaN equals nothing.
    return not torch.equal(whole.nan_to_num(), torch.cat(pieces).nan_to_num())


def _running() -> torch.nn.Module | None:
    """The module whose `forward` runs on this thread."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "forward" and isinstance(
            own := frame.f_locals.get("self"), torch.nn.Module
        ):
            return own
        frame = frame.f_back
    return None
