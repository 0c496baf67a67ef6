"""How ops are registered: `torch.library.custom_op`, and derivatives that it leaves out without a word.

An op of torch's has reverse-mode derivatives outside of torch.func only: it drops a tangent silently, which
makes a wrong derivative, and torch.func.grad stops at the class torch generates. Here torch.func's reverse
transforms (grad, vjp, jacrev) work; an op that is `linear` in an argument maps that argument's tangent, and
every other op refuses one.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch._C._functorch import peek_interpreter_stack as innermost_transform
from torch._functorch.utils import enable_single_level_autograd_function
from torch._library.autograd import make_autograd_impl
from torch._library.custom_ops import CustomOpDef
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction

from tritonrec.kernels.arguments import not_a_tensor
from tritonrec.kernels.dispatch import plain_function


def custom_op(
    name: str, *, mutates_args: Iterable[str], schema: str | None = None, linear: str = ""
) -> Callable[[Callable[..., Any]], CustomOpDef]:
    """Decorator: register a function as the op `name`, as `torch.library.custom_op` does.

    The op and its fake kernel refuse tensors on two devices, and sparse ones.

    Args:
        linear: the argument in which the op is linear, so that its tangent goes the way of the argument.
    """

    def register(function: Callable[..., Any]) -> CustomOpDef:
        arguments: list[Any] = []  # of the schema

        def checked(inner: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(inner)
            def call(*inputs: Any, **named: Any) -> Any:
                _check_tensors(arguments, inputs, named)
                return inner(*inputs, **named)

            return call

        op = torch.library.custom_op(name, checked(function), mutates_args=mutates_args, schema=schema)
        arguments += op._opoverload._schema.arguments
        writes = [
            at for at, one in enumerate(arguments) if one.alias_info is not None and one.alias_info.is_write
        ]
        register_fake = op.register_fake

        def register_checked_fake(fake: Callable[..., Any]) -> Callable[..., Any]:
            register_fake(checked(fake))
            return fake

        op.register_fake = register_checked_fake  # type: ignore[method-assign]
        by_torch = make_autograd_impl(op._opoverload, op)

        def autograd(keyset: torch._C.DispatchKeySet, *inputs: Any) -> Any:
            for at in writes:
                _check_written(arguments[at].name, inputs[at])
            transformed = innermost_transform() is not None
            if not transformed and forward_ad._current_level < 0:
                return by_torch(keyset, *inputs)
            if tangents := _tangents(inputs):
                return _map_tangent(op, linear, inputs, tangents)
            if transformed and torch.is_grad_enabled() and torch._C._any_requires_grad(*inputs):
                return _step_of_transform(op, keyset, inputs)
            return by_torch(keyset, *inputs)

        with warnings.catch_warnings():  # of a kernel, torch's, that is replaced
            warnings.filterwarnings("ignore", "Warning only once for all operators")
            op._lib.impl(op._name, autograd, "Autograd", with_keyset=True, allow_override=True)
        return op

    return register


def _check_tensors(arguments: list[Any], inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
    """Refuse None for a tensor of the schema, a sparse tensor, and one that is not where the first is."""
    first: tuple[str, torch.device] | None = None
    for at, argument in enumerate(arguments):
        tensor = inputs[at] if at < len(inputs) else named.get(argument.name)
        if isinstance(tensor, torch.Tensor):
            if tensor.layout is not torch.strided:
                raise ValueError(f"{argument.name} is {tensor.layout}: give {argument.name}.to_dense()")
            if first is None:
                first = argument.name, tensor.device
            elif tensor.device != first[1]:
                raise ValueError(
                    f"{first[0]} is on {first[1]}, {argument.name} on {tensor.device}: move one of them"
                )
        elif argument.type.kind() == "TensorType":
            raise not_a_tensor(argument.name, tensor)


def _check_written(name: str, tensor: torch.Tensor | None) -> None:
    """Refuse a negated or conjugated view: torch hands the op a copy of it, and loses what is written."""
    if tensor is not None and (tensor.is_neg() or tensor.is_conj()):
        raise ValueError(f"{name} is written to and is a negated or conjugated view: give {name}.clone()")


def _tangents(inputs: tuple[Any, ...]) -> dict[int, torch.Tensor]:
    """By position; torch has one level, 0. None inside of a torch.autograd.Function, which has its own."""
    tensors = {at: value for at, value in enumerate(inputs) if isinstance(value, torch.Tensor)}
    found = {at: forward_ad.unpack_dual(value, level=0).tangent for at, value in tensors.items()}
    return {at: tangent for at, tangent in found.items() if tangent is not None}


def _map_tangent(
    op: CustomOpDef, linear: str, inputs: tuple[Any, ...], tangents: dict[int, torch.Tensor]
) -> torch.Tensor:
    names = [argument.name for argument in op._opoverload._schema.arguments]
    if [names[at] for at in tangents] == [linear]:
        ((at, tangent),) = tangents.items()
        before, after = inputs[:at], inputs[at + 1 :]
        out = op(*before, forward_ad.unpack_dual(inputs[at], level=0).primal, *after)
        if out.is_floating_point():
            return forward_ad.make_dual(out, op(*before, tangent, *after), level=0)
    given = ", ".join(names[at] for at in tangents)
    raise NotImplementedError(
        f"{op._qualname} has no forward-mode derivative, and {given} came with a tangent (torch.func.jvp, "
        f"jacfwd, torch.autograd.forward_ad): take reverse mode (torch.func.vjp, jacrev, backward), or give "
        f"it .detach()"
    )


def _step_of_transform(op: CustomOpDef, keyset: torch._C.DispatchKeySet, inputs: tuple[Any, ...]) -> Any:
    """What torch generates of `register_autograd`, as a step of the innermost transform alone."""
    schema = op._opoverload._schema.arguments
    inputs += tuple(argument.default_value for argument in schema[len(inputs) :])

    def forward(*given: Any) -> Any:
        # Transforms around this one differentiate too; steps of autograd begin with that turned off.
        below = torch._C._AutoDispatchBelowAutograd()
        with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True), below:
            return op._opoverload.redispatch(keyset & torch._C._after_autograd_keyset, *given)

    def refuse(ctx, *gradients):
        raise NotImplementedError(f"{op._qualname} has no derivative")

    save, backward = op._setup_context_fn or (lambda *_: None), op._backward_fn or refuse
    with enable_single_level_autograd_function():
        return plain_function(forward, save, backward, _SingleLevelFunction).apply(*inputs)
