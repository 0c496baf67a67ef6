"""Triton's driver of an emulated GPU: Triton specialises and compiles, the emulator runs the PTX."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from tritonrec.kernels import caches, dispatch
from tritonrec.kernels.address_table import chunks_behind
from tritonrec.optional import require

from .arguments import Argument, argument
from .counts import Counts, Row
from .fresh import noted
from .launch import Launch
from .program import Program, compile_program
from .settings import Emulation


@dataclass
class Session:
    """An emulation under way.

    Args:
        rows: by kernel. launches: since `restart`, by which the schedules are drawn.
        assembled: programs that were compiled for the GPU itself.
        history: (kernel, counts) of every launch, where `keep_history`.
    """

    settings: Emulation
    rows: dict[str, Row] = field(default_factory=dict)
    launches: int = 0
    assembled: int = 0
    keep_history: bool = False
    history: list[tuple[str, Counts]] = field(default_factory=list)
    fresh: set[int] = field(default_factory=set)

    def restart(self) -> None:
        """The next launch is the first again, so that a test's schedules do not depend on those before."""
        self.launches = 0


_session: Session | None = None
_listener = threading.local()
_ONE_AT_A_TIME = threading.Lock()
"""Threads take turns: launches share the emulator's memory, as the kernels of one stream share a GPU."""


def current() -> Session | None:
    """The emulation under way."""
    return _session


class Launcher:
    """Runs one compiled kernel: what Triton calls where a GPU's driver would launch."""

    def __init__(self, source: Any, metadata: Any):
        self.source, self.metadata = source, metadata
        self.program: Program | None = None

    def __call__(self, x: int, y: int, z: int, _stream: int, ptx: Any, *rest: Any) -> None:
        with _ONE_AT_A_TIME:
            self._launch((x, y, z), ptx, rest)
        if (hear := getattr(_listener, "hear", None)) is not None:
            hear(self, (x, y, z, _stream, ptx, *rest))

    def _launch(self, grid: tuple[int, int, int], ptx: Any, rest: tuple[Any, ...]) -> None:
        session = _session
        assert session is not None
        arguments = rest[4:]  # behind packed and launch metadata, and two hooks
        kernel = self.source.fn
        row = session.rows.setdefault(name_of(kernel), Row())
        began = time.perf_counter()
        if self.program is None:
            self.program = compile_program(ptx)
            row.programs += 1
            row.compiled += not self.program.cached
            if session.settings.assemble:
                _assemble(self.source, self.metadata)
                session.assembled += 1
        values: list[Any] = []
        tensors: list[Argument] = []
        declared = getattr(kernel, "declared", {})
        for (name, kind), value in zip(self.source.signature.items(), arguments, strict=True):
            _flatten(name, kind, value, values, tensors, declared)
        launch = Launch(
            self.program, grid, self.metadata.shared, values, tensors, session.settings, session.fresh
        )
        session.launches += 1
        counts = launch.run(session.launches)
        row.launches += 1
        row.counts.add(counts)
        row.seconds += time.perf_counter() - began
        if session.keep_history:
            session.history.append((name_of(kernel), counts))


@contextlib.contextmanager
def listening(hear: Callable[[Launcher, tuple[Any, ...]], None]) -> Iterator[None]:
    """Inside, on this thread, ``hear(launcher, arguments)`` follows each launch."""
    _listener.hear = hear
    try:
        yield
    finally:
        _listener.hear = None


def name_of(kernel: Any) -> str:
    """``silu.forward_kernel``: module and function."""
    module = kernel.__module__.split(".")[-1].removeprefix("triton_")
    return f"{module}.{kernel.__name__.removeprefix('_')}"


def _flatten(
    name: str, kind: Any, value: Any, values: list[Any], tensors: list[Argument], declared: dict[str, Any]
) -> None:
    if isinstance(kind, tuple):
        names = getattr(value, "_fields", range(len(value)))
        for field_name, each, item in zip(names, kind, value, strict=True):
            _flatten(f"{name}.{field_name}", each, item, values, tensors, declared)
    elif kind == "constexpr":
        return
    elif isinstance(value, torch.Tensor):
        values.append(value.data_ptr())
        races, varies = declared.get(name, (False, False))
        behind = chunks_behind(value)
        names = [name, *(f"{name.removesuffix('_ptr')}[{i}]" for i in range(len(behind)))]
        found = [argument(*each, races, varies) for each in zip(names, [value, *behind], strict=True)]
        tensors += [each for each in found if each is not None]
    else:
        values.append(float(value) if kind.startswith(("fp", "bf")) else value)


class _Utilities:
    """What Triton asks of a driver's library."""

    def load_binary(self, name: str, binary: bytes, _shared: int, _device: int) -> tuple[Any, ...]:
        return name, binary.decode(), 0, 0, 1024

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": (227 if device >= 90 else 163) * 1024}

    def unload_module(self, _module: Any) -> None:
        pass


class Driver:
    """The emulated GPU; its device number is its architecture, so that Triton keeps both apart."""

    launcher_cls = Launcher

    def __init__(self, settings: Emulation):
        major, minor = settings.capability
        self.device = 10 * major + minor
        self.utils = _Utilities()

    def get_current_device(self) -> int:
        return self.device

    def set_current_device(self, _device: int) -> None:
        pass

    def get_current_stream(self, _device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.device, 32)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def _without_assembler(*arguments: Any) -> tuple[str, str] | None:
    """Triton's hook on its stages: PTX is the binary."""
    if not arguments:
        return "tritonrec emulator", "tritonrec emulator"
    arguments[1]["cubin"] = lambda ptx, _metadata: ptx.encode()
    return None


def _assemble(source: Any, metadata: Any) -> None:
    """Compile a program as on a GPU, under the key by which a launch there looks for it in Triton's cache.

    The key holds Triton's own files, so the same wheel of Triton has to run there; and variables of Triton's,
    so what the caller has not set is not set here either.
    """
    import triton
    from triton import knobs
    from triton.compiler.compiler import make_backend

    backend = make_backend(metadata.target)
    given = backend.parse_options({})
    options = {name: _hashable(getattr(metadata, name)) for name in vars(given)}
    # the hook on the stages stands behind the arguments, as one more
    attributes = {path: each for path, each in source.attrs.items() if path[0] < len(source.fn.params)}
    real = type(source)(source.fn, source.signature, source.constants, attributes)
    before, knobs.runtime.add_stages_inspection_hook = knobs.runtime.add_stages_inspection_hook, None
    try:
        triton.compile(real, target=metadata.target, options=options)
    finally:
        knobs.runtime.add_stages_inspection_hook = before


def _hashable(value: Any) -> Any:
    """An option as Triton's parser gives it: JSON has made lists of tuples."""
    return tuple(map(_hashable, value)) if isinstance(value, list) else value


@contextlib.contextmanager
def emulated(settings: Emulation) -> Iterator[Session]:
    """Inside, ``impl="triton"`` runs on CPU tensors, as compiled code on an emulated GPU.

    Triton must not have been imported with ``TRITON_INTERPRET=1``.
    """
    global _session
    require("triton", "the emulator")
    from triton import knobs
    from triton.runtime import driver as drivers

    if knobs.runtime.interpret:
        raise ValueError("TRITON_INTERPRET=1 is set, and the emulator needs compiled kernels: unset it")
    if _session is not None:
        raise RuntimeError("an emulation is under way already: one process emulates one GPU at a time")
    caches.prepare_triton()
    before = drivers._active, knobs.runtime.add_stages_inspection_hook, dispatch.emulated
    _session = Session(settings)
    drivers.set_active(Driver(settings))
    knobs.runtime.add_stages_inspection_hook = _without_assembler
    dispatch.emulated = settings.capability
    try:
        with noted(_session.fresh) if settings.uninitialised else contextlib.nullcontext():
            yield _session
    finally:
        drivers._active, knobs.runtime.add_stages_inspection_hook, dispatch.emulated = before
        _session = None
