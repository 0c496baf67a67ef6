"""One record per op: its schema, implementations, fake kernel and derivative, registered with torch.

An op's folder has four kinds of files, and one line of `tritonrec.ops` offers it::

    op.py         the public function: docstring, arguments, and the shape checks
    register.py   the record below, with the fake kernel and the derivative
    reference.py  a loop that a reader can check by eye
    numba_*.py    the CPU            triton_*.py    accelerators

Three ways to call a record:

- ``INTERSECT(left, right, impl="auto")`` is the registered op with its derivative. torch.compile, export,
  FakeTensor, torch.func and the profiler see it.
- ``torch.ops.tritonrec.intersect`` is the same without the derivative.
- ``INTERSECT.launch(left, right, impl="auto")`` is the implementation alone: no checks and no dispatcher. It
  is for callers inside the package whose tensors are plain and fit by construction.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import torch

from tritonrec.kernels.arguments import check_tensors
from tritonrec.kernels.dispatch import Impl, implementation


class Op:
    """A registered op of the namespace ``tritonrec``.

    Args:
        schema: ``"name(Tensor a, Tensor? b, int c) -> (Tensor, Tensor)"`` as torch.library takes it, without
            `impl`, which is added as the last argument. The first argument is a tensor, and an argument that
            is written to is marked ``Tensor(a!)``.
        reference: the plain implementation. It takes the schema's arguments, and so do the others.
        cpu, triton: ``"module:function"`` beside `reference`, imported at the first call.
        fake: outputs of the right shapes and dtypes, without values.
        check: raises for arguments that do not fit each other; runs in the op and in the fake kernel.
        save: ``save(ctx, inputs, output)``, as `torch.autograd.Function.setup_context`; impl ends `inputs`.
        backward: ``backward(ctx, *gradients)`` returns a gradient or None for each argument of the schema. An
            op without one raises in backward. No op has a forward-mode derivative; torch names it so.
        options: keyword arguments of every implementation, for ops that share their implementations.
    """

    def __init__(
        self,
        schema: str,
        *,
        reference: Callable[..., Any],
        cpu: str,
        triton: str,
        fake: Callable[..., Any],
        check: Callable[..., None] | None = None,
        save: Callable[..., None] | None = None,
        backward: Callable[..., Any] | None = None,
        **options: Any,
    ):
        found = re.fullmatch(r"(\w+)\((.*)\) -> (.*)", schema)
        if found is None:
            raise ValueError(f"expected 'name(arguments) -> results', got {schema!r}")
        self.name, arguments, results = found.groups()
        self._options, self._check = options, check or (lambda *_: None)
        self._implementations: dict[str, Callable[..., Any]] = {"reference": reference}
        self._places = {"cpu": cpu, "triton": triton}
        self._package = reference.__module__.rpartition(".")[0]
        parameters = [_Parameter(text) for text in _split(arguments)]
        self._tensors = tuple((at, p.name) for at, p in enumerate(parameters) if p.is_tensor)
        self._optional = tuple(p.name for p in parameters if p.is_tensor and p.is_optional)
        self._registered = torch.library.custom_op(
            f"tritonrec::{self.name}",
            self._body,
            mutates_args=[p.name for p in parameters if p.is_written],
            schema=f"({arguments}, str impl) -> {results}",
        )

        def fake_kernel(*inputs: Any) -> Any:
            self._check(*inputs[:-1])
            return fake(*inputs[:-1])

        self._registered.register_fake(fake_kernel)
        self._function = None if backward is None else self._with_derivative(save, backward)

    def __call__(self, *arguments: Any, impl: Impl = "auto") -> Any:
        """The registered op; TypeError for an argument that is no tensor, ValueError for two devices."""
        check_tensors(self._optional, **{name: arguments[at] for at, name in self._tensors})
        if self._function is not None:
            return self._function.apply(*arguments, impl)
        return self._registered(*arguments, impl)

    def launch(self, *arguments: Any, impl: Impl = "auto") -> Any:
        """The implementation that `impl` names, without checks, derivative and dispatcher."""
        return self._implementation(implementation(impl, arguments[0]))(*arguments, **self._options)

    def _body(self, *inputs: Any) -> Any:
        *arguments, impl = inputs
        self._check(*arguments)
        return self.launch(*arguments, impl=impl)

    def _implementation(self, chosen: str) -> Callable[..., Any]:
        found = self._implementations.get(chosen)
        if found is None:
            # Imported here: `import tritonrec.ops` loads no compiler, and Triton decides at its import
            # whether it interprets.
            module, function = self._places[chosen].split(":")
            found = getattr(import_module(f"{self._package}.{module}"), function)
            self._implementations[chosen] = found
        return found

    def _with_derivative(
        self, save: Callable[..., None] | None, backward: Callable[..., Any]
    ) -> type[torch.autograd.Function]:
        registered = self._registered

        class Differentiable(torch.autograd.Function):
            generate_vmap_rule = True

            @staticmethod
            def forward(*inputs: Any) -> Any:
                return registered(*inputs)

            @staticmethod
            def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
                if save is not None:
                    save(ctx, inputs, output)

            @staticmethod
            def backward(ctx: Any, *gradients: Any) -> Any:
                return *_as_tuple(backward(ctx, *gradients)), None  # impl has none

        Differentiable.__name__ = Differentiable.__qualname__ = self.name
        return Differentiable


class _Parameter:
    """One argument of a schema."""

    def __init__(self, text: str):
        kind, self.name = text.split("=")[0].split()
        self.is_tensor = kind.startswith("Tensor")
        self.is_optional = kind.endswith("?")
        self.is_written = "!" in kind


def _split(arguments: str) -> list[str]:
    return [part.strip() for part in arguments.split(",") if part.strip()]


def _as_tuple(gradients: Any) -> Sequence[Any]:
    return gradients if isinstance(gradients, tuple) else (gradients,)
