"""Mixed precision of ops: what ``torch.autocast`` casts, and float32 kernels for bfloat16 and float16.

An op's record gives the rule of each float argument that autocast casts: `LOWER` to the dtype of autocast,
`FLOAT32` to float32. Arguments without a rule are taken as they are. As in torch, float64 is never cast.

Whatever the dtype of its arguments, an op computes in float32 in its fixed order and rounds each result once,
to nearest even. So the kernels of the CPU take widened arguments, and a row's bits depend on that row alone
as they do in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch

from tritonrec.kernels.dispatch import is_compiling

Precision = Literal["float32", "bf16", "fp16"]
DTYPES: dict[Precision, torch.dtype] = {
    "float32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
LOW = (torch.bfloat16, torch.float16)
LOWER, FLOAT32 = "lower", "float32"
Casts = tuple[tuple[int, torch.dtype], ...]
"""Places of arguments, and the dtypes that they get."""


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager[object]:
    """`torch.autocast` on `device` to the dtype of `precision`, without its cache; nothing for ``"float32"``.

    The cache would keep cast weights past the update that changes the weights.
    """
    if precision == "float32":
        return nullcontext()
    return torch.autocast(device.type, DTYPES[precision], cache_enabled=False)


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype of ``torch.autocast`` for tensors of `device` on this thread; None where it is off."""
    kind = device.type
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Inside, autocast is off for tensors of `device`: what is computed there has its dtypes already."""
    off = is_compiling() or autocast_dtype(device) is None
    return nullcontext() if off else torch.autocast(device.type, enabled=False)


def to_dtype(tensor: Any, dtype: torch.dtype) -> Any:
    """The tensor in `dtype` where autocast would cast it; anything else as it is."""
    castable = isinstance(tensor, torch.Tensor) and (tensor.dtype == torch.float32 or tensor.dtype in LOW)
    return tensor.to(dtype) if castable else tensor


def casts_of(rules: Sequence[tuple[int, str]], arguments: Sequence[Any], device: torch.device) -> Casts:
    """What autocast does to these arguments: none of those that have their dtype already."""
    low = autocast_dtype(device)
    if low is None:
        return ()
    wanted = [(at, low if rule == LOWER else torch.float32) for at, rule in rules]
    return tuple(
        (at, dtype)
        for at, dtype in wanted
        if arguments[at] is not None and arguments[at].dtype in (torch.float32, *LOW)
        if arguments[at].dtype != dtype
    )


def cast(arguments: tuple[Any, ...], casts: Casts) -> tuple[Any, ...]:
    """The arguments with those that `casts` names in their dtypes; autograd casts gradients back."""
    if not casts:
        return arguments
    given = list(arguments)
    for at, dtype in casts:
        given[at] = given[at].to(dtype)
    return tuple(given)


def widen(tensor: torch.Tensor) -> torch.Tensor:
    """bfloat16 and float16 as float32, which has every number of both; another dtype as it is."""
    return tensor.float() if tensor.dtype in LOW else tensor


def is_low(arguments: Sequence[Any], places: Iterable[int]) -> bool:
    """Whether any of the arguments at these places is of bfloat16 or float16."""
    # half the time of a generator
    found = [arguments[at] is not None and arguments[at].dtype in LOW for at in places]
    return any(found)


def run_widened(
    function: Callable[..., Any], arguments: Sequence[Any], like: Any, written: Iterable[int]
) -> Any:
    """What a float32 implementation gives for arguments of lower precision.

    Args:
        like: tensors, or one, of the dtypes that the results are rounded to.
        written: places of the arguments that the implementation overwrites.
    """
    wide = [widen(each) if isinstance(each, torch.Tensor) else each for each in arguments]
    results = function(*wide)
    for at in written:
        if wide[at] is not arguments[at]:
            arguments[at].copy_(wide[at])
    if isinstance(results, tuple):
        return tuple(one.to(other.dtype) for one, other in zip(results, like, strict=True))
    return None if results is None else results.to(like.dtype)
