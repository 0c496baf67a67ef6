"""Gradient sums that are the same however a batch is cut: int64 fixed-point sums beside the parameters."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from tritonrec.kernels.dispatch import is_compiling
from tritonrec.kernels.fixed_point.errors import FRACTION_BITS
from tritonrec.kernels.gradients import Accumulator, Targets, Terms


class GradientAccumulator(Accumulator):
    """Sums of the gradients of a module's parameters, over the backward passes until `take`.

    Inside of `active`, ops go by this accumulator: the terms of a parameter's gradient are added here, and
    ``parameter.grad`` stays empty. They also leave torch's dispatcher out, which costs a small batch more
    than the kernels do; so a trainer has one for float32 gradients too.

    Args:
        module: its parameters, as they are now.
        fraction_bits: sums are int64 multiples of ``2**-fraction_bits``; None: float32, in ``.grad``.

    Attributes:
        sums: by parameter name, of the parameter's shape, int64; of float32 ones those of `rows` alone.
        scale_exponent: see `Accumulator`. It stays the same from one `take` to the next.

    Example::

        accumulator = GradientAccumulator(model)
        with accumulator.active():
            model(batch, rows, seed).sum().backward()
        gradients = {name: ops.from_fixed_point(sums) for name, sums in accumulator.take().items()}
    """

    def __init__(self, module: torch.nn.Module, fraction_bits: int | None = FRACTION_BITS):
        self.fraction_bits, self.scale_exponent = fraction_bits, 0
        self._parameters = dict(module.named_parameters())
        self._trained = {name: each for name, each in self._parameters.items() if each.requires_grad}
        exact = {} if fraction_bits is None else self._trained
        # By id: `_parameters` keeps the tensors, so no other tensor gets one of these ids.
        self._names = {id(parameter): name for name, parameter in exact.items()}
        size = sum(parameter.numel() for parameter in exact.values())
        device = next((parameter.device for parameter in exact.values()), None)
        # All sums lie in one tensor, in the module's order: one message, one zeroing, one division a window.
        self._flat = torch.zeros(size, dtype=torch.int64, device=device)
        self.sums = self.views(self._flat) if exact else {}

    @contextmanager
    def empty_gradients(self) -> Iterator[None]:
        """Inside, ``.grad`` of every parameter starts as None; afterwards it is the one of before."""
        before = [(parameter, parameter.grad) for parameter in self._parameters.values()]
        try:
            for parameter, _ in before:
                parameter.grad = None
            yield
        finally:
            for parameter, gradient in before:
                parameter.grad = gradient

    @contextmanager
    def rows(self, values: Sequence[torch.Tensor], sums: Sequence[torch.Tensor], name: str) -> Iterator[None]:
        """Inside, terms of the gradients of `values` (R, D) are added to `sums` of the same shapes.

        These are int64, or float32 for float32 sums: in the order in which backward gives the terms.

        Args:
            name: of each, for errors.
        """
        names = {id(each): f"{name} {number}" for number, each in enumerate(values)}
        self._names |= names
        self.sums |= dict(zip(names.values(), sums, strict=True))
        try:
            yield
        finally:
            for place, each in names.items():
                del self._names[place], self.sums[each]

    def begin_window(self) -> None:
        """From here to the next `take` no parameter changes, and kernels lay out each once."""
        self.of_window = {}
        self.addresses = frozenset(parameter.data_ptr() for parameter in self._parameters.values())

    def holds(self, tensor: Any) -> bool:
        """Whether this is a parameter with an exact sum here, or of `rows`."""
        return id(tensor) in self._names

    def held(self, inputs: tuple[Any, ...]) -> dict[int, Any]:
        """The inputs that it `holds`, by place."""
        names = self._names
        if not names:
            return {}
        # A graph of torch.compile holds for the ids that it has asked for: of none that a batch brings anew.
        if is_compiling():
            inputs = tuple(each if isinstance(each, torch.nn.Parameter) else None for each in inputs)
        return {at: each for at, each in enumerate(inputs) if id(each) in names}

    def add(self, parameter: torch.Tensor, terms: Terms) -> None:
        """Add the terms of the gradient of a parameter that it `holds`.

        Raises RuntimeError in a backward pass that is to be differentiated again.
        """
        if self.fraction_bits is None:
            terms.add_in_order(self.sums[self._names[id(parameter)]], self.scale_exponent)
            return
        (sums,), fraction_bits, (name,) = self.targets(parameter)
        terms.add_to(sums, fraction_bits, name)

    def targets(self, *parameters: torch.Tensor) -> Targets:
        """Where kernels add the terms of parameters with exact sums; RuntimeError as `add`."""
        names = [self._names[id(parameter)] for parameter in parameters]
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"the gradient of {names[0]} is summed exactly and has no derivative: leave create_graph "
                "out, or use consistency='window'"
            )
        assert self.fraction_bits is not None
        # round(g * 2**e * 2**(bits - e)) = round(g * 2**bits): the grid moves instead of the gradient
        bits = self.fraction_bits - self.scale_exponent
        return Targets(tuple(self.sums[name] for name in names), bits, names)

    def take(self) -> dict[str, torch.Tensor]:
        """Sums by name, of the parameters that require a gradient, and start again from zero.

        Raises TypeError for a parameter that has an ordinary gradient beside an exact sum.
        """
        return self.views(self.take_flat())

    def take_flat(self, names: Collection[str] | None = None, over: bool = True) -> torch.Tensor:
        """`take` as one tensor (S,): the sums of all parameters, or of those, one after the other.

        Args:
            over: so is the window.
        """
        if over:
            self.of_window = None
        chosen = self._chosen(names)
        if self.fraction_bits is None:
            gradients = [
                torch.zeros(each.shape, dtype=each.dtype, device=each.device)
                if each.grad is None
                else each.grad
                for each in chosen.values()
            ]
            for parameter in self._parameters.values() if names is None else chosen.values():
                parameter.grad = None
            if not gradients:
                return self._flat[:0].float()
            flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
            return flat * 2.0**-self.scale_exponent if self.scale_exponent else flat
        for name, parameter in self._parameters.items():
            if parameter.grad is not None:
                raise TypeError(
                    f"parameter {name} got an ordinary float32 gradient, whose sum depends on the batch's "
                    "cut; batch consistency needs it from a module of tritonrec.nn, or use "
                    "consistency='window'"
                )
        every, wanted = list(self._trained), list(chosen)
        first = every.index(wanted[0]) if wanted else 0
        if every[first : first + len(wanted)] == wanted:  # all, or some that lie together
            begin, size = (sum(self._trained[name].numel() for name in of) for of in (every[:first], wanted))
            part = self._flat[begin : begin + size]
            taken = part.clone()
            part.zero_()
            return taken
        sums = [self.sums[name].view(-1) for name in chosen]
        taken = torch.cat(sums) if sums else self._flat[:0].clone()
        for each in sums:
            each.zero_()
        return taken

    def so_far(self) -> torch.Tensor:
        """(S,) a copy of the sums of all parameters that require a gradient, laid out as `take_flat`.

        Float32 sums are those of a scaled loss.
        """
        if self.fraction_bits is not None:
            return self._flat.clone()
        parts = [
            torch.zeros_like(each, dtype=torch.float32) if each.grad is None else each.grad
            for each in self._trained.values()
        ]
        return torch.cat([part.detach().reshape(-1) for part in parts]) if parts else self._flat[:0].float()

    def views(self, flat: torch.Tensor, names: Collection[str] | None = None) -> dict[str, torch.Tensor]:
        """By name the parts of `flat` (S,), which is laid out as `take_flat`, in the parameters' shapes.

        They are contiguous, whatever a parameter's order in memory.
        """
        chosen = self._chosen(names)
        sizes = [parameter.numel() for parameter in chosen.values()]
        parts = zip(chosen.items(), torch.split(flat, sizes), strict=True)
        return {name: part.view(parameter.shape) for (name, parameter), part in parts}

    def _chosen(self, names: Collection[str] | None) -> dict[str, torch.nn.Parameter]:
        """The trained parameters, or those of `names`, in the module's order."""
        if names is None:
            return self._trained
        return {name: parameter for name, parameter in self._trained.items() if name in names}

    def name_at(self, position: int, names: Collection[str] | None = None) -> str:
        """The parameter at a position of `take_flat`, with the index in it."""
        left = position
        for name, parameter in self._chosen(names).items():
            # The inverse of `views`: parameters lie one after another, in the module's order.
            if left < parameter.numel():
                index = torch.unravel_index(
                    torch.tensor(left, dtype=torch.int64, device="cpu"), parameter.shape
                )
                return f"{name}: gradient at {tuple(int(each) for each in index)}"
            left -= parameter.numel()
        raise IndexError(f"position {position} is behind the last parameter")
