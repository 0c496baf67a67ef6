"""The error of a value or sum that has no fixed-point number, shared by all ops that add in fixed point."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch

from tritonrec.kernels.padding import report

FRACTION_BITS = 36


class ExactSumError(ArithmeticError):
    """A value or a sum that has no fixed-point number.

    Attributes: `name` of the tensor, `index` of the offending element in it, and its `value`, None where the
    error was put off (`check_summed`).
    """

    def __init__(
        self,
        name: str,
        index: tuple[int, ...],
        value: float | int | None,
        fraction_bits: int,
        into: str = "",
    ):
        self.name, self.index, self.value = name, index, value
        element = f"{name}[{', '.join(map(str, index))}]"
        unit = f"in units of 2**-{fraction_bits}"
        if value is None:
            super().__init__(f"{element} or a sum it is added to is not finite or leaves int64 {unit}")
            return
        if isinstance(value, float) and not math.isfinite(value):
            reason = "is not finite and has no exact sum"
        elif into:
            reason = f"added to {into} leaves the range of int64 {unit}: use fewer fraction bits"
        else:
            reason = (
                f"reaches 2**{62 - fraction_bits}, the end of fixed point {unit}: use fewer fraction bits"
            )
        super().__init__(f"{element} = {value!r} {reason}")


def sum_error(
    name: str, index: tuple[int, int], value: float | int, segment: int, fraction_bits: int
) -> ExactSumError:
    """The error for ``name[index]`` = `value`, which cannot be added to its segment."""
    fits = isinstance(value, int) or abs(value) < 2.0 ** (62 - fraction_bits)
    into = f"segment {segment}, column {index[1]},"
    return ExactSumError(name, index, value, fraction_bits, into if fits else "")


def check_fraction_bits(fraction_bits: int) -> None:
    """Refuse a number of fraction bits outside [0, 62]."""
    if not 0 <= fraction_bits <= 62:
        raise ValueError(f"fraction_bits must lie in [0, 62], got {fraction_bits}")


def report_value(
    code: torch.Tensor | int,
    status: torch.Tensor | None,
    name: str,
    values: torch.Tensor,
    fraction_bits: int,
) -> None:
    """Report 1 + the flat position of the first value without a fixed-point number (`padding.report`)."""

    shape = tuple(values.shape)

    def error(code: int) -> ExactSumError:
        index = tuple(int(i) for i in np.unravel_index(code - 1, shape))
        return ExactSumError(name, index, values[index].item(), fraction_bits)

    def late(code: int) -> ExactSumError:
        index = tuple(int(i) for i in np.unravel_index(code - 1, shape))
        return ExactSumError(name, index, None, fraction_bits)

    report(code, status, error, late)


def report_sum(
    code: torch.Tensor | int,
    status: torch.Tensor | None,
    name: str,
    values: torch.Tensor,
    segments: torch.Tensor,
    fraction_bits: int,
    source: torch.Tensor | None = None,
) -> None:
    """Report 1 + row * D + column of the first value that its segment cannot take (`padding.report`).

    With `source` the value of row k is ``values[source[k]]``.
    """

    def error(code: int) -> ExactSumError:
        row, column = divmod(code - 1, values.shape[1])
        value = values[row if source is None else int(source[row]), column].item()
        return sum_error(name, (row, column), value, int(segments[row]), fraction_bits)

    report(code, status, error, late_error(name, values.shape[1], fraction_bits))


def report_exact_gradients(
    bad: torch.Tensor, names: list[str], shape: tuple[int, int], fraction_bits: int
) -> None:
    """Report first bad positions of kernels that sum gradients as they compute them (`padding.report`).

    A position is that of a term among those (L, D) = `shape` of the first of `names`, then of the second, ...
    The terms are in no memory, so the error has no value.
    """

    def error(code: int) -> ExactSumError:
        which, place = divmod(code - 1, math.prod(shape))
        index = divmod(place, shape[1])
        return ExactSumError(f"gradient of {names[which]}", index, None, fraction_bits)

    report(bad, None, error, error)


def late_error(name: str, dim: int, fraction_bits: int) -> Callable[[int], ExactSumError]:
    """``error(1 + row * D + column)`` without the value, which is gone."""
    return lambda code: ExactSumError(name, divmod(code - 1, dim), None, fraction_bits)
