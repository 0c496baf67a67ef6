"""The optimizer of dense parameters, as rows with state."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping

import torch

from ..kernels.deferred import NONE, first_bad
from ..kernels.dispatch import on_host
from ..kernels.padding import report
from .in_flight import InFlight
from .row_optimizer import RowOptimizer


class DenseOptimizer:
    """The same rules for dense parameters: each is a block of rows (its last dimension) with state.

    A parameter may have any strides. Its values may be changed between two updates: the second one starts
    from them. While a trainer has windows in flight a change is an error.

    Args:
        parameters: (name, parameter) pairs, float32; a vector counts as one row.
        rule: learning rate and rule.

    Raises TypeError for a parameter of another dtype.
    """

    def __init__(self, parameters: Iterable[tuple[str, torch.nn.Parameter]], rule: RowOptimizer):
        self.rule = rule
        self.parameters = dict(parameters)
        self.in_flight = InFlight("the dense optimizer")
        self._rows: dict[str, torch.Tensor] = {}
        for name, parameter in self.parameters.items():
            if parameter.dtype != torch.float32:
                raise TypeError(
                    f"parameter {name} is {parameter.dtype}: the dense optimizer takes float32 parameters; "
                    "convert the model with .float(), and use torch.autocast for lower precision"
                )
            weight = _as_rows(parameter.detach())
            rows = weight.new_zeros(weight.shape[0], rule.row_width(weight.shape[1]))
            rows[:, : weight.shape[1]] = weight
            self._rows[name] = rows

    @property
    def rows(self) -> dict[str, torch.Tensor]:
        """By parameter weight | state, (R, row_width) float32, as `load` and a checkpoint take them."""
        self.in_flight.check("reading the rows")
        if not self.in_flight.active:
            self._read_parameters()
        return self._rows

    def step(self, gradients: Mapping[str, torch.Tensor], step: int) -> None:
        """Update the parameters from ``gradients[name]``, each shaped like its parameter; others stay.

        Args:
            step: counts from 1.

        Raises RuntimeError for a parameter that was changed while windows are in flight.
        """
        self.in_flight.check("a step")
        if self.in_flight.active:
            self.check_unchanged()
        else:
            self._read_parameters()
        for name, gradient in gradients.items():
            rows, gradient = self._rows[name], _as_rows(gradient)
            self.rule.update(rows, torch.arange(rows.shape[0], device=rows.device), gradient, step)
            self._write_parameter(name)

    def begin(self, steps: Callable[[], str]) -> None:
        """Start the guard of windows in flight (`InFlight.begin`), from the parameters' current values."""
        self.in_flight.begin(steps)
        self._read_parameters()

    def check_unchanged(self, at_once: bool = False) -> None:
        """Raise RuntimeError naming a parameter that was changed outside while windows are in flight.

        On a device, unless `at_once`, the error is put off where errors are (`kernels.deferred`).
        """
        flags = [
            (weight.view(torch.int32) != own.view(torch.int32)).any() for _, weight, own in self._weights()
        ]
        if not flags:
            return
        names, changed = list(self.parameters), torch.stack(flags)

        def error(code: int) -> RuntimeError:
            return RuntimeError(
                f"parameter {names[code - 1]} was changed while windows are in flight, of which some were "
                "computed before the change: change parameters after list(trainer.run([])), or let the "
                "batches end at the step before the change"
            )

        places = torch.where(changed, torch.arange(len(names), device=changed.device), NONE)
        report(first_bad(places) if at_once or on_host(places) else places, None, error, error)

    def load(self, rows: Mapping[str, torch.Tensor]) -> None:
        """Load weights and state from another instance's `rows`; ValueError for other names or shapes."""
        self.in_flight.check("load")
        if rows.keys() != self._rows.keys():
            raise ValueError(f"expected rows of {sorted(self._rows)}, got {sorted(rows)}")
        for name, own in self._rows.items():
            if rows[name].shape != own.shape:
                raise ValueError(
                    f"{name}: expected rows of shape {tuple(own.shape)}, got "
                    f"{tuple(rows[name].shape)}; was it saved with another optimizer or model size?"
                )
        for name, own in self._rows.items():
            own.copy_(rows[name])
            self._write_parameter(name)
        self.in_flight.update = -1

    def _weights(self) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        """(name, the parameter as rows, the weights in this optimizer's rows)."""
        for name, parameter in self.parameters.items():
            weight = _as_rows(parameter.detach())
            yield name, weight, self._rows[name][:, : weight.shape[1]]

    def _read_parameters(self) -> None:
        """Copy the parameters' values into the rows."""
        for _, weight, own in self._weights():
            own.copy_(weight)

    def _write_parameter(self, name: str) -> None:
        parameter = self.parameters[name]
        columns = parameter.shape[-1] if parameter.dim() else 1
        with torch.no_grad():
            parameter.copy_(self._rows[name][:, :columns].reshape(parameter.shape))


def _as_rows(values: torch.Tensor) -> torch.Tensor:
    """(R, columns) values in the order of their indices: a copy where they are not contiguous."""
    return (
        values.reshape(math.prod(values.shape[:-1]), values.shape[-1])
        if values.dim()
        else values.reshape(1, 1)
    )
