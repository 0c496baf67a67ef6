"""Gradients of rows by key, from backward passes to the update, and what stands for rows where torch looks
for a parameter: `TouchedRows` in an optimizer, `RowsParameter` in a module.
"""

from __future__ import annotations

import math
import sys
import warnings
from typing import Any

import torch

from ..kernels import launch
from ..kernels.fixed_point.errors import FRACTION_BITS
from .features import TableGroup
from .row_optimizer import RowOptimizer
from .selection import distinct

FILLS = {"copy_", "normal_", "uniform_", "fill_", "zero_", "set_"}
AVERAGES = {
    "add",
    "sub",
    "lerp",
    "__add__",
    "__radd__",
    "__sub__",
    "__rsub__",
    "_foreach_add",
    "_foreach_lerp",
}
KEPT = {"detach", "to", "clone", "mul", "__mul__", "__rmul__"}
"""What torch's averages and those of one's own write to, or add up."""
HOOKS = {"register_hook", "register_post_accumulate_grad_hook"}


class RowGradients:
    """The gradients of one table's rows on the rank that owns them.

    Sums of several backward passes are added by key. With consistency ``"batch"`` they are fixed-point
    numbers, so that neither the order of the passes nor the ranks change them; with ``"window"`` float32.

    Args:
        group: the table, its optimizer and its logical tables.
        consistency: ``"batch"`` or ``"window"``.
        divisor: of the sums.

    Attributes:
        parameter: stands for the rows in ``param_groups``.
        applied: whether an update has used the gradients.
        has_optimizer: whether a `HashOptimizer` was made for them.
    """

    has_optimizer = False

    def __init__(self, group: TableGroup, consistency: str, divisor: float):
        self.group, self.consistency, self.divisor = group, consistency, divisor
        self.parameter = TouchedRows.of(self)
        self.clear()

    def clear(self) -> None:
        """Forget all gradients."""
        self._parts: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._keys: torch.Tensor | None = None
        self._mean: torch.Tensor | None = None
        self._bad: torch.Tensor | None = None
        self.applied = False

    @property
    def pending(self) -> bool:
        """Whether there was a backward pass since the last `clear`."""
        return bool(self._parts)

    def add(self, keys: torch.Tensor, sums: torch.Tensor, bad: torch.Tensor) -> None:
        """Add the sums (K, dim) of a backward pass, of distinct keys (K,).

        `bad` () bool: a gradient of any rank was not finite, or too large for fixed point; it is not in the
        sums.
        """
        if self.applied:
            raise RuntimeError(
                f"the gradients of {self.group.layout} were applied by the last step(), and would be added "
                "to: call zero_grad() of the HashOptimizer, which model.zero_grad() does not reach"
            )
        if not self.group.table.requires_grad:
            return
        if self._parts and not self.has_optimizer:
            self.has_optimizer = True  # it is said once
            warnings.warn(
                f"the second backward pass through {self.group.layout}, and nothing updates its rows: make a "
                "tritonrec.embedding.HashOptimizer(model) beside the optimizer of the parameters, or freeze "
                "the rows with requires_grad_(False)",
                UserWarning,
                stacklevel=2,
            )
        device = self.group.table.device
        self._parts.append((keys.to(device), sums.to(device)))
        self._bad = bad if self._bad is None else self._bad | bad
        self._mean = None

    @property
    def keys(self) -> torch.Tensor:
        """(K,) int64, distinct: the keys with a gradient."""
        self._merge()
        assert self._keys is not None
        return self._keys

    @property
    def mean(self) -> torch.Tensor | None:
        """The sums over `divisor` (K, dim) float32, one tensor until the next `add`; None without any.

        NaN where a gradient of any rank is not finite, and then (1, dim) without keys.
        """
        if not self.pending:
            return None
        if self._mean is None:
            sums = self._merge()
            if self.consistency == "batch":
                mean = launch.from_fixed_point(sums, self.divisor, FRACTION_BITS)
            else:
                mean = sums / self.divisor
            assert self._bad is not None
            # A rank without keys learns of another rank's bad gradient as well: `GradScaler` has to find a
            # NaN on each.
            if not len(mean):
                mean = mean.new_zeros(1, mean.shape[1])
            self._mean = mean.masked_fill(self._bad.to(mean.device), math.nan)
        return self._mean

    @mean.setter
    def mean(self, value: torch.Tensor | None) -> None:
        if value is None:
            self.clear()
            return
        mean = self.mean
        if mean is None or value.shape != mean.shape or value.dtype != mean.dtype:
            shape = "none" if mean is None else f"float32 {tuple(mean.shape)}"
            raise ValueError(
                f"the gradient of {self.group.layout} is {shape}, got {value.dtype} {tuple(value.shape)}"
            )
        self._mean = value

    def _merge(self) -> torch.Tensor:
        """The sums by key, in one part."""
        if len(self._parts) > 1:
            keys, sums = (torch.cat(each) for each in zip(*self._parts, strict=True))
            found = distinct(keys, padded=False)
            options = self.consistency, FRACTION_BITS, "embedding gradient"
            self._parts = [(found.keys, launch.segment_sum(sums, found.inverse, len(found.keys), *options))]
        self._keys, sums = self._parts[0]
        return sums

    def update(self, rule: RowOptimizer, number: int) -> None:
        """Update the rows; `number` counts the updates from 1.

        A key that is not admitted, or was evicted since its lookup, is skipped. Raises FloatingPointError
        where a gradient is not finite.
        """
        table, keys, mean = self.group.table, self.keys, self.mean
        assert mean is not None
        if not bool(torch.isfinite(mean).all()):
            raise FloatingPointError(
                f"a gradient of {self.group.layout} is not finite, or too large for a fixed-point sum; no "
                "row was changed by this step's update of the table. With torch.amp.GradScaler, "
                "scaler.step(optimizer) skips such steps"
            )
        # Without the row that `mean` has where there is no key.
        handles, mean = table.find(keys), mean[: len(keys)]
        present = (handles >= 0).nonzero().squeeze(1)
        if len(present) < len(keys):
            handles, keys, mean = handles[present], keys[present], mean[present]
        values = table.gather(handles, keys)
        rule.update(values, torch.arange(len(keys), device=values.device), mean.contiguous(), number)
        low_precision = table.in_low_precision(handles)
        # Rounded here, so that the table stores in 16 bits what it is given, and changes no value.
        if low_precision is not None:
            table.round_low_precision(values, low_precision)
        table.update(handles, values, low_precision)


class TouchedRows(torch.Tensor):
    """The rows with a gradient, where torch's tools look for a parameter.

    `grad` is `RowGradients.mean`, so `torch.amp.GradScaler` and `torch.nn.utils.clip_grad_norm_` read and
    scale it. The tensor itself is empty: the rows are in the table.
    """

    gradients: RowGradients

    @classmethod
    def of(cls, gradients: RowGradients) -> TouchedRows:
        """For one table."""
        table = gradients.group.table
        empty = torch.empty(0, table.dim, dtype=torch.float32, device=table.device)
        found: Any = empty.as_subclass(cls)
        found.gradients = gradients
        return found

    def requires_grad_(self, requires_grad: bool = True) -> TouchedRows:
        """Freeze the table's rows, or train them again."""
        self.gradients.group.table.requires_grad = requires_grad
        return self

    def __deepcopy__(self, memo: object) -> TouchedRows:
        raise TypeError("a HashOptimizer has no copy: make one of the copied model, and load its state_dict")

    def __reduce_ex__(self, protocol: object) -> Any:
        raise TypeError("a HashOptimizer has no pickle: save its state_dict()")

    @property
    def grad(self) -> torch.Tensor | None:
        """(K, dim) float32, of the keys of `gradients`; None without any."""
        return self.gradients.mean

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        self.gradients.mean = value


class RowsParameter(torch.nn.Parameter):
    """(0,) float32 among a module's parameters: ``requires_grad_(False)`` freezes the rows.

    Optimizers of torch change nothing in it. Copies, averages with another one, initialisations and torch's
    clipping of parameters without the rows are refused with TypeError: the rows would stay as they are.
    """

    @staticmethod
    def __new__(cls, data: torch.Tensor | None = None, requires_grad: bool = True) -> RowsParameter:
        empty = torch.empty(0, dtype=torch.float32, device="cpu") if data is None else data
        made: Any = torch.Tensor._make_subclass(cls, empty.as_subclass(torch.Tensor), requires_grad)
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in HOOKS:
            raise TypeError(
                f"{name} of a parameter that stands for rows of a hash embedding would see no gradient: hook "
                "the module's output, and clip by HashOptimizer.clip_grad_norm_"
            )
        if func == torch.Tensor.grad.__get__ and args[0].requires_grad and _clips_without_rows():  # type: ignore[union-attr]
            raise TypeError(
                "torch's clipping of these parameters would leave out the gradients of rows of a hash "
                "embedding: take HashOptimizer.clip_grad_norm_(model.parameters(), max_norm), or clip the "
                "parameters that are no tritonrec.embedding.RowsParameter"
            )
        if name in AVERAGES or (name.endswith("_") and not name.startswith("__")):
            ours = [each for each in (*args, *(kwargs or {}).values()) if _holds(each, cls)]
            onto_itself = len(args) > 1 and args[0] is args[1]  # as load_state_dict copies it
            if ours and (len(ours) > 1 or name in FILLS) and not onto_itself:
                kind = RuntimeError if name in AVERAGES else TypeError  # which an operator would hide
                raise kind(
                    f"{name} of a parameter that stands for rows of a hash embedding does not reach them: "
                    "average rows with module.lerp_rows_(trained, weight), and leave the module out of "
                    "AveragedModel; write rows with module.tables.load_weights. "
                    "isinstance(parameter, tritonrec.embedding.RowsParameter) tells which these are"
                )
        with torch._C.DisableTorchFunctionSubclass():
            found = func(*args, **(kwargs or {}))
        keeps = name in KEPT or func == torch.Tensor.data.__get__  # type: ignore[attr-defined]
        if keeps and isinstance(found, torch.Tensor) and found.numel() == 0 and found.dim() == 1:
            return found.as_subclass(cls)
        return found

    def __deepcopy__(self, memo: Any) -> RowsParameter:
        return memo.setdefault(id(self), RowsParameter(None, self.requires_grad))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return RowsParameter, (None, self.requires_grad)


def _clips_without_rows() -> bool:
    """Whether torch.nn.utils' clipping reads a gradient, of parameters without those of a `HashOptimizer`.

    It is a plain function of a list, which no parameter hears of: the frames of the call tell.
    """
    frame = sys._getframe(2)
    for _ in range(2):  # before Python 3.12 a comprehension has a frame of its own
        if frame.f_globals.get("__name__") == "torch.nn.utils.clip_grad" and "parameters" in frame.f_locals:
            return not any(hasattr(each, "gradients") for each in frame.f_locals["parameters"])
        assert frame.f_back is not None
        frame = frame.f_back
    return False


def _holds(argument: Any, kind: type) -> bool:
    """Whether an argument is one, or has one in a list."""
    parts = argument if isinstance(argument, (list, tuple)) else (argument,)
    return any(isinstance(part, kind) for part in parts)
