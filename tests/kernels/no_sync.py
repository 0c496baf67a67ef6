"""A device whose host must not look: what would wait for a GPU is an error, wherever tensors really are."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

import torch
from impls import GPU
from pretended import Pretended, moved, pretended
from triton.runtime.interpreter import InterpretedFunction


class HostWaitsError(AssertionError):
    """The host waited for the device."""


def on_device(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the device that `no_sync` watches."""
    return tensor.cuda() if GPU else moved(tensor, True)


@contextlib.contextmanager
def no_sync(kernels: bool = True) -> Iterator[Pretended | None]:
    """Nothing inside may wait for the device; on a GPU torch itself raises where a call synchronises.

    Without one it is pretended. Its kernels are those of the interpreter, or do nothing.
    """
    if GPU:
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield None
        finally:
            torch.cuda.set_sync_debug_mode(before)
        return
    with pretended() as gpu:
        run = gpu.unseen(InterpretedFunction.run if kernels else lambda *args, **options: None)
        with mock.patch.object(InterpretedFunction, "run", run):
            yield gpu
    if gpu.waits:
        raise HostWaitsError(f"the host waits: {dict(gpu.waits)}")
