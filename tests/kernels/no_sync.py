"""A device whose host must not look: what would wait for a GPU raises, wherever the tensors really are."""

from __future__ import annotations

import contextlib

import torch
from torch._library.custom_ops import OPDEFS
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from tritonrec.kernels import row_layout
from tritonrec.kernels.hash_table import op

# What reads a value back, or gives a result whose length depends on values.
WAITS = {
    "_local_scalar_dense", "is_nonzero", "equal", "nonzero", "nonzero_numpy", "masked_select", "_unique",
    "_unique2", "unique_dim", "unique_consecutive", "unique_dim_consecutive", "bincount", "repeat_interleave",
}  # fmt: skip
READERS = ("item", "tolist", "numpy", "cpu", "__array__", "__bool__", "__int__", "__float__", "__index__")


class HostWaitsError(AssertionError):
    """The host looked at a tensor of the device."""


class Watch(TorchDispatchMode):
    """Raises where an aten op would make the host wait; our own ops are entered, not passed over."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        namespace, name = func.name().split("::")
        name = name.split(".")[0]
        if namespace == "tritonrec":
            with self:
                return OPDEFS[f"tritonrec::{name}"]._init_fn(*args, **kwargs)
        if name in WAITS:
            raise HostWaitsError(f"{func} makes the host wait")
        if name == "index" and any(one is not None and one.dtype == torch.bool for one in args[1]):
            raise HostWaitsError("a boolean index makes the host wait for its length")
        if name == "lift_fresh":
            raise HostWaitsError("a tensor made of host values is copied to the device, and the host waits")
        devices = {one.device.type for one in [*args, *kwargs.values()] if isinstance(one, torch.Tensor)}
        target = kwargs.get("device")
        if name in ("copy_", "_to_copy", "_copy_from"):
            devices |= {torch.device(target).type} if target is not None else set()
            if len(devices) > 1:
                raise HostWaitsError(f"{func} copies between {' and '.join(sorted(devices))}")
        return func(*args, **kwargs)


def _refuse(name):
    def refuse(self, *args, **kwargs):
        raise HostWaitsError(f"Tensor.{name} makes the host wait")

    return refuse


@contextlib.contextmanager
def no_sync():
    """Nothing inside may wait for the device. Only the body of a launched kernel is exempt.

    On a GPU torch itself raises where a call synchronises. Under the interpreter the CPU stands in: the host
    code is told that it may not look, as on an accelerator, and `Watch` sees what it does all the same.
    """
    if torch.cuda.is_available():
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)
        return
    with _patched([*_refusals(), (InterpretedFunction, "run", _exempt)]), Watch():
        yield


@contextlib.contextmanager
def recorded_launches():
    """As `no_sync`, but kernels do not run, so that tensors may lie on the meta device, which is no host."""
    launched = []

    def note(self, *args, grid, warmup, **kwargs):
        launched.append(getattr(self, "fn", self).__name__)

    runs = [(kind, "run", note) for kind in (InterpretedFunction, JITFunction)]
    with _patched([*_refusals(), *runs, (torch, "tensor", _on_host)]), Watch():
        yield launched


def _on_host(values, *, device=None, **options):
    if device is not None:  # on the meta device no op shows it
        raise HostWaitsError("a tensor made of host values is copied to the device, and the host waits")
    return _tensor(values, **options)


_tensor = torch.tensor
_run, _readers = InterpretedFunction.run, {name: getattr(torch.Tensor, name) for name in READERS}


def _refusals():
    readers = [(torch.Tensor, name, _refuse(name)) for name in READERS]
    return [*readers, *((module, "on_host", lambda tensor: False) for module in (row_layout, op))]


def _exempt(self, *args, **kwargs):
    with _disable_current_modes(), _patched([(torch.Tensor, name, old) for name, old in _readers.items()]):
        return _run(self, *args, **kwargs)


@contextlib.contextmanager
def _patched(changes):
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in changes]
    for owner, name, value in changes:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)
