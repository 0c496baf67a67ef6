"""A stand-in for an accelerator's graph: what a function queues is noted, and run again on the same tensors.

What a graph of CUDA cannot hold is refused while it is recorded: an op that reads a value, or whose result is
as long as values say. Reads that pass torch by, as `tolist` of a tensor in host memory, are not seen here:
`ci/emulator/pretended.py` sees them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from . import driver

Result = TypeVar("Result")
READS = {
    "_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select", "_unique", "_unique2",
    "unique_dim", "unique_consecutive", "unique_dim_consecutive", "bincount",
}  # fmt: skip
EMPTY = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided"}


class EmulatedRecorder:
    """`tritonrec.pipeline.graphs.Recorder` of emulated kernels and torch's ops, on tensors of the host.

    Attributes:
        work: what was recorded, in order: the kernel or op, its grid, and every argument that is no tensor.
    """

    def __init__(self) -> None:
        self.work: list[tuple[Any, ...]] = []
        self._again: list[Callable[[], None]] = []

    def record(self, work: Callable[[], Result]) -> Result:
        """Run `work` once, and keep its tensors.

        Raises RuntimeError for an op that a graph cannot hold.
        """
        self.work, self._again = [], []
        with driver.listening(self._launched), _Ops(self):
            return work()

    def replay(self) -> None:
        """Run the kernels and ops again, in their order, on the tensors of the recording."""
        with torch.no_grad():
            for each in self._again:
                each()

    def _launched(self, launcher: driver.Launcher, arguments: tuple[Any, ...]) -> None:
        x, y, z, _stream, _ptx, *rest = arguments
        self.work.append((driver.name_of(launcher.source.fn), (x, y, z), *_constants(rest[4:])))
        self._again.append(lambda: launcher(*arguments))

    def _ran(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        name = func.overloadpacket.__name__
        self.work.append((name, *_constants((args, kwargs))))
        aliases = [each.alias_info for each in func._schema.arguments]
        writes = any(each is not None and each.is_write for each in aliases)
        if writes:
            self._again.append(lambda: func(*args, **kwargs))
        elif name not in EMPTY and not any(each.alias_info for each in func._schema.returns):

            def compute() -> None:
                for old, new in zip(_tensors(result), _tensors(func(*args, **kwargs)), strict=True):
                    old.copy_(new)

            self._again.append(compute)


class _Ops(TorchDispatchMode):
    """Notes every op of torch on this thread; what an op launches belongs to it."""

    def __init__(self, recorder: EmulatedRecorder):
        super().__init__()
        self._recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        mask = name in ("index", "index_put", "index_put_") and any(
            each is not None and each.dtype in (torch.bool, torch.uint8) for each in args[1]
        )
        if name in READS or mask or (name == "repeat_interleave" and kwargs.get("output_size") is None):
            raise RuntimeError(f"aten::{name} reads values, and a graph that is recorded has none")
        result = func(*args, **kwargs)
        self._recorder._ran(func, args, kwargs, result)
        return result


def _tensors(values: Any) -> list[torch.Tensor]:
    return [each for each in tree_leaves(values) if isinstance(each, torch.Tensor)]


def _constants(values: Any) -> list[Any]:
    """The arguments, tensors as their shape and dtype."""
    plain = tree_map_only(torch.Tensor, lambda each: (tuple(each.shape), each.dtype), values)
    return tree_leaves(plain)
