"""New memory shows what a kernel leaves out, and what it writes beside it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

ROOM = 64
"""Bytes on each side, so that a tensor begins where it would."""
FILL = 0xCD


class Guards:
    """Buffers of bytes, each with a tensor in its middle."""

    def __init__(self) -> None:
        self.buffers: list[tuple[torch.Tensor, int]] = []

    def make(self, shape: Any, dtype: torch.dtype, device: Any) -> torch.Tensor:
        """A tensor that begins with NaN, True or 77."""
        shape = torch.Size(shape)
        size = shape.numel() * dtype.itemsize
        buffer = torch.full((size + 2 * ROOM,), FILL, dtype=torch.uint8, device=device)
        self.buffers.append((buffer, size))
        inner = buffer[ROOM : ROOM + size].view(dtype).view(shape)
        return inner.fill_(float("nan") if dtype.is_floating_point else dtype == torch.bool or 77)

    def check(self) -> None:
        for buffer, size in self.buffers:
            assert (buffer[:ROOM] == FILL).all() and (buffer[ROOM + size :] == FILL).all(), (
                f"bytes around a tensor of {size} bytes were written"
            )


@contextlib.contextmanager
def guarded_memory() -> Iterator[None]:
    """What torch leaves as it is begins with NaN, True or 77, and has bytes around it that stay."""
    guards, sized, like, new = Guards(), torch.empty, torch.empty_like, torch.Tensor.new_empty

    def is_plain(device: Any, options: dict[str, Any]) -> bool:
        return torch.device(device or "cpu").type != "meta" and not options

    def empty(*size: Any, dtype: Any = None, device: Any = None, **options: Any) -> torch.Tensor:
        if not is_plain(device, options):
            return sized(*size, dtype=dtype, device=device, **options)
        shape = size[0] if len(size) == 1 and not isinstance(size[0], int) else size
        return guards.make(shape, dtype or torch.get_default_dtype(), device)

    def empty_like(tensor: torch.Tensor, *, dtype: Any = None, **options: Any) -> torch.Tensor:
        if not is_plain(tensor.device, options) or not tensor.is_contiguous():
            return like(tensor, dtype=dtype, **options)
        return guards.make(tensor.shape, dtype or tensor.dtype, tensor.device)

    def new_empty(tensor: torch.Tensor, *size: Any, dtype: Any = None, **options: Any) -> torch.Tensor:
        if not is_plain(tensor.device, options):
            return new(tensor, *size, dtype=dtype, **options)
        return empty(*size, dtype=dtype or tensor.dtype, device=tensor.device)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", empty)
        patch.setattr(torch, "empty_like", empty_like)
        patch.setattr(torch.Tensor, "new_empty", new_empty)
        yield
    guards.check()
