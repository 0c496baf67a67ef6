"""One record per op: its schema, implementations, fake kernel and derivative, registered with torch.

An op's folder has three kinds of files, and one line of `tritonrec.ops` offers it::

    op.py         the public function, the reference (a loop that a reader can check by eye), and the record
                  below with its checks, fake kernel and derivative
    numba_*.py    the CPU
    triton_*.py   accelerators

Three ways to call a record, all with the arguments of its schema in their order. The first and the last fill
in None for optional tensors that are left out at the end:

- ``INTERSECT(left, right, impl="auto")`` is the op that users get: registered with torch, checked, and with
  its derivative. torch.compile, export, FakeTensor, torch.func and the profiler see it.
- ``torch.ops.tritonrec.intersect(left, right, "auto")`` is the same without the derivative.
- ``INTERSECT.launch(left, right, impl="auto")`` is the implementation alone, without torch's dispatcher, for
  callers inside the package (`kernels.launch`) whose tensors are plain and fit by construction.

A call takes one of four ways. Two go round the dispatcher, which costs more than a small op::

                                                       no gradient      a gradient is wanted
    plain tensors and no mode (`_is_plain`), or a
    trainer's accumulator (`kernels.gradients`)        `launch`         `_step`
    torch.compile, export, fake or other tensors,
    a profiler, torch.func                             `registered`     `_function`, around `registered`

All four check, and end in `_run`; `_step` and `_function` share the op's `save` and `backward`. An op that
writes has no `_step`, and in the second row every op of floats takes `_function` while grad mode is on.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cache, partial
from operator import itemgetter
from typing import Any

import torch
from torch.autograd import forward_ad, profiler
from torch.autograd.forward_ad import unpack_dual

from tritonrec.kernels.arguments import check_finite, check_tensors, not_a_tensor
from tritonrec.kernels.autocast import (
    Casts,
    autocast_dtype,
    cast,
    casts_of,
    is_low,
    run_widened,
    without_autocast,
)
from tritonrec.kernels.dispatch import Impl, default_impl, implementation, imported, is_compiling, use_impl
from tritonrec.kernels.gradients import current, finish, note_parameters
from tritonrec.kernels.overlap import check_no_overlap

_annotated = False
_NOTHING = nullcontext()


@contextmanager
def annotated_launches() -> Iterator[None]:
    """Inside, in all threads, torch's profiler sees launches as it sees registered ops, by name."""
    global _annotated
    _annotated = True
    try:
        yield
    finally:
        _annotated = False


def annotation(name: str) -> AbstractContextManager[Any]:
    """Around a launch: torch's profiler sees it as ``tritonrec::name`` inside of `annotated_launches`."""
    return torch.profiler.record_function(f"tritonrec::{name}") if _annotated else _NOTHING


_PLAIN = torch.Tensor, torch.nn.Parameter
OPS: dict[str, Op] = {}
"""Every record by its name, for tests and tools."""


class Op:
    """A registered op of the namespace ``tritonrec``.

    Args:
        schema: ``"name(Tensor a, Tensor? b, int c) -> (Tensor, Tensor)"`` as torch.library takes it, without
            `impl`, which is added as the last argument. Implementations repeat no types of it. An argument
            that is written to is marked ``Tensor(a!)``. An op that writes and is differentiable returns
            ``()``. torch parses it.
        reference: the plain implementation. It takes the schema's arguments, and so do the others.
        cpu, triton: ``"module:function"`` beside `reference`, imported when they run.
        over: an op that writes what this one returns, in place of `cpu` and `triton`: `reference` makes the
            tensors, and is called with that op's implementation before the arguments.
        fake: outputs of the right shapes and dtypes, without values; by default none.
        check: one function or several, which raise for arguments that do not fit each other: shapes, dtypes,
            ranges of numbers. They run in the op and in the fake kernel, so they read no tensor's values.
        check_memory: raises where an implementation would leave memory: row numbers out of range. It runs
            before every implementation, also of `launch`, and after a check that no written argument shares
            memory with another one.
        save: ``save(ctx, inputs, output)``, as `torch.autograd.Function.setup_context`; impl ends `inputs`.
        backward: ``backward(ctx, *gradients)`` returns a gradient, its `Terms` or None for each argument
            of the schema. An op that writes gets the gradients of the written arguments, in their order.
        autocast: the rule of each argument that ``torch.autocast`` casts, by name (`kernels.autocast`).
        widens: the CPU's implementation and the reference compute in float32 alone; in bfloat16 and float16
            they get widened arguments, and their results are rounded to the dtypes that `fake` gives.
        options: keyword arguments of every implementation, for ops that share their implementations.

    Callbacks (`fake`, `check`, `check_memory`) receive arguments by parameter name; ``*rest`` gets all that
    come after the named ones in the schema. So ops with the same arguments share a check.
    """

    def __init__(
        self,
        schema: str,
        *,
        reference: Callable[..., Any],
        cpu: str = "",
        triton: str = "",
        over: Op | None = None,
        fake: Callable[..., Any] | None = None,
        check: Callable[..., None] | tuple[Callable[..., None], ...] = (),
        check_memory: Callable[..., None] | None = None,
        save: Callable[..., None] | None = None,
        backward: Callable[..., Any] | None = None,
        autocast: dict[str, str] | None = None,
        widens: bool = False,
        **options: Any,
    ):
        parsed = torch._C.parse_schema(f"tritonrec::{schema}")
        self.name = parsed.name.removeprefix("tritonrec::")
        self._options, self._over = options, over
        self._reference, package = reference, reference.__module__.rpartition(".")[0]
        self._places = {"cpu": f"{package}.{cpu}".split(":"), "triton": f"{package}.{triton}".split(":")}
        parameters = [_Parameter(each) for each in parsed.arguments]
        self._tensors = [(at, each) for at, each in enumerate(parameters) if each.is_tensor]
        self._numbers = [(at, each.kind) for at, each in enumerate(parameters) if not each.is_tensor]
        self._written = [(at, each) for at, each in self._tensors if each.is_written]
        self._read = [(at, each) for at, each in self._tensors if not each.is_written]
        self._first = self._tensors[0][0]
        self._size = len(parameters)
        optional = tuple(each.name for _, each in self._tensors if each.is_optional)
        names = [each.name for each in parameters]
        checks = [_selecting(each, names) for each in (check if isinstance(check, tuple) else (check,))]
        if floats := [(at, each.name) for at, each in enumerate(parameters) if each.kind is float]:
            checks.append(lambda arguments: check_finite(**{name: arguments[at] for at, name in floats}))
        outputs = None if fake is None else _selecting(fake, names)
        self.autocast = autocast or {}
        self._rules = [(names.index(name), rule) for name, rule in self.autocast.items()]
        self._outputs = outputs
        self._widened = [at for at, _ in self._tensors] if widens else []
        self._check_memory = None if check_memory is None else _selecting(check_memory, names)

        def check_all(arguments: tuple[Any, ...]) -> None:
            for each in checks:
                each(arguments)

        self._optional = optional
        self._check = checks[0] if len(checks) == 1 else check_all

        def body(*inputs: Any) -> Any:
            self._check_tensors(inputs)
            self._check(inputs[:-1])
            return self._run(inputs[:-1], inputs[-1])

        def fake_kernel(*inputs: Any) -> Any:
            self._check_tensors(inputs)
            self._check(inputs[:-1])
            return None if outputs is None else outputs(inputs[:-1])

        # of a number that differs from call to call torch.compile makes one graph, not one a number
        arguments = schema.removeprefix(self.name).replace("int ", "SymInt ")
        torch.library.custom_op(
            f"tritonrec::{self.name}",
            body,
            mutates_args=[each.name for _, each in self._written],
            device_types=(),
            schema=arguments.replace(") ->", ", str impl) ->"),
        ).register_fake(fake_kernel)
        torch.library.impl(f"tritonrec::{self.name}", "default", _untraced(body))
        self.registered = getattr(torch.ops.tritonrec, self.name)
        self.has_derivative = backward is not None
        self._function = _function(self.registered, self._written, save, backward)
        self._step = None if backward is None or self._written else _step(self, save, backward)
        # `Function.apply` looks for transforms of torch.func first: plain tensors have none
        base: Any = None if self._step is None else super(torch.autograd.Function, self._step)
        self._step_plain = base and base.apply
        # torch.compile tells by this signature that `forward` takes no context
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        signature = inspect.Signature([inspect.Parameter(name, kind) for name in [*names, "impl"]])
        self._function.forward.__signature__ = signature  # type: ignore[attr-defined]
        OPS[self.name] = self

    def __call__(self, *arguments: Any, impl: Impl = "auto") -> Any:
        """The registered op with its derivative.

        Raises:
            TypeError: an argument that has to be a tensor is none.
            ValueError: tensors on two devices, or sparse ones; a negated or conjugated view that is written
                to; arguments that the op's own checks refuse.
            RuntimeError: the op writes to floats and has no derivative, and an argument requires a gradient.
            NotImplementedError: an argument has a tangent. No op has a forward-mode derivative.
        """
        arguments += (None,) * (self._size - len(arguments))
        if is_compiling():
            return self._dispatched(arguments, impl)
        if impl == "auto":
            impl = default_impl()  # the derivative gets it too, which may run on another thread
        plain, accumulator = self._is_plain(arguments), current()
        if not plain:
            if accumulator is None:
                return self._dispatched(arguments, impl)
            self._refuse(arguments)
        # plain ones of the host are strided, and on one device
        if not (plain and arguments[self._first].is_cpu):
            self._check_tensors(arguments)
        casts = self._casts(arguments)
        if not (torch.is_grad_enabled() and self._requires_grad(arguments)):
            arguments = cast(arguments, casts)
            self._check(arguments)
            return self._launch(arguments, impl)
        if self._step is None:
            return self._dispatched(arguments, impl)
        if casts and accumulator is None:
            arguments, casts = cast(arguments, casts), ()
        return (self._step_plain if plain else self._step.apply)(*arguments, impl, casts)

    def _dispatched(self, arguments: tuple[Any, ...], impl: Impl) -> Any:
        """`__call__` by torch's dispatcher."""
        has_floats = self._refuse(arguments)
        arguments = cast(arguments, self._casts(arguments))
        if has_floats and torch.is_grad_enabled():
            if self._written:
                self._refuse_gradients(arguments)
            # torch.compile traces `backward` with the call, also one that raises
            if self.has_derivative or not is_compiling():
                return self._function.apply(*arguments, impl)
        return self.registered(*arguments, impl)

    def launch(self, *arguments: Any, impl: Impl = "auto") -> Any:
        """The implementation that `impl` names, without `check`, derivative and dispatcher.

        While torch traces a graph it is the registered op, which has a fake kernel.
        """
        arguments += (None,) * (self._size - len(arguments))
        if is_compiling():
            return self.registered(*arguments, impl)
        return self._launch(arguments, impl)

    def _launch(self, arguments: tuple[Any, ...], impl: Impl) -> Any:
        # As the dispatcher would, autograd is told: backward may have kept an old value.
        for at, _ in self._written:
            if arguments[at] is not None:
                torch.autograd.graph.increment_version(arguments[at])
        if _annotated:
            with annotation(self.name):
                return self._run(arguments, impl)
        return self._run(arguments, impl)

    def _is_plain(self, arguments: tuple[Any, ...]) -> bool:
        """Whether the dispatcher would do nothing but call: autograd alone looks on, and all types are exact.

        There is no mode, trace or profiler, and no tensor but plain ones: no subclass, none of torch.func,
        none that is negated lazily, of inference or meta. A number of another type the dispatcher judges.
        """
        if (
            torch._C._len_torch_dispatch_stack()
            or torch._C._len_torch_function_stack()
            or torch._C._functorch.peek_interpreter_stack() is not None
            or torch._C._get_tracing_state() is not None
            or profiler._is_profiler_enabled
            or forward_ad._current_level >= 0
            or type(arguments[self._first]) not in _PLAIN
        ):
            return False
        plain = _plain_keys(arguments[self._first].device.type)
        if plain is None:
            return False
        for at, kind in self._numbers:
            if type(arguments[at]) is not kind:
                return False
        for at, parameter in self._tensors:
            tensor = arguments[at]
            if tensor is None:
                if not parameter.is_optional:
                    return False
            elif type(tensor) not in _PLAIN or torch._C._dispatch_keys(tensor) != plain:
                return False
        return True

    def _requires_grad(self, arguments: tuple[Any, ...]) -> bool:
        return any(arguments[at] is not None and arguments[at].requires_grad for at, _ in self._tensors)

    def _check_tensors(self, arguments: tuple[Any, ...]) -> None:
        check_tensors(self._optional, **{each.name: arguments[at] for at, each in self._tensors})

    def _casts(self, arguments: tuple[Any, ...]) -> Casts:
        return casts_of(self._rules, arguments, arguments[self._first].device) if self._rules else ()

    def _run(self, arguments: tuple[Any, ...], impl: Impl) -> Any:
        chosen = implementation(impl, arguments[self._first])
        if self._written:
            written = {each.name: arguments[at] for at, each in self._written}
            check_no_overlap(written, {each.name: arguments[at] for at, each in self._read})
        if self._check_memory is not None:
            self._check_memory(arguments)
        if self._widened and chosen != "triton" and is_low(arguments, self._widened):
            like = None if self._outputs is None else self._outputs(arguments)
            function = partial(self._implementation(chosen), **self._options)
            return run_widened(function, arguments, like, [at for at, _ in self._written])
        return self._implementation(chosen)(*arguments, **self._options)

    def _implementation(self, chosen: str) -> Callable[..., Any]:
        if self._over is not None:
            return partial(self._reference, self._over._implementation(chosen))
        if chosen == "reference":
            return self._reference
        name, function = self._places[chosen]
        return getattr(imported(name), function)

    def _refuse(self, arguments: tuple[Any, ...]) -> bool:
        """Refuse arguments that the dispatcher would not, or not clearly; whether any are floats."""
        has_floats = False
        for at, parameter in self._tensors:
            tensor = arguments[at]
            if tensor is None and parameter.is_optional:
                continue
            name = parameter.name
            if not isinstance(tensor, torch.Tensor):
                raise not_a_tensor(name, tensor)
            # The dispatcher would hand the op a copy, and lose its new values; torch.compile does not.
            # (It knows no is_neg, so it is asked first.)
            eager = parameter.is_written and not is_compiling()
            if eager and (tensor.is_neg() or tensor.is_conj()):
                raise ValueError(
                    f"{name} is written to and is a negated or conjugated view: give {name}.clone()"
                )
            if tensor.is_floating_point():
                has_floats = True
                # A custom op drops tangents without a word, and so does a compiled autograd.Function.
                if unpack_dual(tensor).tangent is not None:
                    raise NotImplementedError(
                        f"tritonrec::{self.name} has no forward-mode derivative, and {name} came with a "
                        f"tangent (torch.func.jvp, jacfwd, torch.autograd.forward_ad): take reverse mode "
                        f"(torch.func.vjp, jacrev, backward), or give it .detach()"
                    )
        return has_floats

    def _refuse_gradients(self, arguments: tuple[Any, ...]) -> None:
        """A tensor that is written in place would keep the graph it had before: a wrong derivative.

        An op with a derivative extends the graph of a written tensor, and a leaf has none. Integers have no
        derivative: an op that writes to them alone takes an argument that requires a gradient.
        """
        if self.has_derivative:
            for at, each in self._written:
                if arguments[at].is_leaf and arguments[at].requires_grad:
                    raise RuntimeError(
                        f"{each.name} is a leaf that requires a gradient: give {each.name}.clone(), or call "
                        f"under torch.no_grad()"
                    )
            return
        given = [(each.name, arguments[at]) for at, each in self._tensors if arguments[at] is not None]
        traced = [name for name, tensor in given if tensor.requires_grad]
        if traced and any(
            arguments[at] is not None and arguments[at].is_floating_point() for at, _ in self._written
        ):
            raise RuntimeError(
                f"tritonrec::{self.name} writes to {', '.join(each.name for _, each in self._written)} and "
                f"has no derivative, and {', '.join(traced)} requires a gradient: call it under "
                f"torch.no_grad(), or with .detach()"
            )


@cache
def _plain_keys(device: str) -> Any:
    """The dispatch keys of a plain tensor on a device of this type; None where fake kernels are needed."""
    if device == "meta":
        return None
    with torch.inference_mode(False):  # the first call may be one of serving
        return torch._C._dispatch_keys(torch.empty(0, dtype=torch.float32, device=device))


def _selecting(function: Callable[..., Any], names: list[str]) -> Callable[[tuple[Any, ...]], Any]:
    """`function` of a schema's arguments, of which it takes those that its parameters name."""
    at, takes_rest = {}, False
    parameters = inspect.signature(function).parameters
    for each in parameters.values():
        if each.kind is each.VAR_POSITIONAL:
            takes_rest = True
        elif each.name in names:
            at[each.name] = names.index(each.name)
        elif each.default is each.empty:
            raise TypeError(f"{function.__name__} takes {each.name!r}; the schema has {', '.join(names)}")
    if takes_rest:
        first = 1 + max(at.values())
        return lambda inputs: function(*(inputs[place] for place in at.values()), *inputs[first:])
    if not at or [*at] != [*parameters][: len(at)]:  # a default stands between them
        return lambda inputs: function(**{name: inputs[place] for name, place in at.items()})
    if len(at) == 1:
        (only,) = at.values()
        return lambda inputs: function(inputs[only])
    # The fastest of four ways that Python has, since it runs at every call of a small op.
    chosen = itemgetter(*at.values())
    return lambda inputs: function(*chosen(inputs))


def _untraced(body: Callable[..., Any]) -> Callable[..., Any]:
    """`body`, which dynamo does not trace where it is loaded.

    `custom_op` registers kernels that import torch._dynamo at their first call, for more than a second.
    """
    disabled: Callable[..., Any] | None = None

    def kernel(*inputs: Any) -> Any:
        nonlocal disabled
        if "torch._dynamo" not in sys.modules:
            return body(*inputs)
        if disabled is None:
            disabled = torch.compiler.disable(body)
        return disabled(*inputs)

    return kernel


def _function(
    registered: Any,
    written: list[tuple[int, _Parameter]],
    save: Callable[..., None] | None,
    backward: Callable[..., Any] | None,
) -> type[torch.autograd.Function]:
    """The op as a step of autograd, also of torch.func, which takes only a step with `setup_context`."""
    name, places = registered.__name__, [at for at, _ in written]

    class Differentiable(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(*inputs: Any) -> Any:
            results = registered(*inputs)
            if places and backward is not None:
                return tuple(inputs[at] for at in places)
            return results

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            if places and backward is not None:
                # What was written is an output of this step:
                # autograd continues the graph behind it from there.
                ctx.mark_dirty(*(inputs[at] for at in places))
            note_parameters(ctx, inputs)
            ctx.chosen = inputs[-1]
            if save is not None:
                save(ctx, inputs, output)

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            if backward is None:
                raise NotImplementedError(f"tritonrec::{name} has no derivative")
            with _again(ctx.chosen, gradients):
                return *finish(ctx, backward(ctx, *gradients)), None  # impl has none

    Differentiable.__name__ = Differentiable.__qualname__ = name
    return Differentiable


def _step(
    op: Op, save: Callable[..., None] | None, backward: Callable[..., Any]
) -> type[torch.autograd.Function]:
    """The op as a step of autograd without the dispatcher.

    The older form, whose `forward` has the context: torch binds a signature at each call of the other one.
    """

    class Step(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Any:
            arguments, impl, casts = inputs[:-2], inputs[-2], inputs[-1]
            # the accumulator knows a parameter by its identity, which a cast one has not
            note_parameters(ctx, arguments)
            ctx.chosen = impl
            arguments = cast(arguments, casts)
            op._check(arguments)
            output = op._launch(arguments, impl)
            if save is not None:
                save(ctx, (*arguments, impl), output)
            return output

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            with _again(ctx.chosen, gradients):
                # impl and the casts have none; autograd gives the others the dtypes of the arguments
                return *finish(ctx, backward(ctx, *gradients)), None, None

    Step.__name__ = Step.__qualname__ = op.name
    return Step


def _again(impl: Impl, gradients: tuple[Any, ...]) -> AbstractContextManager[Any]:
    """Sums of terms run on the implementation of their op, too, and autocast casts nothing in backward."""
    if is_compiling():
        return nullcontext()
    device = next((each.device for each in gradients if each is not None), None)
    if device is None or autocast_dtype(device) is None:
        return _NOTHING if impl == default_impl() else use_impl(impl)
    stack = ExitStack()
    stack.enter_context(use_impl(impl))
    stack.enter_context(without_autocast(device))
    return stack


class _Parameter:
    """One argument of a schema, as torch has parsed it."""

    def __init__(self, argument: Any):
        declared, self.name = argument.type, argument.name
        self.is_optional = declared.kind() == "OptionalType"
        kind = (declared.getElementType() if self.is_optional else declared).kind()
        self.is_tensor = kind == "TensorType"
        self.kind = {"IntType": int, "FloatType": float, "BoolType": bool, "StringType": str}.get(kind)
        self.is_written = argument.is_write
