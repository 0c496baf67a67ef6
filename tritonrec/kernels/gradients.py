"""Gradients of parameters before they are summed, and who sums them.

A sum of float32 gradients depends on its order, and so on which samples share a micro-batch. The derivative
of an op therefore gives the gradient of a parameter as `Terms`, one for each token or sample. Autograd gets
their float32 total, unless an `Accumulator` is active on the thread and holds the parameter: the exact one
(`kernels.accumulator`) rounds each term once to fixed point and adds integers, whose sum has no order.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import torch
from torch.utils.weak import WeakIdKeyDictionary

_of_thread = threading.local()
Value = TypeVar("Value")


class Terms:
    """The gradient of a parameter, not yet summed over tokens or samples."""

    def total(self) -> torch.Tensor:
        """The float32 sum, for autograd."""
        raise NotImplementedError

    def add_to(self, sums: torch.Tensor, fraction_bits: int, name: str) -> None:
        """Round each term and add it to int64 `sums` of the parameter's shape.

        Raises `ExactSumError`, which calls the parameter `name`.
        """
        raise NotImplementedError

    def add_in_order(self, sums: torch.Tensor, scale_exponent: int = 0) -> None:
        """Add the terms to float32 `sums` one after the other, each times ``2**-scale_exponent``."""
        raise NotImplementedError


class Targets(NamedTuple):
    """Where an accumulator adds the terms of some parameters, for kernels that sum what they compute."""

    sums: tuple[torch.Tensor, ...]  # int64, of the parameters' shapes
    fraction_bits: int
    names: list[str]  # of the parameters, for errors


class Accumulator:
    """Takes terms in autograd's place; see `kernels.accumulator.GradientAccumulator`.

    Attributes:
        scale_exponent: gradients come ``2**scale_exponent`` times too large, from a scaled loss; sums are
            those of unscaled ones.
        addresses: of the parameters.
        of_window: what kernels made of them, while they are frozen; None outside of a window.
        complete: called, if anybody asks, with parameters whose terms have all come, by an op that goes on to
            others. Autograd tells of ops that take a parameter as an input.
    """

    scale_exponent: int = 0
    addresses: frozenset[int] = frozenset()
    of_window: dict[Hashable, tuple[int, Any]] | None = None
    complete: Callable[[Iterable[torch.Tensor | None]], None] | None = None

    def holds(self, tensor: Any) -> bool:
        """Whether this is a parameter whose terms are added here."""
        raise NotImplementedError

    def held(self, inputs: tuple[Any, ...]) -> dict[int, Any]:
        """The inputs that it `holds`, by place."""
        raise NotImplementedError

    def add(self, parameter: torch.Tensor, terms: Terms) -> None:
        """Add the terms of the gradient of a parameter that it `holds`."""
        raise NotImplementedError

    def targets(self, *parameters: torch.Tensor) -> Targets:
        """Where to add the terms of parameters that it `holds`, in their order."""
        raise NotImplementedError

    @contextmanager
    def active(self) -> Iterator[None]:
        """Inside, on this thread, gradients of the parameters that it holds go here.

        Backward stays on this thread, where autograd would take one of its own for an accelerator: a
        checkpointed part of a model computes its forward again in backward, and must find the accumulator.

        What ops find out about offsets is `remembered` until the end. An accelerator's work inside has to go
        to one stream.
        """
        before = current(), getattr(_of_thread, "memory", None)
        _of_thread.accumulator, _of_thread.memory = self, {}
        try:
            with torch.autograd.set_multithreading_enabled(False):
                yield
        finally:
            _of_thread.accumulator, _of_thread.memory = before


def current() -> Accumulator | None:
    """The accumulator that is active on this thread."""
    return getattr(_of_thread, "accumulator", None)


def remembered(tensor: torch.Tensor, key: Hashable, find: Callable[[], Value]) -> Value:
    """What `find` gives, which is a function of the tensor's values and `key`.

    While an accumulator is active on this thread it is called once, unless the tensor changes: the layers of
    a model, and their backward, need the same of one batch's offsets.
    """
    memory = getattr(_of_thread, "memory", None)
    if memory is None or tensor.is_inference():  # which counts no versions
        return find()
    known = memory.get((id(tensor), key))
    if known is None or known[1] != tensor._version:
        # the tensor is kept, so that no other one gets its id
        memory[id(tensor), key] = known = tensor, tensor._version, find()
    return known[2]


_KEPT: Any = WeakIdKeyDictionary()  # of frozen parameters, what was made of each


def keep_made(parameters: Iterable[torch.Tensor]) -> None:
    """Keep what `made_once` makes of these as long as they live: weights of a program that is served."""
    for each in parameters:
        _KEPT.setdefault(each, {})


def made_once(parameter: torch.Tensor, make: Callable[[torch.Tensor], Value]) -> Value:
    """What `make` gives for a parameter or a view of one.

    Inside of a window, whose micro-batches share frozen parameters, it is called for the first one of them;
    outside for each call, but for parameters of `keep_made`.
    """
    accumulator = current()
    if accumulator is None and _KEPT and not parameter.is_inference():
        owner = parameter if parameter._base is None else parameter._base
        made = _KEPT.get(owner)
        if made is not None:
            view = make, parameter.data_ptr(), parameter.shape, parameter.stride()
            found = made.get(view)
            if found is None or found[0] != parameter._version:
                value: Any = make(parameter)
                found = parameter._version, value
                # the parameter's own memory would keep it alive for good
                if getattr(value, "ctypes", None) is None or value.ctypes.data != view[1]:
                    made[view] = found
            return found[1]
    known = None if accumulator is None else accumulator.of_window
    if known is None or parameter.is_inference() or parameter.data_ptr() not in accumulator.addresses:  # type: ignore[union-attr]
        return make(parameter)
    # By memory and not by object: views of a parameter are made anew at each call.
    place = make, parameter.data_ptr(), parameter.shape, parameter.stride()
    found = known.get(place)
    if found is None or found[0] != parameter._version:
        known[place] = found = parameter._version, make(parameter)
    return found[1]


def sum_terms(
    accumulator: Accumulator | None, parameter: torch.Tensor | None, terms: Terms
) -> torch.Tensor | None:
    """The gradient of `parameter` for autograd: the total, or None where the accumulator takes the terms."""
    if accumulator is None or parameter is None or not accumulator.holds(parameter):
        return terms.total()
    accumulator.add(parameter, terms)
    return None


def targets_of(accumulator: Accumulator | None, *parameters: torch.Tensor | None) -> Targets | None:
    """Where kernels add the gradients of these float32 parameters.

    None where autograd takes one of them, or where two are one: a kernel adds to each sum once.
    """
    if accumulator is None:
        return None
    held = [each for each in parameters if each is not None and accumulator.holds(each)]
    fit = len({id(each) for each in held}) == len(parameters) and all(
        each.dtype == torch.float32 for each in held
    )
    return accumulator.targets(*held) if fit else None


def note_parameters(ctx: Any, inputs: tuple[Any, ...]) -> None:
    """For `finish`: the accumulator of this thread, and which of the inputs it holds, by place.

    Tensors saved for backward may be other objects.
    """
    ctx.accumulator = accumulator = current()
    ctx.parameters = {} if accumulator is None else accumulator.held(inputs)


def finish(ctx: Any, gradients: Any) -> tuple[torch.Tensor | None, ...]:
    """What an op's derivative returned, as autograd takes it: terms are summed for those who need them."""
    found = []
    for at, gradient in enumerate(gradients if isinstance(gradients, tuple) else (gradients,)):
        if isinstance(gradient, Terms):
            needed = ctx.needs_input_grad[at]
            gradient = sum_terms(ctx.accumulator, ctx.parameters.get(at), gradient) if needed else None
        found.append(gradient)
    return tuple(found)
