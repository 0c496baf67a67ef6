"""Lists whose length only the device knows: as long as a bound, with a count of what holds.

    keys     7  3  7  7  3  0  0  0      (8,), of which the first `count` = 5 hold
    unique   7  3  0  0  0  0  0  0      (8,), of which the first 2 hold
    inverse  0  1  0  0  1 -1 -1 -1      positions and rows are -1 in the padding, everything else is 0

A count is a () int64 tensor, so no host waits for it: an op with ``padded=True`` gives one, and ops take it
as ``count``. What lies behind a count is neither read nor moved; one below 0 or above the length counts as
that end. What an op would raise from the data it writes into ``status`` instead, where it is given one: ()
int64, 0 as long as all went well, and after that what the first failing call wrote.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from tritonrec.kernels import deferred
from tritonrec.kernels.arguments import not_a_tensor


def check_scalar(name: str, scalar: torch.Tensor | None) -> None:
    """Refuse a count or a status that is not () int64; None passes."""
    if scalar is None:
        return
    if not isinstance(scalar, torch.Tensor):
        raise not_a_tensor(name, scalar)
    if scalar.dtype != torch.int64 or scalar.dim() != 0:
        raise ValueError(f"{name} must be () int64, got shape {tuple(scalar.shape)} {scalar.dtype}")


def check_status(status: torch.Tensor, most: int | None = None) -> None:
    """Refuse a status that no op wrote: not () int64, below 0, or above `most`; waits for the device."""
    if status is None:
        raise not_a_tensor("status", status)
    check_scalar("status", status)
    code = int(status)
    if code < 0 or (most is not None and code > most):
        raise ValueError(f"status must be 0 or what an op wrote, got {code}")


def num_valid(count: torch.Tensor | None, size: int) -> int:
    """How many of `size` entries are valid; reads the count, so for implementations on the host."""
    return size if count is None else min(max(int(count), 0), size)


def padding(size: int, count: torch.Tensor) -> torch.Tensor:
    """(size,) bool, true behind the count."""
    return torch.arange(size, device=count.device) >= count


def pad(values: torch.Tensor, size: int, fill: int | bool) -> torch.Tensor:
    """Lengthen the first dimension to `size`."""
    if values.shape[0] == size:
        return values
    padded = values.new_full((size, *values.shape[1:]), fill)
    padded[: values.shape[0]] = values
    return padded


def first_valid(values: torch.Tensor, count: torch.Tensor | None) -> torch.Tensor:
    """The entries before the count; reads the count, so for implementations on the host."""
    return values if count is None else values[: num_valid(count, values.shape[0])]


def report(
    code: torch.Tensor | int,
    status: torch.Tensor | None,
    error: Callable[[int], Exception],
    late: Callable[[int], Exception] | None = None,
) -> None:
    """Raise ``error(code)`` for a code that is not 0; with a `status` keep the first code there instead.

    Kernels give the first bad positions of their programs, (n,) int64, `NONE` where there is none. The code
    is then 1 + the smallest. Where errors are put off (`kernels.deferred`), positions are kept for
    ``late(code)``, which needs none of the op's tensors.
    """
    if isinstance(code, torch.Tensor) and code.dim():
        collecting = deferred.current()
        if status is None and late is not None and collecting is not None:
            collecting.add(code, late)
            return
        code = deferred.first_bad(code)
    if status is None:
        if int(code):
            deferred.refuse(error(int(code)))
    elif isinstance(code, torch.Tensor):
        torch.where(status == 0, code, status, out=status)
    elif code and not int(status):
        status.fill_(code)
