"""What the caller could change between results, and one mode would see earlier than another.

A mode that overlaps batches has computed some of the windows in flight before a change, and others not. What
it could see is noted when a flight begins, and compared at each result, and by the lanes where they use it.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import get_default_dtype
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ..embedding import HashTableCollection
from ..embedding.learning_rate import rate_at
from ..nn.context import hooks_of

Noted = dict[str, Any]
STEADY = {
    "lr",
    "weight_decay",
    "betas",
    "momentum",
    "eps",
    "alpha",
    "rho",
    "dampening",
    "nesterov",
}
"""Settings of groups that no optimizer changes itself."""


class Same:
    """This value and no equal one, for comparisons. Its id alone would be another value's once it is gone."""

    def __init__(self, value: Any):
        try:
            self._value: Any = weakref.ref(value)
        except TypeError:  # a list, say
            self._value = lambda: value
        tensor = isinstance(value, torch.Tensor) and not value.is_inference()
        self._version = value._version if tensor else 0

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Same):
            return NotImplemented
        mine = self._value()
        return mine is not None and mine is other._value() and self._version == other._version

    __hash__ = None  # type: ignore[assignment]


def settings_of(optimizers: Sequence[Optimizer], schedulers: Sequence[LRScheduler]) -> Noted:
    """The settings of groups and schedulers, by what to call them."""
    found: Noted = {}
    for optimizer in optimizers:
        kind = type(optimizer).__name__
        for number, group in enumerate(optimizer.param_groups):
            for name, value in group.items():
                if name != "params":
                    found[f"{name} of group {number} of {kind}"] = _frozen(value)
            found[f"the parameters of group {number} of {kind}"] = tuple(map(id, group["params"]))
    for scheduler in schedulers:
        kind = type(scheduler).__name__
        for name, value in vars(scheduler).items():
            if isinstance(value, (bool, int, float, list, tuple)):
                found[f"{name} of {kind}"] = _frozen(value)
    return found


def states_of(parameters: Mapping[str, torch.Tensor], optimizers: Sequence[Optimizer]) -> Noted:
    """What optimizers keep of parameters, by what to call it."""
    return {
        f"state {key} of parameter {name}": _frozen(value)
        for name, parameter in parameters.items()
        for optimizer in optimizers
        if parameter in optimizer.state
        for key, value in optimizer.state[parameter].items()
    }


def steady(noted: Noted) -> Noted:
    """Those that no optimizer changes itself."""
    return {name: value for name, value in noted.items() if name.partition(" ")[0] in STEADY}


def globals_of_torch() -> Noted:
    """Settings of torch that a model's result depends on, and that lanes share with the caller."""
    return {
        "torch's default dtype": get_default_dtype(),
        "torch's float32 matmul precision": torch.get_float32_matmul_precision(),
        "torch's deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
    }


def dense_rates(rates: Sequence[float], update: int) -> Noted:
    """The learning rates of the optimizers' groups that an update has used, counted from 1."""
    return {f"the learning rate of group {n} in update {update}": rate for n, rate in enumerate(rates)}


def row_rates(tables: HashTableCollection, update: int) -> Noted:
    """The learning rates of an update by functions of the caller's, counted from 1."""
    found: Noted = {}
    for group in tables.groups:
        if callable(group.optimizer.lr):
            try:
                rate: float | None = rate_at(group.optimizer.lr, update)
            except Exception:  # of the function, which the update raises
                rate = None
            found[f"the learning rate of {group.layout} in update {update}"] = rate
    return found


def structure_of(model: torch.nn.Module) -> tuple[list[torch.nn.Module], list[tuple[str, int]], list[int]]:
    """Modules, buffers and the numbers of hooks."""
    modules = list(model.modules())
    buffers = [(name, id(each)) for name, each in model.named_buffers()]
    return modules, buffers, [len(hooks) for hooks in hooks_of(modules)]


def first_change(before: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """What has changed, in words."""
    if before == now:
        return None
    for name in {**before, **now}:
        old, new = before.get(name), now.get(name)
        if old != new:
            return f"{name} was changed from {old} to {new}" if _is_plain(old, new) else f"{name} was changed"
    return None


def refusal(change: str, steps: str) -> RuntimeError:
    """The error for a change in flight; `steps` as in "steps 4 to 6 are"."""
    return RuntimeError(
        f"{change} while {steps} in flight, of which some may have been computed before the change: change "
        "it after list(trainer.run([])), or let the batches end at the step before the change, or train with "
        "trainer.step(batch); rates that move go to Trainer(scheduler=...) and to RowOptimizer(lr=schedule)"
    )


def _frozen(value: Any) -> Any:
    """A value that a later change does not reach; a tensor by its identity and how often it was written."""
    if isinstance(value, torch.Tensor):
        return Same(value)
    return tuple(map(_frozen, value)) if isinstance(value, (list, tuple)) else value


def _is_plain(*values: Any) -> bool:
    return all(isinstance(value, (bool, int, float, str, type(None), torch.dtype)) for value in values)
