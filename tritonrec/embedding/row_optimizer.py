"""Optimizers of rows with state."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from threading import Lock
from typing import Any, Literal, get_args

import numpy as np
import torch

from ..kernels import launch
from ..kernels.sparse_optimizers.op import MOST_UPDATES
from ..kernels.sparse_optimizers.rules import RULES, decay_factor
from ..settings import typed
from .custom_update import CustomUpdate, UpdateFunction
from .learning_rate import Schedule, comparable, rate_at, scaled

OptimizerName = Literal[
    "sgd", "momentum_sgd", "lars_sgd", "adagrad", "rowwise_adagrad", "rowwise_adagradw", "adam", "adamw",
    "rowwise_adam", "lamb", "rowwise_lamb", "ftrl",
]  # fmt: skip
SCALED_BY_MOMENT = "adagrad", "rowwise_adagrad", "rowwise_adagradw"


@typed
@dataclass(frozen=True)
class RowOptimizer:
    """Update rule of rows laid out as weight | state; formulas and sources: `kernels.sparse_optimizers`.

        sgd               weight (dim)
        momentum_sgd      weight (dim) | momentum (dim), and so lars_sgd
        adagrad           weight (dim) | sum of squared gradients (dim)
        rowwise_adagrad   weight (dim) | sum of mean squared gradients (1), and so rowwise_adagradw
        adam, adamw       weight (dim) | first moment (dim) | second moment (dim), and so lamb
        rowwise_adam      weight (dim) | first moment (dim) | second moment (1), and so rowwise_lamb
        ftrl              weight (dim) | z (dim) | sum of squared gradients (dim)

    With `lazy_weight_decay` a last column has the number of the row's last update, 0 before the first.
    Schedules and Adam's bias correction count the run's updates: one per window, for any number of
    micro-batches.

    Args:
        lr: a number >= 0, or a function of the update's number (`embedding.learning_rate`).
        eps: of all but SGD. beta1, beta2: of Adam and LAMB. momentum: of momentum_sgd and lars_sgd.
        nesterov: of momentum_sgd.
        weight_decay: decoupled in adamw, rowwise_adam and rowwise_adagradw, a part of the formula in LAMB,
            LARS and FTRL, L2 in the other rules. Only rows with a gradient decay.
        lazy_weight_decay: decay is decoupled in every rule, and a row makes up for the updates it has missed
            when it is updated next: it ends with the bits of a row decayed in each of them. Reads in between
            see the row before.
        custom_update: see `custom`.
        l1: of ftrl, whose weights are 0 while their sum of gradients is within it. eta: of lars_sgd.

    Raises ValueError for a name that is none of these, and for a number out of its range.
    """

    name: str = "adam"
    lr: float | Schedule = 1e-3
    eps: float = 1e-8
    beta1: float = 0.9
    beta2: float = 0.999
    momentum: float = 0.9
    nesterov: bool = False
    weight_decay: float = 0.0
    lazy_weight_decay: bool = False
    custom_update: CustomUpdate | None = None
    l1: float = 0.0
    eta: float = 0.001

    def __post_init__(self) -> None:
        names = get_args(OptimizerName)
        if self.custom_update is None and self.name not in names:
            raise ValueError(f"optimizer must be {', '.join(names[:-1])} or {names[-1]}, got {self.name!r}")
        object.__setattr__(self, "lr", comparable(self.lr))
        for name in ("beta1", "beta2", "momentum"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must lie in [0, 1), got {getattr(self, name)}")
        for name in ("eps", "weight_decay", "l1", "eta"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be finite and >= 0, got {getattr(self, name)}")
        if self.nesterov and self.name != "momentum_sgd":
            raise ValueError(f"nesterov goes with momentum_sgd, got {self.name}")
        if self.l1 and self.name != "ftrl":
            raise ValueError(f"l1 goes with ftrl, got {self.name}")
        is_ftrl = self.name == "ftrl" and self.custom_update is None
        if is_ftrl and (self.lazy_weight_decay or self.lr == 0):
            raise ValueError(
                "ftrl computes weights from its states and divides by lr: give it a weight_decay that is not "
                "lazy, and an lr above 0"
            )
        if self.custom_update is not None and self.weight_decay and not self.lazy_weight_decay:
            raise ValueError(
                f"update {self.name!r} decays its weights itself: leave out weight_decay, or give "
                "lazy_weight_decay=True"
            )

    @classmethod
    def custom(
        cls,
        update: UpdateFunction,
        state_width: int | Callable[[int], int],
        *,
        name: str = "custom",
        lr: float | Schedule = 1e-3,
        weight_decay: float = 0.0,
        lazy_weight_decay: bool = False,
        numba: Callable[..., None] | None = None,
        triton: Any = None,
    ) -> RowOptimizer:
        """A rule of your own, in torch and, where that is too slow, for numba and Triton as well.

        Args:
            update: ``update(weight (K, dim), state (K, S), gradient (K, dim), step, lr)`` returns the new
                weight and state. float32; `step` is a number from 1, `lr` that of the step. States begin as
                zeros. Each row has to be computed on its own, whatever K: the first update of a dimension
                checks it on random rows, and raises ValueError. It may be called from any thread, with
                rows of zeros beside the others, and must not keep anything.
            state_width: S, or a function of dim.
            numba: the update of one row, in place: ``numba(weight (dim,), state (S,), gradient (dim,), step,
                lr)``, a plain function, compiled without contraction. `lr` is float32. Used on the CPU.
            triton: the update of a tile of rows, decorated with ``triton.jit``: ``triton(weight, states,
                gradient, step, lr)`` returns weight and states. weight, gradient and each of the states,
                which are a tuple, are (rows, columns), columns behind dim are 0; a state of one column is
                (rows, 1). Used where kernels are Triton's.

        Both must give the bits of `update`, which is checked with the first update of a dimension.

        Raises ValueError for functions of another kind, and for a width that is no multiple of dim and a
        constant where `triton` is given.
        """
        rule = CustomUpdate.of(update, state_width, name, numba, triton)
        return cls(
            name, lr, weight_decay=weight_decay, lazy_weight_decay=lazy_weight_decay, custom_update=rule
        )

    def over_copies(self, copies: int) -> RowOptimizer:
        """Adagrad's rule for one of `copies` tables that are averaged: its moment is taken over their number.

        Each copy sees a part of the samples, so its gradients scatter more than those of one table, and the
        sum of their squares slows all copies down (arXiv 2508.03854). States stay those of the plain rule::

            w -= lr * g / (sqrt(s / copies) + eps)
               = (lr * sqrt(copies)) * g / (sqrt(s) + eps * sqrt(copies))

        Raises ValueError for other rules.
        """
        if not self.sums_squares:
            raise ValueError(
                f"moment_scaling is of {' and '.join(SCALED_BY_MOMENT)}, and the rows have {self.name}: "
                "leave it out, or give their tables one of these"
            )
        # From the equation above: lr and eps times the root, and the state is that of the plain rule.
        root = math.sqrt(copies)
        # Decay that is not in the gradient has lr as its factor, and does not scale.
        decoupled = self.lazy_weight_decay or RULES[self.name].decay == "decoupled"
        decay = self.weight_decay / root if decoupled else self.weight_decay
        return replace(self, lr=scaled(self.lr, root), eps=root * self.eps, weight_decay=decay)

    @property
    def keeps_zeros(self) -> bool:
        """Whether columns of zeros without gradients stay zeros, and change no other column of their row."""
        # A norm is of a row; a number of the last update is no column; and without eps, which is a float32
        # there, Adam would divide 0 by 0.
        plain = self.custom_update is None and not self.lazy_weight_decay
        whole = RULES[self.name].row_wise or self.name in ("lamb", "lars_sgd") if plain else True
        return not whole and (self.eps >= 1e-30 or self.name in ("sgd", "momentum_sgd"))

    @property
    def sums_squares(self) -> bool:
        """Whether the state is a sum of squared gradients."""
        return self.name in SCALED_BY_MOMENT and self.custom_update is None

    @property
    def settings(self) -> dict[str, Any]:
        """What updates depend on beside gradients and rates; a function of one's own by its results."""
        own = self.custom_update
        given = {name: each for name, each in vars(self).items() if name not in ("lr", "custom_update")}
        return given if own is None else {**given, "results": own.results}

    def row_width(self, dim: int) -> int:
        """float32 values of one row: its weights and its state."""
        return dim + sum(self._state_widths(dim)) + self.lazy_weight_decay

    def check_state(self, state: torch.Tensor, dim: int, where: str) -> None:
        """Raise ValueError for a state (n, row_width - dim) that no training keeps: a sum or mean of squares
        below 0, or a number of an update that is none. NaN may be: it is what a run that diverged has.
        """
        widths = self._state_widths(dim)
        if self.custom_update is None and widths and RULES[self.name].states != ("momentum_buffer",):
            squares = state[:, sum(widths[:-1]) : sum(widths)].cpu().numpy()
            least = float(np.fmin.reduce(squares, axis=None, initial=0.0))  # a fifth of a mask's time
            if least < 0:
                raise ValueError(
                    f"{where} has {least} as a sum of squares, which {self.name} "
                    "takes a root of: it is damaged, or of another rule"
                )
        if self.lazy_weight_decay:
            last = state[:, -1]
            wrong = ~((last >= 0) & (last <= MOST_UPDATES) & (last == last.floor()))
            if bool(wrong.any()):
                raise ValueError(f"{where} has a row last updated in update {float(last[wrong][0])}")

    def _state_widths(self, dim: int) -> tuple[int, ...]:
        if self.custom_update is not None:
            return (self.custom_update.width(dim),)
        declared = RULES[self.name]
        states = [dim] * len(declared.states)
        return (*states[:-1], 1) if declared.row_wise else tuple(states)

    def update(
        self,
        rows: torch.Tensor,
        indices: torch.Tensor,
        gradient: torch.Tensor,
        step: int,
        count: torch.Tensor | None = None,
    ) -> None:
        """Update ``rows[indices]`` in place.

        Args:
            rows: (R, row_width(dim)) float32.
            indices: (K,) int64, distinct.
            gradient: (K, dim) float32, the mean gradient of the step.
            step: the update's number, counted from 1.
            count: () int64, the number of valid indices (`kernels.padding`).

        Raises ValueError for shapes that do not fit, and for a schedule's rate that is no rate.
        """
        dim = gradient.shape[1]
        if rows.shape[1] != self.row_width(dim) or gradient.shape[0] != indices.shape[0]:
            raise ValueError(
                f"{self.name} takes rows (R, {self.row_width(dim)}) and gradient ({len(indices)}, {dim}) for "
                f"{len(indices)} indices, got {tuple(rows.shape)} and {tuple(gradient.shape)}"
            )
        lr, weight_decay = rate_at(self.lr, step), self.weight_decay
        if self.lazy_weight_decay:
            factors = decay_factors(self.lr, weight_decay, rows.device).up_to(step)
            launch.sparse_lazy_decay(rows[:, :dim], rows[:, -1:], indices, factors, step, count)
            # The rows have decayed; the rule sees no column with the number of the last update.
            rows, weight_decay = rows[:, :-1], 0.0
        if self.custom_update is not None:
            self.custom_update.update(rows, indices, gradient, step, lr, count)
            return
        rule = "nesterov_sgd" if self.nesterov else self.name
        betas = self.beta1, self.beta2
        if "momentum_buffer" in RULES[self.name].states:
            betas = self.momentum, self.eta
        elif self.name == "ftrl":
            betas = self.l1, 0.0
            if lr == 0:
                raise ValueError(f"ftrl divides by lr, and the rate of update {step} is 0")
        parts = rows.split((dim, *self._state_widths(dim)), 1)
        numbers = lr, self.eps, *betas, weight_decay, step
        launch.sparse_update[rule](*parts, indices, gradient, *numbers, count)


class DecayFactors:
    """Decoupled decay's factor of each update, (T,) float32 on a device, computed as updates come.

    Four bytes per update of the run.
    """

    def __init__(self, lr: float | Schedule, weight_decay: float, device: torch.device):
        self.lr, self.weight_decay, self.device = lr, weight_decay, device
        self._factors, self._known, self._lock = self._empty(0), 0, Lock()

    def up_to(self, update: int) -> torch.Tensor:
        """Factors of the updates 1 to `update` (update,); ValueError beyond those that a row can count."""
        if not 1 <= update <= MOST_UPDATES:
            raise ValueError(f"lazy weight decay counts 1 to {MOST_UPDATES} updates, got {update}")
        with self._lock:
            if update > len(self._factors):
                # Doubled, so that a run copies each factor a few times in all.
                longer = self._empty(2 * update)
                longer[: self._known] = self._factors[: self._known]
                self._factors = longer
            new = [
                decay_factor(rate_at(self.lr, number), self.weight_decay)
                for number in range(self._known + 1, update + 1)
            ]
            if len(new) == 1:
                self._factors[update - 1].fill_(new[0])  # a copy to a device would wait
            elif new:
                self._factors[self._known : update] = torch.tensor(new, dtype=torch.float32, device="cpu")
            self._known = max(self._known, update)
            return self._factors[:update]

    def _empty(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.float32, device=self.device)


@lru_cache(maxsize=64)
def decay_factors(lr: float | Schedule, weight_decay: float, device: torch.device) -> DecayFactors:
    """The factors of a rule, one table for all its tables on a device."""
    return DecayFactors(lr, weight_decay, device)
