"""The dense model under an optimizer of torch: one update a window, from gradients that the trainer sums."""

from __future__ import annotations

import copy
import math
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel

from ..embedding.in_flight import InFlight
from ..kernels.deferred import NONE, first_bad
from ..kernels.dispatch import on_host
from ..kernels.padding import report
from .dense_checks import validate_average, validate_optimizer, validate_scheduler, validate_shapes

_guards: WeakKeyDictionary[Optimizer, InFlight] = WeakKeyDictionary()


class DenseModel:
    """A dense model and what updates it.

    All ranks have the same gradients in every bit, so equal updates keep their models equal.

    Args:
        model: its trained parameters are float32.
        optimizer: any `torch.optim.Optimizer` of the model's parameters whose ``step`` needs no closure; None
            for a model without parameters.
        scheduler: of the optimizer's learning rates (`torch.optim.lr_scheduler`), stepped after each update.
        average: of the model's weights (`torch.optim.swa_utils.AveragedModel`), updated after each update.

    Attributes:
        parameters: by name, those that the optimizer holds.
        in_flight: the guard of the optimizer, one for all trainers that have it.
        rates: for each update in flight, oldest first, the learning rates of the optimizer's groups.

    Raises TypeError for something else in their places, a parameter that is not float32, or an optimizer
    whose step needs a closure; ValueError for a scheduler or an average of something else.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: Optimizer | None,
        scheduler: LRScheduler | None = None,
        average: AveragedModel | None = None,
    ):
        self.parameters = validate_optimizer(model, optimizer)
        validate_scheduler(scheduler, optimizer)
        validate_average(average, model)
        self.model, self.optimizer, self.scheduler, self.average = model, optimizer, scheduler, average
        self.in_flight = InFlight("the optimizer") if optimizer is None else _guard_of(optimizer)
        self.rates: deque[tuple[Any, ...]] = deque()
        self._sums: torch.Tensor | None = None  # of the parameters' bits, after the last update in flight

    @property
    def evaluated(self) -> torch.nn.Module:
        """The averaged model, where there is one; else the model."""
        return self.model if self.average is None else self.average.module

    def validate(self) -> None:
        """Raise ValueError where the caller has replaced parameters of the model or of the optimizer."""
        validate_optimizer(self.model, self.optimizer)

    def step(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """Update the parameters from ``gradients[name]``, each shaped like its parameter.

        A parameter without a gradient stays as it is, as in torch.

        Raises RuntimeError for a parameter that was changed while windows are in flight.
        """
        self.in_flight.check("a step")
        self.check_unchanged()
        self.rates.append(_learning_rates(self.optimizer))
        if self.optimizer is not None:
            try:
                for name, gradient in gradients.items():
                    self.parameters[name].grad = _strided_like(gradient, self.parameters[name])
                self.optimizer.step()
            finally:
                for parameter in self.parameters.values():
                    parameter.grad = None
        if self.scheduler is not None:
            self.scheduler.step()
        if self.average is not None:
            self.average.update_parameters(self.model)
        if self._sums is not None:
            self._sums = self._sum_bits()

    def begin(self, steps: Callable[[], str], guarded: bool) -> None:
        """Start the guard of windows in flight (`InFlight.begin`).

        A `guarded` model's parameters may not be changed from now on by anybody else.
        """
        self.in_flight.begin(steps)
        self.rates.clear()
        self._sums = self._sum_bits() if guarded and self.parameters else None

    def end(self) -> None:
        """End the guard."""
        self.in_flight.end()
        self._sums = None

    def check_unchanged(self, at_once: bool = False) -> None:
        """Raise RuntimeError naming a parameter that was changed outside while windows are in flight.

        The sum of a parameter's bits tells. On a device, unless `at_once`, the error is put off where errors
        are (`kernels.deferred`).
        """
        if self._sums is None:
            return
        names, changed = list(self.parameters), self._sum_bits() != self._sums

        def error(code: int) -> RuntimeError:
            return RuntimeError(
                f"parameter {names[code - 1]} was changed while windows are in flight, of which some were "
                "computed before the change: change parameters after list(trainer.run([])), or let the "
                "batches end at the step before the change"
            )

        places = torch.where(changed, torch.arange(len(names), device=changed.device), NONE)
        report(first_bad(places) if at_once or on_host(places) else places, None, error, error)

    def tensors(self) -> dict[str, torch.Tensor]:
        """What updates change: ``NAME`` a parameter, ``NAME/exp_avg`` and so on the optimizer's state of it,
        ``average/NAME`` its average. They share the memory of model and optimizer.
        """
        self.in_flight.check("reading the state")
        found = {name: parameter.detach() for name, parameter in self.parameters.items()}
        if self.optimizer is not None:
            for name, parameter in self.parameters.items():
                state = self.optimizer.state.get(parameter, {})
                found |= {
                    f"{name}/{key}": value for key, value in state.items() if isinstance(value, torch.Tensor)
                }
        if self.average is not None:
            average = self.average.module.named_parameters()
            found |= {f"average/{name}": parameter.detach() for name, parameter in average}
        return found

    def state_dict(self) -> dict[str, Any]:
        """Of model, optimizer, scheduler and average, as their own ``state_dict`` gives them.

        In the optimizer's the parameters' names stand in place of their numbers.
        """
        self.in_flight.check("state_dict")
        parts: dict[str, Any] = {"model": dict(self.model.state_dict())}
        if self.optimizer is not None:
            names, packed = self._names_in_order(), self.optimizer.state_dict()
            parts["optimizer"] = {
                **packed,
                "state": {names[number]: values for number, values in packed["state"].items()},
                "param_groups": [
                    {**group, "params": [names[number] for number in group["params"]]}
                    for group in packed["param_groups"]
                ],
            }
        if self.scheduler is not None:
            parts["scheduler"] = self.scheduler.state_dict()
        if self.average is not None:
            parts["average"] = dict(self.average.state_dict())
        return parts

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` gave, the settings of the optimizer's groups among it.

        Raises ValueError for other parts, parameters or shapes; nothing is loaded then.
        """
        self.in_flight.check("load_state_dict")
        own = self.state_dict()
        if state.keys() != own.keys():
            raise ValueError(f"expected the states of {', '.join(own)}, got those of {', '.join(state)}")
        validate_shapes(state["model"], own["model"])
        if self.optimizer is not None:
            groups, expected = (
                [group["params"] for group in each["optimizer"]["param_groups"]] for each in (state, own)
            )
            if groups != expected:
                raise ValueError(f"expected an optimizer with the groups {expected}, got {groups}")
            number = {name: index for index, name in enumerate(self._names_in_order())}
            packed = copy.deepcopy(state["optimizer"])  # torch's would share its tensors
            self._check_kept(packed["state"])
            self.optimizer.load_state_dict(
                {
                    **packed,
                    "state": {number[name]: values for name, values in packed["state"].items()},
                    "param_groups": [
                        {**group, "params": [number[name] for name in group["params"]]}
                        for group in packed["param_groups"]
                    ],
                }
            )
        self.model.load_state_dict(state["model"])
        if self.scheduler is not None:
            self.scheduler.load_state_dict(state["scheduler"])
        if self.average is not None:
            self.average.load_state_dict(state["average"])

    def _check_kept(self, state: Mapping[str, Any]) -> None:
        """Raise ValueError where the optimizer, once in use, keeps other values for a parameter."""
        assert self.optimizer is not None
        for name, parameter in self.parameters.items():
            own = self.optimizer.state.get(parameter)
            if own and name in state and own.keys() != state[name].keys():
                raise ValueError(
                    f"{name}: the optimizer keeps {', '.join(own)}, the state has {', '.join(state[name])}; "
                    "was it saved with another optimizer?"
                )

    def _names_in_order(self) -> list[str]:
        """The parameters' names in the order of the optimizer's groups."""
        assert self.optimizer is not None
        name = {id(parameter): name for name, parameter in self.parameters.items()}
        return [name[id(each)] for group in self.optimizer.param_groups for each in group["params"]]

    def _sum_bits(self) -> torch.Tensor:
        """(P,) int64, for each parameter the sum of its values' bits."""
        return torch.stack(
            [parameter.detach().view(torch.int32).sum() for parameter in self.parameters.values()]
        )


def _learning_rates(optimizer: Optimizer | None) -> tuple[Any, ...]:
    """Of the optimizer's groups; a rate that is a tensor is copied, because a scheduler writes into it."""
    groups = [] if optimizer is None else optimizer.param_groups
    rates = [group.get("lr", math.nan) for group in groups]
    return tuple(rate.clone() if isinstance(rate, torch.Tensor) else rate for rate in rates)


def _strided_like(gradient: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """The gradient in the parameter's order of memory, which fused optimizers take for granted."""
    if gradient.stride() == parameter.stride():
        return gradient
    return torch.empty_like(parameter).copy_(gradient)


def _guard_of(optimizer: Optimizer) -> InFlight:
    """The guard of an optimizer, made once: inside a flight only lanes may use it."""
    if optimizer in _guards:
        return _guards[optimizer]
    guard = _guards[optimizer] = InFlight("the optimizer")

    def begin_anew(optimizer: Optimizer) -> None:
        guard.update = -1

    optimizer.register_step_pre_hook(lambda *_: guard.check("a step"))
    optimizer.register_state_dict_pre_hook(lambda *_: guard.check("state_dict"))
    optimizer.register_load_state_dict_pre_hook(lambda *_: guard.check("load_state_dict"))
    optimizer.register_load_state_dict_post_hook(begin_anew)
    return guard
