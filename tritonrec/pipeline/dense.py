"""The dense model under an optimizer of torch: one update a window, from gradients that the trainer sums."""

from __future__ import annotations

import copy
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from threading import Lock
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakKeyDictionary, ref

import torch
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel

from ..embedding.in_flight import InFlight
from ..kernels.checksums import sums_of_bits
from ..kernels.deferred import NONE, first_bad
from ..kernels.dispatch import on_host
from ..kernels.padding import report
from .caller_state import Noted, first_change, refusal, settings_of, states_of, steady
from .dense_checks import (
    is_sharded,
    listed,
    reshard,
    validate_average,
    validate_numbers,
    validate_optimizers,
    validate_schedulers,
    validate_sharded,
)
from .dense_state import validate_kept, validate_state
from .precision import LossScaler

if TYPE_CHECKING:
    from .sharded import Shards

_guards: WeakKeyDictionary[Optimizer, InFlight] = WeakKeyDictionary()


class DenseModel:
    """A dense model and what updates it.

    All ranks have the same gradients in every bit, so equal updates keep their models equal. Where
    `fully_shard` has sharded parameters, a rank has the gradients of its shards and updates those.

    Args:
        model: its trained parameters are float32.
        optimizer: any `torch.optim.Optimizer` of the model's parameters whose ``step`` needs no closure;
            several that share the parameters out, as Muon for matrices and AdamW for the rest; or None for a
            model without parameters.
        scheduler: of the optimizer's learning rates (`torch.optim.lr_scheduler`), stepped after each update;
            or several.
        average: of the model's weights (`torch.optim.swa_utils.AveragedModel`), updated after each update.
        scaler: of the loss, for float16 arithmetic.

    Attributes:
        parameters: by name, those that the optimizers hold.
        settings: of each optimizer's groups, as they were here.
        shards: of the sharded parameters; None: none is.
        in_flight: the guards of the optimizers, each one for all trainers that have its optimizer.
        rates: for each update in flight, oldest first, the learning rates of the optimizers' groups.
        scales: for each update in flight, oldest first, the scale of its loss, None without a scaler.

    Raises TypeError for something else in their places, a parameter that is not float32, or an optimizer
    whose step needs a closure; ValueError for a scheduler or an average of something else, and for sharded
    parameters under an optimizer that looks at whole ones.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: Optimizer | Sequence[Optimizer] | None,
        scheduler: LRScheduler | Sequence[LRScheduler] | None = None,
        average: AveragedModel | None = None,
        scaler: LossScaler | None = None,
    ):
        self.model, self.average, self.scaler = model, average, scaler
        self.optimizers, self.schedulers = listed(optimizer), listed(scheduler)
        reshard(model)
        self.parameters = validate_optimizers(model, self.optimizers)
        self.settings = [[dict(group, params=()) for group in each.param_groups] for each in self.optimizers]
        validate_schedulers(self.schedulers, self.optimizers)
        validate_average(average, model)
        self.shards: Shards | None = None
        if any(is_sharded(each) for each in self.parameters.values()):
            from .sharded import Shards  # with DTensors, which cost half a second of import

            self.shards = Shards(model, self.parameters)
            validate_sharded(self.optimizers, average)
        self.in_flight = [_guard_of(each) for each in self.optimizers] or [InFlight("the optimizer")]
        self.rates: deque[tuple[Any, ...]] = deque()
        self.scales: deque[float | None] = deque()
        self._sums: torch.Tensor | None = None  # of the parameters' bits, after the last update in flight
        self._noted: Noted | None = None  # settings, after the last update in flight
        self._states: Noted = {}  # likewise
        self._noting = Lock()
        self._steps: Callable[[], str]

    @property
    def evaluated(self) -> torch.nn.Module:
        """The averaged model, where there is one; else the model."""
        return self.model if self.average is None else self.average.module

    def validate(self) -> None:
        """Raise ValueError where the caller has replaced parameters of the model or of the optimizer."""
        reshard(self.model)
        validate_optimizers(self.model, self.optimizers)

    def gather(self) -> None:
        """Sharded parameters are whole for the model's next call; collective after an update."""
        if self.shards is not None:
            self.shards.gather()

    def step(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """Update the parameters from ``gradients[name]``, each shaped like its parameter, or its shard here.

        A parameter without a gradient stays as it is, as in torch.

        Raises RuntimeError for a parameter that was changed while windows are in flight.
        """
        self.check_idle("a step")
        self.check_unchanged()
        self.check_settings()
        validate_numbers(self.optimizers)
        self._note()
        for guard in self.in_flight:
            guard.written += 1
        if self.shards is not None:
            self.shards.scatter()
        try:
            for name, gradient in gradients.items():
                self.parameters[name].grad = _as_gradient(gradient, self.parameters[name])
            for optimizer in self.optimizers:
                optimizer.step()
        finally:
            for parameter in self.parameters.values():
                parameter.grad = None
        with self._noting:
            if self._noted is not None:
                now = settings_of(self.optimizers, self.schedulers)
                # While the update ran, the optimizer itself may have
                # moved some settings (`steady` leaves these out).
                self._compare(steady(self._noted), steady(now))
            for scheduler in self.schedulers:
                scheduler.step()
            if self._noted is not None:
                self._noted = settings_of(self.optimizers, self.schedulers)
        if self.average is not None:
            self.average.update_parameters(self.model)
        if self.scaler is not None:
            self.scaler.update(found_inf=False)
        # This update's own changes are not the caller's.
        if self._sums is not None:
            self._sums = self._sum_bits()
            self._states = states_of(self.parameters, self.optimizers)

    def skip(self) -> None:
        """Leave an update out."""
        self._note()
        if self.scaler is not None:
            self.scaler.update(found_inf=True)

    def scale_exponent(self, terms: int, fraction_bits: int) -> int:
        """Of the losses in the next update (`LossScaler.exponent`); 0 without a scaler."""
        return 0 if self.scaler is None else self.scaler.exponent(terms, fraction_bits)

    def _note(self) -> None:
        if self.in_flight[0].active:  # a trainer takes them
            self.rates.append(_learning_rates(self.optimizers))
            self.scales.append(None if self.scaler is None else self.scaler.scale)

    def begin(self, steps: Callable[[], str], guarded: bool) -> None:
        """Start the guard of windows in flight (`InFlight.begin`).

        A `guarded` model's parameters may not be changed from now on by anybody else.
        """
        validate_numbers(self.optimizers)
        with ExitStack() as begun:
            for guard in self.in_flight:
                guard.begin(steps)
                begun.callback(guard.end)
            if self.shards is not None:
                begun.callback(self.shards.end)
                self.shards.begin()
            # All have begun: nothing is undone on leaving.
            begun.pop_all()
        self.rates.clear()
        self.scales.clear()
        self._steps = steps
        self._sums = self._sum_bits() if guarded and self.parameters else None
        self._noted = settings_of(self.optimizers, self.schedulers) if guarded else None
        self._states = states_of(self.parameters, self.optimizers) if guarded else {}

    def end(self) -> None:
        """End the guard."""
        if self.shards is not None:
            self.shards.end()
        for guard in self.in_flight:
            guard.end()
        self._sums = self._noted = None
        self._states = {}

    def check_settings(self) -> None:
        """Raise RuntimeError naming a setting of an optimizer or a scheduler that was changed in flight."""
        with self._noting:
            if self._noted is not None:
                self._compare(self._noted, settings_of(self.optimizers, self.schedulers))

    def _compare(self, before: Noted, now: Noted) -> None:
        change = first_change(before, now)
        if change is not None:
            raise refusal(change, self._steps())

    def check_unchanged(self, at_once: bool = False) -> None:
        """Raise RuntimeError naming a parameter that was changed outside while windows are in flight.

        The sum of a parameter's bits tells. On a device, unless `at_once`, the error is put off where errors
        are (`kernels.deferred`).
        """
        if self._sums is None:
            return
        self._compare(self._states, states_of(self.parameters, self.optimizers))
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
        ``average/NAME`` its average. They share the memory of model and optimizer; those of sharded
        parameters are `DTensor`. ``scaler/scale`` and ``scaler/growth_tracker`` are () float64.
        """
        self.check_idle("reading the state")
        found = {name: parameter.detach() for name, parameter in self.parameters.items()}
        for name, parameter in self.parameters.items():
            state = self._state_of(parameter).items()
            found |= {f"{name}/{key}": value for key, value in state if isinstance(value, torch.Tensor)}
        if self.average is not None:
            average = self.average.module.named_parameters()
            found |= {f"average/{name}": parameter.detach() for name, parameter in average}
        if self.scaler is not None:
            for name, value in self.scaler.state_dict().items():
                found[f"scaler/{name}"] = torch.tensor(value, dtype=torch.float64, device="cpu")
        return found

    def whole_tensors(self) -> dict[str, torch.Tensor]:
        """`tensors`, of which sharded ones are gathered; collective where there are some."""
        return self.tensors() if self.shards is None else self.shards.whole(self.tensors())

    def state_dict(self) -> dict[str, Any]:
        """Of model, optimizers, schedulers, average and scaler, as their own ``state_dict`` gives them.

        In the optimizers' the parameters' names stand in place of their numbers. Sharded tensors are whole
        in it, on every rank, as those of a model that was never sharded; then it is collective.
        """
        self.check_idle("state_dict")
        parts: dict[str, Any] = {"model": dict(self.model.state_dict()), "optimizers": []}
        for optimizer in self.optimizers:
            names, packed = self._names_in_order(optimizer), optimizer.state_dict()
            parts["optimizers"].append(_with_params(packed, names))
        parts["schedulers"] = [scheduler.state_dict() for scheduler in self.schedulers]
        if self.average is not None:
            parts["average"] = dict(self.average.state_dict())
        if self.scaler is not None:
            parts["scaler"] = self.scaler.state_dict()
        return parts if self.shards is None else self.shards.whole(parts)

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise ValueError for a state that `load_state_dict` does not take; nothing is changed."""
        self.check_idle("load_state_dict")
        own = self.state_dict()
        validate_state(state, own)
        for optimizer, packed in zip(self.optimizers, state["optimizers"], strict=True):
            validate_kept(packed["state"], self.parameters, optimizer.state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` gave, the settings of the optimizer's groups among it.

        Raises ValueError for other parts, parameters, shapes or another optimizer; nothing is loaded then,
        nor after an error of an optimizer's or a scheduler's own.
        """
        self.check_state(state)
        # A state that passes the checks may still be refused half way by an optimizer's own code.
        before = copy.deepcopy(self.state_dict())
        try:
            self._load(state)
        except BaseException as error:
            self._load(before)
            if isinstance(error, (KeyError, TypeError, AttributeError, IndexError)):
                raise ValueError(f"an optimizer or a scheduler cannot load the state: {error!r}") from error
            raise

    def _load(self, state: Mapping[str, Any]) -> None:
        for optimizer, packed in zip(self.optimizers, state["optimizers"], strict=True):
            # torch numbers parameters in the order of the groups;
            # saved states have names, which survive another order.
            number = {name: index for index, name in enumerate(self._names_in_order(optimizer))}
            # a copy: torch's would share the tensors
            packed = copy.deepcopy(packed)
            if self.shards is not None:
                packed["state"] = {
                    name: self.shards.own_state(values, self.parameters[name])
                    for name, values in packed["state"].items()
                }
            optimizer.load_state_dict(_with_params(packed, number))
        self._load_module(self.model, state["model"])
        for scheduler, its in zip(self.schedulers, state["schedulers"], strict=True):
            scheduler.load_state_dict(its)
        if self.average is not None:
            self._load_module(self.average, state["average"])
        if self.scaler is not None:
            self.scaler.load_state_dict(state["scaler"])

    def check_idle(self, action: str) -> None:
        """Raise RuntimeError while windows are in flight."""
        for guard in self.in_flight:
            guard.check(action)

    def load_parameters(self, values: Mapping[str, torch.Tensor]) -> None:
        """Give parameters and buffers, and the average of them, other values by name."""
        self.check_idle("load_parameters")
        for module in (self.model, *([self.average.module] if self.average is not None else [])):
            own = dict(module.state_dict()) if self.shards is None else self.shards.whole(module.state_dict())
            self._load_module(module, {**own, **values})

    def _load_module(self, module: torch.nn.Module, state: Mapping[str, Any]) -> None:
        if self.shards is not None:
            held = module.state_dict()
            state = {name: self.shards.own_state(state[name], own) for name, own in held.items()}
        module.load_state_dict(state)

    def _state_of(self, parameter: Parameter) -> Mapping[str, Any]:
        """What its optimizer keeps for a parameter."""
        return next((each.state[parameter] for each in self.optimizers if parameter in each.state), {})

    def _names_in_order(self, optimizer: Optimizer) -> list[str]:
        """The parameters' names in the order of the optimizer's groups."""
        name = {id(parameter): name for name, parameter in self.parameters.items()}
        return [name[id(each)] for group in optimizer.param_groups for each in group["params"]]

    def _sum_bits(self) -> torch.Tensor:
        """(P,) int64, for each parameter the sum of its values' bits."""
        return sums_of_bits([_local(parameter) for parameter in self.parameters.values()])


def _with_params(packed: Mapping[str, Any], new: Any) -> dict[str, Any]:
    """An optimizer's state with ``new[each]`` in place of each parameter's number or name."""
    groups = [
        {**group, "params": [new[each] for each in group["params"]]} for group in packed["param_groups"]
    ]
    state = {new[each]: values for each, values in packed["state"].items()}
    return {**packed, "state": state, "param_groups": groups}


def _learning_rates(optimizers: Sequence[Optimizer]) -> tuple[Any, ...]:
    """Of the optimizers' groups; a rate that is a tensor is copied, because a scheduler writes into it."""
    # NaN for a group without a rate, which has no `lr` to show.
    rates = [group.get("lr", math.nan) for optimizer in optimizers for group in optimizer.param_groups]
    return tuple(rate.clone() if isinstance(rate, torch.Tensor) else rate for rate in rates)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a sharded tensor, any other one itself."""
    return cast(Any, tensor).to_local() if is_sharded(tensor) else tensor


def _as_gradient(gradient: torch.Tensor, parameter: Parameter) -> torch.Tensor:
    """The gradient of a parameter or of its shard, as ``.grad`` takes it."""
    if not is_sharded(parameter):
        return _strided_like(gradient, parameter)
    from .sharded import sharded_like

    return sharded_like(_strided_like(gradient, _local(parameter)), cast(Any, parameter))


def _strided_like(gradient: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """The gradient in the parameter's order of memory, which fused optimizers take for granted."""
    if gradient.stride() == parameter.stride():
        return gradient
    return torch.empty_like(parameter).copy_(gradient)


def _guard_of(optimizer: Optimizer) -> InFlight:
    """The guard of an optimizer, made once: inside a flight only lanes may use it."""
    if optimizer in _guards:
        return _guards[optimizer]
    # Several trainers may share an optimizer, one after the
    # other: one guard, so its last update counts for all.
    guard = _guards[optimizer] = InFlight("the optimizer")

    def begin_anew(optimizer: Optimizer) -> None:
        guard.update = -1

    optimizer.register_step_pre_hook(lambda *_: guard.check("a step"))
    optimizer.register_state_dict_pre_hook(lambda *_: guard.check("state_dict"))
    optimizer.register_load_state_dict_pre_hook(lambda *_: guard.check("load_state_dict"))
    optimizer.register_load_state_dict_post_hook(begin_anew)
    own = ref(optimizer)

    def copied(protocol: Any) -> Any:
        guard.check("a copy")
        made: Any = own()
        kind: Any = type(made)
        return kind.__reduce_ex__(made, protocol)

    vars(optimizer)["__reduce_ex__"] = copied  # which copy and pickle ask the instance for
    return guard
