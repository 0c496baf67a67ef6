"""Which implementation of an op runs: chosen by the caller, or by the device, never by accident."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType
from typing import Literal, get_args

import torch

from ..optional import require
from .caches import prepare_triton

Impl = Literal["auto", "triton", "cpu", "reference"]
IMPLS = get_args(Impl)

emulated: tuple[int, int] | None = None
"""Compute capability of the GPU that an emulator stands in for, on CPU tensors; None without an emulator."""


class _OfThread(threading.local):
    impl: Impl = "auto"


_of_thread = _OfThread()
_imported: dict[str, ModuleType] = {}  # to their end


@contextmanager
def use_impl(impl: Impl) -> Iterator[None]:
    """Inside, on this thread, ops that are given no `impl` run on this one; ``"auto"`` goes by device again.

    A derivative runs where its forward ran. A compiled function decides each time it
    runs, on the thread that runs it: enter this outside of ``torch.compile``. What cannot run on it raises as
    for an explicit choice (`implementation`).

    Raises ValueError for an unknown name, RuntimeError inside a compiled function.
    """
    if is_compiling():
        raise RuntimeError("use_impl inside of torch.compile has no effect: enter it around the call")
    before = _of_thread.impl
    _of_thread.impl = _known(impl)
    try:
        yield
    finally:
        _of_thread.impl = before


def is_compiling() -> bool:
    """Whether torch.compile traces the code that calls this.

    torch's own flag is one for all threads, and is up while any of them compiles. Python that is traced and
    not read by dynamo, as by export, has fake tensors on its thread.
    """
    if not torch.compiler.is_compiling():
        return False
    return torch.compiler.is_dynamo_compiling() or torch._guards.detect_fake_mode() is not None


class runs_on:
    """`use_impl` for every task of a step: a class and no generator, which takes three times as long."""

    __slots__ = ("_before", "_impl")

    def __init__(self, impl: Impl) -> None:
        self._impl = impl

    def __enter__(self) -> None:
        self._before, _of_thread.impl = _of_thread.impl, self._impl

    def __exit__(self, *error: object) -> None:
        _of_thread.impl = self._before


def default_impl() -> Impl:
    """What ``"auto"`` stands for on this thread: `use_impl`'s choice, or ``"auto"``."""
    return _of_thread.impl


def _known(impl: Impl) -> Impl:
    if impl not in IMPLS:
        raise ValueError(f"impl must be 'auto', 'triton', 'cpu' or 'reference', got {impl!r}")
    return impl


def on_host(tensor: torch.Tensor) -> bool:
    """Whether the host may look at the values; on an accelerator it would wait for all that is queued."""
    return tensor.is_cpu


def imported(name: str) -> ModuleType:
    """The module called `name`, of an implementation that runs.

    Not before its first call: `import tritonrec.ops` loads no compiler, and Triton decides at its import
    whether it interprets.
    """
    module = _imported.get(name)
    if module is None or sys.modules.get(name) is not module:  # or it was imported anew meanwhile
        if name.rpartition(".")[2].startswith("triton_"):
            require("triton", "impl='triton'")
        # `import_module` waits where another lane is importing it.
        module = _imported[name] = import_module(name)
    return module


def implementation(impl: Impl, tensor: torch.Tensor) -> str:
    """Name the implementation that runs for `tensor`: ``"triton"``, ``"cpu"`` or ``"reference"``.

    ``"auto"`` takes the choice of `use_impl`; outside of it Triton on an accelerator and the CPU kernel on a
    CPU tensor. A choice is honoured or refused, it never falls back: Triton on a CPU tensor needs
    ``TRITON_INTERPRET=1`` or an emulator, and the CPU kernel needs a CPU tensor.
    """
    if impl == "auto":
        impl = default_impl()
    on_cpu = tensor.is_cpu
    if not on_cpu and not is_compiling():
        prepare_triton()
    if impl == "auto":
        return "cpu" if on_cpu else "triton"
    if impl == "triton" and on_cpu and emulated is None and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError(
            "impl='triton' on a CPU tensor runs in Triton's interpreter or emulated only: set "
            "TRITON_INTERPRET=1 before the first import of triton, use `tritonrec emulate`, or impl='cpu'"
        )
    if impl == "cpu" and not on_cpu:
        raise ValueError(f"impl='cpu' needs a CPU tensor, got one on {tensor.device}")
    return _known(impl)


def has_int64_atomics(tensor: torch.Tensor) -> bool:
    """Whether the tensor's device adds int64 atomically; Ascend's does not. The CPU stands in for a GPU."""
    return tensor.is_cpu or tensor.is_cuda


def usable_device(device: str | torch.device) -> torch.device:
    """`device` with its number, as tensors that are on it have it.

    Raises ValueError for a device that is not on this machine.
    """
    try:
        named = torch.device(device)
    except RuntimeError:
        raise ValueError(
            f"there is no device {str(device)!r}: the host is 'cpu', a GPU 'cuda' or 'cuda:1'"
        ) from None
    if named.type == "cpu":
        return torch.device("cpu")
    here = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if here is None or here.type != named.type:
        found = "no accelerator" if here is None else here.type
        raise ValueError(f"device {str(named)!r} is not usable: torch {torch.__version__} finds {found} here")
    index = torch.accelerator.current_device_index() if named.index is None else named.index
    count = torch.accelerator.device_count()
    if index >= count:
        raise ValueError(f"device {str(named)!r} is not usable: this machine has {count} of them")
    return torch.device(named.type, index)


def capability(tensor: torch.Tensor) -> tuple[int, int]:
    """NVIDIA's compute capability of the tensor's GPU, (0, 0) elsewhere, as in Triton's interpreter."""
    if emulated is not None and tensor.is_cpu:
        return emulated
    if not tensor.is_cuda or torch.version.hip:
        return (0, 0)
    return torch.cuda.get_device_capability(tensor.device)
