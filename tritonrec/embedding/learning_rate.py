"""Learning rates as functions of the update's number: frozen dataclasses without state.

Updates count from 1, one per window. A rate depends on nothing else, so it is the same for any number of
micro-batches, on every rank and after a restart. torch and transformers count from 0, so their first update
has the rate of an update 0 that does not exist here: 0 in a warm-up, which would be an update for nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, is_dataclass
from numbers import Real
from typing import Any

from ..settings import typed

Schedule = Callable[[int], float]
"""Update's number, from 1, to learning rate."""
PROBED = (1, 10, 100, 1000, 10_000, 100_000)
"""Updates at which functions are compared."""


@dataclass(frozen=True)
class Constant:
    """``lr`` in every update, as a plain number for a learning rate."""

    lr: float

    def __post_init__(self) -> None:
        _check_rates(lr=self.lr)

    def __call__(self, update: int) -> float:
        return self.lr


@dataclass(frozen=True)
class _Warmup:
    """Linear from 0 to `lr` in `warmup` updates, then down to `floor` at update `steps`, then constant."""

    lr: float
    warmup: int
    steps: int
    floor: float = 0.0

    def __post_init__(self) -> None:
        _check_rates(lr=self.lr, floor=self.floor)
        if not 0 <= self.warmup < self.steps:
            raise ValueError(
                f"warmup must be 0 to steps - 1 updates, got warmup={self.warmup} and steps={self.steps}"
            )

    def __call__(self, update: int) -> float:
        if update <= self.warmup:
            return self.lr * update / self.warmup
        return self.after(min((update - self.warmup) / (self.steps - self.warmup), 1.0))

    def after(self, progress: float) -> float:
        """The rate at that share of the way from the warm-up's end to `steps`."""
        raise NotImplementedError


@typed
@dataclass(frozen=True)
class WarmupLinear(_Warmup):
    """Linear from 0 to `lr` in `warmup` updates, linear to `floor` at update `steps`, then constant.

    `get_linear_schedule_with_warmup` of transformers.
    """

    def after(self, progress: float) -> float:
        return self.lr + (self.floor - self.lr) * progress


@typed
@dataclass(frozen=True)
class WarmupCosine(_Warmup):
    """Linear from 0 to `lr` in `warmup` updates, half a cosine to `floor` at update `steps`, then constant.

    `get_cosine_schedule_with_warmup` of transformers; without warm-up
    `torch.optim.lr_scheduler.CosineAnnealingLR` (Loshchilov and Hutter 2017, equation 5).
    """

    def after(self, progress: float) -> float:
        cosine = math.cos(math.pi * progress)
        return self.floor + (self.lr - self.floor) * (0.5 * (1.0 + cosine))


@typed
@dataclass(frozen=True)
class StepDecay:
    """``lr * gamma**n`` after n times `step_size` updates: `torch.optim.lr_scheduler.StepLR`."""

    lr: float
    step_size: int
    gamma: float = 0.1

    def __post_init__(self) -> None:
        _check_rates(lr=self.lr, gamma=self.gamma)
        if self.step_size < 1:
            raise ValueError(f"step_size must be at least 1 update, got {self.step_size}")

    def __call__(self, update: int) -> float:
        return self.lr * self.gamma ** ((update - 1) // self.step_size)


@dataclass(frozen=True)
class Scaled:
    """``factor`` times the rate of another schedule."""

    schedule: Schedule
    factor: float

    def __post_init__(self) -> None:
        _check_rates(factor=self.factor)

    def __call__(self, update: int) -> float:
        return self.factor * self.schedule(update)


@dataclass(frozen=True)
class FunctionSchedule:
    """A function of a user. Ranks and checkpoints compare its name and its rates at the updates `PROBED`."""

    name: str
    rates: tuple[float, ...]
    function: Schedule = field(repr=False, hash=False)

    def __call__(self, update: int) -> float:
        return self.function(update)


def comparable(lr: float | Schedule) -> float | Schedule:
    """`lr` itself where it is a number or a frozen dataclass, whose ``repr`` tells all; else with a name.

    Raises ValueError for a rate that is negative or not finite, TypeError for what is no rate at all.
    """
    if isinstance(lr, Real) and not isinstance(lr, bool):
        _check_rates(lr=float(lr))
        return float(lr)
    if not callable(lr):
        raise TypeError(f"lr must be a number or a function of the update's number, got {lr!r}")
    rates = tuple(rate_at(lr, update) for update in PROBED)
    kind: Any = type(lr)
    if is_dataclass(lr) and kind.__dataclass_params__.frozen and _is_hashable(lr):
        return lr
    named = lr if hasattr(lr, "__qualname__") else kind
    return FunctionSchedule(f"{named.__module__}.{named.__qualname__}", rates, lr)


def scaled(lr: float | Schedule, factor: float) -> float | Schedule:
    """The rate times a factor; itself for 1."""
    if factor == 1:
        return lr
    return Scaled(lr, factor) if callable(lr) else factor * lr


def rate_at(lr: float | Schedule, update: int) -> float:
    """The learning rate of an update; ValueError where it is negative or not finite."""
    if not callable(lr):
        return lr
    rate = lr(update)
    if not isinstance(rate, Real) or not 0 <= float(rate) < math.inf:
        raise ValueError(
            f"the learning rate of update {update} must be finite and >= 0, got {rate!r} from {lr}"
        )
    return float(rate)


def _is_hashable(value: object) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


def _check_rates(**rates: float) -> None:
    for name, rate in rates.items():
        if not 0 <= rate < math.inf:
            raise ValueError(f"{name} must be finite and >= 0, got {rate}")
