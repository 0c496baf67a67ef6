"""A GPU that is pretended: tensors are in host memory, and the code that runs takes them for a GPU's.

    with pretended() as gpu:
        x = torch.ones(3, device="cuda")    # x.device is cuda:0, x.is_cpu is False
        with gpu.stage("exchange"):
            int(x.sum())                    # gpu.waits["exchange", "ops.py:7 int(x.sum())"] is 1

So every branch for a GPU runs: copies go through page-locked memory and streams, checks are queued. Noted is
for each storage whether it is the GPU's, and what an op makes of a GPU's tensors is the GPU's. The host waits
where it reads a value, where a result is as long as values say (nonzero, a boolean index, ...), where it
copies between host and GPU at once, and where it waits for a stream, or for an event; a stage's own event is
over only when the stage is. What would fail on a GPU, as an op on tensors of both, raises RuntimeError.

Kernels run on the tensors all the same: emulated ones (`tritonrec.harness.emulator`), or those of the CPU
(`without_kernels`). What they do with tensors is not seen.
"""

from __future__ import annotations

import contextlib
import linecache
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

GPU, HOST = torch.device("cuda", 0), torch.device("cpu")
WAITS = {
    "_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select", "_unique", "_unique2",
    "unique_dim", "unique_consecutive", "unique_dim_consecutive", "bincount", "repeat_interleave",
}  # fmt: skip
"""aten ops that read a value, or whose result is as long as values say."""
OUTSIDE = "between stages"

_getter = torch.Tensor.device.__get__
_is_cpu, _is_cuda = torch.Tensor.is_cpu.__get__, torch.Tensor.is_cuda.__get__
_LOCATED = {torch.Tensor.to, torch.Tensor.cpu, torch.Tensor.cuda}
_UPLOADS = {torch.tensor, torch.as_tensor}


class Pretended:
    """What the host did.

    Attributes:
        waits: (stage, line of code) -> how often it waited. calls, launches: stage -> aten ops on tensors of
            the GPU, and kernels launched.
    """

    def __init__(self) -> None:
        self.waits: Counter[tuple[str, str]] = Counter()
        self.calls: Counter[str] = Counter()
        self.launches: Counter[str] = Counter()
        self._of_thread = threading.local()

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """What this thread does inside counts for the stage; threads but the first see the GPU here alone."""
        before, self._of_thread.stage = self.here, name
        call, self._of_thread.call = self.call, object()
        try:
            with self._modes():
                yield
        finally:
            self._of_thread.stage, self._of_thread.call = before, call

    @property
    def here(self) -> str:
        """The stage of this thread."""
        return getattr(self._of_thread, "stage", OUTSIDE)

    @property
    def call(self) -> object | None:
        """The call of the stage of this thread; None between stages."""
        return getattr(self._of_thread, "call", None)

    def waits_of(self, stage: str) -> int:
        """How often the host waited in a stage."""
        return sum(count for (name, _), count in self.waits.items() if name == stage)

    def wait(self) -> None:
        """The host waits now."""
        self.waits[self.here, _line()] += 1

    def unseen(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The same function as one launch whose work is not seen; results are the GPU's if an argument is."""

        def hidden(*args: Any, **kwargs: Any) -> Any:
            on_gpu = any(is_on_gpu(each) for each in _tensors((args, kwargs)))
            self.launches[self.here] += on_gpu
            with _hidden():
                result = function(*args, **kwargs)
            for each in _tensors(result):
                _note(each, on_gpu)
            return result

        return hidden

    @contextlib.contextmanager
    def _modes(self) -> Iterator[None]:
        if getattr(self._of_thread, "seen", False):
            yield
            return
        self._of_thread.seen = True
        try:
            with _Calls(self), _Ops(self):
                yield
        finally:
            self._of_thread.seen = False


def is_on_gpu(tensor: torch.Tensor) -> bool:
    """Whether a tensor is in the memory of the pretended GPU."""
    return bool(getattr(tensor.untyped_storage(), "on_gpu", False))


def _note(tensor: torch.Tensor, on_gpu: bool) -> torch.Tensor:
    storage = tensor.untyped_storage()
    if not hasattr(storage, "on_gpu"):
        storage.on_gpu = on_gpu
    return tensor


def moved(tensor: torch.Tensor, on_gpu: bool) -> torch.Tensor:
    """A copy in the other memory."""
    copy = tensor.clone()
    copy.untyped_storage().on_gpu = on_gpu
    return copy


def _tensors(values: Any) -> list[torch.Tensor]:
    return [each for each in tree_leaves(values) if isinstance(each, torch.Tensor)]


def _line() -> str:
    """The innermost line of code of this project that is under way."""
    frame = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if frame.f_code.co_filename != __file__ and "/torch/" not in path and "site-packages" not in path:
            text = linecache.getline(path, frame.f_lineno).strip()
            return f"{path.rpartition('/tritonrec/')[2]}:{frame.f_lineno} {text}"
        frame = frame.f_back
    return "?"


class _Calls(TorchFunctionMode):
    """What Python calls: devices by name, and copies between them."""

    def __init__(self, gpu: Pretended):
        super().__init__()
        self.gpu = gpu

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func == _getter:
            return GPU if is_on_gpu(args[0]) else func(*args)
        if func == _is_cpu:
            return not is_on_gpu(args[0]) and func(*args)
        if func == _is_cuda:
            return is_on_gpu(args[0])
        if func in _LOCATED:
            return self._to(func, *args, **kwargs)
        if func is torch.Tensor.pin_memory:
            if is_on_gpu(args[0]):
                raise RuntimeError("only tensors of the host can be pinned")
            return moved(args[0], False)
        if func is torch.Tensor.is_pinned:
            return not is_on_gpu(args[0])
        if func in (torch.Tensor.tolist, torch.Tensor.numpy) and is_on_gpu(args[0]):
            if func is torch.Tensor.numpy:
                raise TypeError("a GPU's tensor has no numpy array")
            self.gpu.wait()
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        device = kwargs.get("device")
        if device is None:
            return func(*args, **kwargs)
        on_gpu = torch.device(device).type == GPU.type
        if on_gpu:
            kwargs["device"] = HOST
        result = func(*args, **kwargs)
        if on_gpu and func in _UPLOADS:
            self.gpu.wait()
        for each in _tensors(result):
            each.untyped_storage().on_gpu = on_gpu
        return result

    def _to(self, func, tensor, *args, non_blocking=False, device=None, **kwargs):
        if func is torch.Tensor.to:
            places = [each for each in args if isinstance(each, str | torch.device)]
            others = [each.device for each in args if isinstance(each, torch.Tensor)]
            args = tuple(each for each in args if not isinstance(each, str | torch.device | torch.Tensor))
            device = device or (places + others + [None])[0]
            if len(args) > 1 and isinstance(args[1], bool):
                non_blocking, args = args[1], args[:1]
        else:
            device, args = (HOST if func is torch.Tensor.cpu else GPU), ()
        if device is not None and (torch.device(device).type == GPU.type) != is_on_gpu(tensor):
            if not non_blocking:
                self.gpu.wait()
            tensor = moved(tensor, not is_on_gpu(tensor))
        args = tuple(each for each in args if each is not None)
        return tensor.to(*args, **kwargs) if args or kwargs else tensor


class _Ops(TorchDispatchMode):
    """What torch runs."""

    def __init__(self, gpu: Pretended):
        super().__init__()
        self.gpu = gpu

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunction():
            return self._run(func, args, kwargs or {})

    def _run(self, func, args, kwargs):
        name = func.name().split("::")[1].split(".")[0]
        given = _tensors((args, kwargs))
        on_gpu = [each for each in given if is_on_gpu(each)]
        if on_gpu:
            self.gpu.calls[self.gpu.here] += 1
            if name in WAITS and kwargs.get("output_size") is None:
                self.gpu.wait()
            elif name in ("index", "index_put", "index_put_"):
                indices = [each for each in args[1] if each is not None]
                if any(each.dtype in (torch.bool, torch.uint8) or not is_on_gpu(each) for each in indices):
                    self.gpu.wait()
            elif any(not is_on_gpu(each) and each.dim() for each in given):
                if name != "copy_":
                    raise RuntimeError(f"{func} has tensors of the host and of the GPU")
                if not kwargs.get("non_blocking", args[2] if len(args) > 2 else False):
                    self.gpu.wait()
        result = func(*args, **kwargs)
        for each in _tensors(result):
            _note(each, bool(on_gpu))
        return result


class _Event:
    """An event of a stream; what a stage has queued ends with it."""

    def __init__(self, gpu: Pretended):
        self._gpu, self._call = gpu, gpu.call

    def query(self) -> bool:
        return self._call is None or self._call is not self._gpu.call

    def synchronize(self) -> None:
        self._gpu.wait()


class _Stream:
    """A stream of the GPU."""

    def __init__(self, gpu: Pretended):
        self._gpu = gpu

    def is_capturing(self) -> bool:
        return False

    def wait_event(self, event: _Event) -> None:
        pass

    def record_event(self) -> _Event:
        return _Event(self._gpu)

    def synchronize(self) -> None:
        self._gpu.wait()


@contextlib.contextmanager
def pretended(capability: tuple[int, int] = (9, 0)) -> Iterator[Pretended]:
    """Inside, device ``cuda`` is a GPU of that compute capability, whose kernels an emulator has to run.

    Only threads inside of `Pretended.stage` see it, and this one.
    """
    from tritonrec.harness.emulator import driver
    from tritonrec.kernels import dispatch
    from tritonrec.pipeline import streams, trainer

    gpu = Pretended()
    node, launch = torch.autograd.function.BackwardCFunction, driver.Launcher.__call__

    def derivative(self, *gradients, apply=node.apply):
        with _Calls(gpu):  # autograd calls it without this mode
            return apply(self, *gradients)

    def launched(self, x, y, z, stream, ptx, *rest):
        wrong = [each for each in rest[4:] if isinstance(each, torch.Tensor) and not is_on_gpu(each)]
        if wrong:
            raise RuntimeError(f"{driver.name_of(self.source.fn)} is given a tensor of the host")
        gpu.launches[gpu.here] += 1
        with _hidden():
            return launch(self, x, y, z, stream, ptx, *rest)

    changes = [
        (node, "apply", derivative),
        (driver.Launcher, "__call__", launched),
        (dispatch, "capability", lambda tensor: capability if tensor.is_cuda else (0, 0)),
        (torch.accelerator, "is_available", lambda: True),
        (torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("cuda")),
        (torch.accelerator, "current_device_index", lambda: 0),
        (torch.accelerator, "device_count", lambda: 1),
        (torch.accelerator, "current_stream", lambda device=None: _Stream(gpu)),
        (torch.accelerator, "synchronize", lambda device=None: gpu.wait()),
        (torch.Tensor, "record_stream", lambda tensor, stream: None),
        (trainer, "streams_for", lambda device: streams.Streams()),
    ]
    with _patched(changes), gpu._modes():
        yield gpu


@contextlib.contextmanager
def without_kernels(gpu: Pretended) -> Iterator[None]:
    """Inside, ops on the GPU's tensors run on the CPU, unseen: only the code around them is looked at."""
    from tritonrec.kernels import chunked_rows
    from tritonrec.kernels.chunked_rows import op as chunked
    from tritonrec.kernels.op import Op

    run, copy, fits = Op._run, chunked._copy, chunked_rows.fits
    changes = [
        (Op, "_run", gpu.unseen(lambda self, arguments, impl: run(self, arguments, "cpu"))),
        (chunked, "_copy", gpu.unseen(lambda *arguments: copy(*arguments[:-1], "cpu"))),
        (chunked_rows, "fits", gpu.unseen(fits)),
    ]
    with _patched(changes):
        yield


@contextlib.contextmanager
def _patched(changes: list[tuple[Any, str, Any]]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for owner, name, value in changes:
            stack.enter_context(mock.patch.object(owner, name, value))
        yield


@contextlib.contextmanager
def _hidden() -> Iterator[None]:
    """Inside, nothing is seen: the GPU's tensors are the host's."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        yield
