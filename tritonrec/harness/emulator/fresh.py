"""Memory that nobody wrote: ``torch.empty`` begins with a NaN that a kernel must not load."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils._device import _device_constructors

from .layout import POISON

_ALLOCATE = ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty"))


@contextlib.contextmanager
def noted(storages: set[int]) -> Iterator[None]:
    """Inside, new memory on the CPU holds `POISON`, and its address is in `storages`."""

    def filling(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def filled(*args: Any, **options: Any) -> torch.Tensor:
            out = allocate(*args, **options)
            written = type(out) is torch.Tensor and not out.is_quantized  # a fake one has no memory
            if written and out.device.type == "cpu" and out.layout == torch.strided:
                storage = out.untyped_storage()
                words = (ctypes.c_uint32 * (storage.nbytes() // 4)).from_address(storage.data_ptr())
                np.ctypeslib.as_array(words).fill(POISON)
                storages.add(storage.data_ptr())
            return out

        return filled

    _device_constructors()  # is made once, and ``with torch.device("meta")`` must know the true functions
    before = [getattr(owner, name) for owner, name in _ALLOCATE]
    for (owner, name), original in zip(_ALLOCATE, before, strict=True):
        setattr(owner, name, filling(original))
    try:
        yield
    finally:
        for (owner, name), original in zip(_ALLOCATE, before, strict=True):
            setattr(owner, name, original)
