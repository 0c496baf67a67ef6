"""Which implementation of an op runs: chosen by the caller, or by the device, never by accident."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache, partial
from typing import Any, Literal

import torch
from torch._library.custom_ops import OPDEFS
from torch.autograd import forward_ad

from .caches import prepare_triton

Impl = Literal["auto", "triton", "cpu", "reference"]
PLAIN: set[type] = {torch.Tensor, torch.nn.Parameter, type(None), int, str}
"""What ops on keys and rows are called with; a float for an int meets the registered op, which refuses it."""
PLAIN_NUMBERS: set[type] = PLAIN | {bool, float, list}


def on_host(tensor: torch.Tensor) -> bool:
    """Whether the host may look at the values; on an accelerator it would wait for all that is queued."""
    return tensor.is_cpu


def implementation(impl: Impl, tensor: torch.Tensor) -> str:
    """Name the implementation that runs for `tensor`: ``"triton"``, ``"cpu"`` or ``"reference"``.

    ``"auto"`` takes Triton on an accelerator and the CPU kernel on a CPU tensor. An explicit choice is
    honoured or refused, it never falls back: Triton on a CPU tensor needs ``TRITON_INTERPRET=1``, and the
    CPU kernel needs a CPU tensor.
    """
    on_cpu = tensor.is_cpu
    if not on_cpu and not torch.compiler.is_compiling():
        prepare_triton()
    if impl == "auto":
        return "cpu" if on_cpu else "triton"
    if impl == "triton" and on_cpu and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError(
            "impl='triton' on a CPU tensor runs in Triton's interpreter only: set TRITON_INTERPRET=1 before "
            "the first import of triton, or use impl='cpu'"
        )
    if impl == "cpu" and not on_cpu:
        raise ValueError(f"impl='cpu' needs a CPU tensor, got one on {tensor.device}")
    if impl not in ("triton", "cpu", "reference"):
        raise ValueError(f"impl must be 'auto', 'triton', 'cpu' or 'reference', got {impl!r}")
    return impl


def in_plain_eager(first: object, *others: object, plain: set[type] = PLAIN) -> bool:
    """Whether nobody but the op would see a call with these arguments: it may leave the dispatcher out.

    False where ops are traced, transformed or watched (torch.compile, export, a TorchDispatchMode or
    TorchFunctionMode, functorch, vmap, forward-mode derivatives, torch.jit, the profiler), for types outside
    `plain`, so for subclasses and symbolic sizes, and for tensors without values or with a pending negation
    or conjugation: those must meet the registered op.
    """
    if torch.compiler.is_compiling():  # a statement of its own: a compiler does not trace what is behind it
        return False
    return (
        plain.issuperset(map(type, (first, *others)))
        and torch._C._len_torch_dispatch_stack() == 0
        and torch._C._len_torch_function_stack() == 0
        and torch._C._functorch.peek_interpreter_stack() is None
        and forward_ad._current_level < 0
        and not torch._C._is_tracing()
        and not torch._C._autograd._profiler_enabled()
        and not torch.autograd.profiler._is_profiler_enabled  # one that another thread has started, for all
        and not any(map(_lazy, (first, *others)))
    )


def _lazy(argument: object) -> bool:
    """Whether a tensor's memory does not hold its values, in their order."""
    return isinstance(argument, torch.Tensor) and (
        argument.is_meta
        or argument.layout is not torch.strided
        or argument.is_neg()
        or argument.is_conj()
        or argument._is_zerotensor()
        or torch._C._functorch.is_legacy_batchedtensor(argument)
    )


def written(*tensors: torch.Tensor | None) -> None:
    """Tell autograd that a call outside of the dispatcher writes into these, as the registered op would."""
    torch.autograd.graph.increment_version([tensor for tensor in tensors if tensor is not None])


def plain_function(
    forward: Callable[..., Any],
    save: Callable[..., None],
    backward: Callable[..., Any],
    base: type = torch.autograd.Function,
) -> Any:
    """What ``register_autograd(backward, setup_context=save)`` generates of an op, for `in_plain_eager`."""

    class Plain(base):
        @staticmethod
        def forward(ctx, *inputs):
            out = forward(*inputs)
            save(ctx, inputs, out)
            return out

    Plain.backward = staticmethod(backward)
    return Plain


class Registered:
    """``torch.ops.tritonrec``, without the dispatcher where that shows nowhere.

    For steps of autograd that call ops and differentiate by themselves (`torch.autograd.Function`): with
    gradients enabled, or not `in_plain_eager`, a call is that of the registered op. Arguments are all of the
    op's schema, in its order.
    """

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):  # what Python asks objects for
            raise AttributeError(name)
        if not torch.compiler.is_compiling():  # which traces no look at what is registered
            getattr(torch.ops.tritonrec, name)  # the error of a name that is not
        return partial(_run, name)

    def __dir__(self) -> list[str]:
        return sorted(name.removeprefix("tritonrec::") for name in OPDEFS if name.startswith("tritonrec::"))


def _run(name: str, *arguments: Any) -> Any:
    op = getattr(torch.ops.tritonrec, name)
    if torch.is_grad_enabled() or not in_plain_eager(*arguments, plain=PLAIN_NUMBERS):
        return op(*arguments)
    body, mutated = _definition(name)
    written(*(arguments[i] for i in mutated))
    return body(*arguments)


@cache
def _definition(name: str) -> tuple[Callable[..., Any], list[int]]:
    """The body of a registered op, and which of its arguments it writes to."""
    op = OPDEFS[f"tritonrec::{name}"]
    arguments = enumerate(op._opoverload._schema.arguments)
    return op._init_fn, [i for i, one in arguments if one.alias_info is not None and one.alias_info.is_write]
