"""Gradients that add up the same however a batch is cut: fixed-point sums beside a module's parameters.

A sum of float32 gradients depends on its order, and so on which samples share a micro-batch. A
`GradientAccumulator` holds an int64 sum for each parameter. While it is active in a thread, the backward of
the functions below rounds each sample's or token's contribution once to a multiple of
``2**-fraction_bits``, adds it there, and leaves ``parameter.grad`` alone. Without one they give ordinary
float32 gradients.

Dimensions: L tokens, B samples, D columns.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from .. import ops

_kernels = ops.registered
_of_thread = threading.local()


class GradientAccumulator:
    """Sums of the gradients of a module's parameters, over as many backward passes as there are until `take`.

    Args:
        module: its parameters, as they are now.
        fraction_bits: sums are int64 multiples of ``2**-fraction_bits``; None: float32, in ``.grad``.

    Attributes:
        sums: () int64 zeros of each parameter's shape, by its name; empty for float32 sums.

    Example::

        accumulator = GradientAccumulator(model)
        with accumulator.active():
            model(batch, rows, seed).sum().backward()
        gradients = {name: ops.from_fixed_point(sums) for name, sums in accumulator.take().items()}
    """

    def __init__(self, module: torch.nn.Module, fraction_bits: int | None = ops.FRACTION_BITS):
        self.fraction_bits = fraction_bits
        self._parameters = dict(module.named_parameters())
        exact = {} if fraction_bits is None else self._parameters
        self._names: dict[torch.Tensor, str] = {parameter: name for name, parameter in exact.items()}
        self.sums = {  # contiguous, whatever the parameter's order in memory
            name: torch.zeros(parameter.shape, dtype=torch.int64, device=parameter.device)
            for name, parameter in exact.items()
        }

    @contextmanager
    def active(self) -> Iterator[None]:
        """Inside, on this thread, gradients of the modules' parameters go here.

        Backward stays on this thread, where autograd would take one of its own for an accelerator: a
        checkpointed part of a model computes its forward again in backward, and must find the accumulator.
        """
        before = current()
        _of_thread.accumulator = self
        try:
            with torch.autograd.set_multithreading_enabled(False):
                yield
        finally:
            _of_thread.accumulator = before

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

    def take(self) -> dict[str, torch.Tensor]:
        """Sums by name, of the parameters that require a gradient, and start again from zero.

        Raises TypeError for a parameter that has an ordinary gradient beside an exact sum.
        """
        taken = {}
        for name, parameter in self._parameters.items():
            if self.fraction_bits is None:
                gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                parameter.grad = None
            elif parameter.grad is not None:
                raise TypeError(
                    f"parameter {name} got an ordinary float32 gradient, whose sum depends on the batch's "
                    "cut; batch consistency needs it from a module of tritonrec.nn, or use "
                    "consistency='window'"
                )
            else:
                gradient = self.sums[name].clone()
                self.sums[name].zero_()
            if parameter.requires_grad:
                taken[name] = gradient
        return taken

    def holds(self, parameter: torch.Tensor) -> bool:
        """Whether gradients of `parameter` are summed exactly here."""
        return parameter in self._names

    def add(self, parameter: torch.Tensor, terms: torch.Tensor, rows: torch.Tensor | None = None) -> None:
        """Add terms (n, *shape) to the sums of a parameter that it `holds`; or (n, D) to `rows` of it."""
        name = self._names[parameter]
        terms = terms.flatten(1)
        sums = self.sums[name].view(-1, terms.shape[1])
        to = torch.zeros(len(terms), dtype=torch.int64, device=terms.device) if rows is None else rows
        ops.segment_sum(
            terms, to, len(sums), consistency="batch", out=sums, bits=self._bits, name=f"gradient of {name}"
        )

    def add_product(
        self, weight: torch.Tensor, dy: torch.Tensor, x: torch.Tensor, seq_offsets: torch.Tensor
    ) -> None:
        """Add each sample's dy^T x to the sums of a weight (out, in): dy (L, out), x (L, in)."""
        name = self._names[weight]
        ops.linear_weight_grad(self.sums[name], dy, x, seq_offsets, self._bits, name)

    @property
    def _bits(self) -> int:
        assert self.fraction_bits is not None
        return self.fraction_bits


def current() -> GradientAccumulator | None:
    """The accumulator that is active on this thread."""
    return getattr(_of_thread, "accumulator", None)


def accumulator_of(parameter: torch.Tensor) -> GradientAccumulator | None:
    """The active accumulator, if gradients of `parameter` are summed exactly there."""
    accumulator = current()
    return accumulator if accumulator is not None and accumulator.holds(parameter) else None


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, seq_offsets: torch.Tensor | None = None
) -> torch.Tensor:
    """`ops.linear`; exactly, the weight's gradient is added sample by sample, the bias's token by token.

    Args:
        x: (L, in). weight: (out, in). bias: (out,) or None.
        seq_offsets: (B + 1,), the rows of x of each sample; needed for an exact sum.
    """
    accumulator = accumulator_of(weight)
    if accumulator is None:
        return ops.linear(x, weight, bias)
    if seq_offsets is None:
        raise ValueError("a linear layer with an exact gradient needs seq_offsets to tell samples apart")
    return _Linear.apply(accumulator, x, weight, bias, seq_offsets)


def norm_mul_dropout(
    x: torch.Tensor,
    u: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
    dropout: float = 0.0,
    seed: int = 0,
    sample_ids: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
) -> torch.Tensor:
    """`ops.norm_mul_dropout`; exactly, gradients of weight and bias are added token by token."""
    accumulator = accumulator_of(weight)
    arguments = x, u, weight, bias, eps, dropout, seed, sample_ids, positions
    if accumulator is None:
        return ops.norm_mul_dropout(*arguments)
    return _NormMulDropout.apply(accumulator, *arguments)


def relative_aggregate(
    v: torch.Tensor,
    table: torch.Tensor,
    seq_offsets: torch.Tensor,
    max_seq_len: int,
    timestamps: torch.Tensor | None = None,
) -> torch.Tensor:
    """`ops.relative_aggregate`; exactly, the table's gradient is added sample by sample."""
    accumulator = accumulator_of(table)
    if accumulator is None:
        return ops.relative_aggregate(v, table, seq_offsets, max_seq_len, timestamps)
    return _RelativeAggregate.apply(accumulator, v, table, seq_offsets, max_seq_len, timestamps)


def lookup(weight: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Rows (L,) of a dense parameter (R, D); exactly, gradients are added occurrence by occurrence."""
    accumulator = accumulator_of(weight)
    return ops.gather_rows(weight, rows) if accumulator is None else _Lookup.apply(accumulator, weight, rows)


def sum_by_sample(values: torch.Tensor, seq_offsets: torch.Tensor) -> torch.Tensor:
    """Sums (B,) of each sample's values (L,), in the order of its tokens; 0 for an empty sample."""
    lengths = seq_offsets[1:] - seq_offsets[:-1]
    samples = torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)
    return ops.segment_sum(values.unsqueeze(1), samples, len(lengths)).squeeze(1)


def sum_terms(
    accumulator: GradientAccumulator | None, parameter: torch.Tensor, terms: torch.Tensor
) -> torch.Tensor | None:
    """The gradient of `parameter` from its terms (n, *shape); None where the accumulator has taken it."""
    if accumulator is None or not accumulator.holds(parameter):
        return terms.sum(0)
    accumulator.add(parameter, terms)
    return None


def sum_product(
    accumulator: GradientAccumulator | None,
    weight: torch.Tensor,
    dy: torch.Tensor,
    x: torch.Tensor,
    seq_offsets: torch.Tensor,
) -> torch.Tensor | None:
    """The gradient of a weight (out, in) from dy (L, out) and x (L, in), as `sum_terms`."""
    if accumulator is None or not accumulator.holds(weight):
        return dy.t() @ x
    accumulator.add_product(weight, dy, x, seq_offsets)
    return None


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, accumulator, x, weight, bias, seq_offsets):
        ctx.save_for_backward(x, seq_offsets)
        ctx.accumulator, ctx.weight, ctx.bias = accumulator, weight, bias
        return ops.linear(x, weight, bias)

    @staticmethod
    def backward(ctx, dy):
        x, seq_offsets = ctx.saved_tensors
        dy = dy.contiguous()
        if ctx.bias is not None:
            ctx.accumulator.add(ctx.bias, dy)
        ctx.accumulator.add_product(ctx.weight, dy, x, seq_offsets)
        dx = ops.linear(dy, ctx.weight.detach().t(), None) if ctx.needs_input_grad[1] else None
        return None, dx, None, None, None


class _NormMulDropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx, accumulator, x, u, weight, bias, eps, dropout, seed, sample_ids, positions):
        if not dropout:
            sample_ids = positions = None
        y, means, rstds = _kernels.norm_mul_dropout(
            x, u, weight, bias, eps, dropout, seed, sample_ids, positions, "auto"
        )
        ctx.save_for_backward(x, u, sample_ids, positions, means, rstds)
        ctx.accumulator, ctx.weight, ctx.bias = accumulator, weight, bias
        ctx.dropout, ctx.seed = dropout, seed
        return y

    @staticmethod
    def backward(ctx, dy):
        x, u, sample_ids, positions, means, rstds = ctx.saved_tensors
        dx, du, dweight, dbias = _kernels.norm_mul_dropout_backward(
            dy.contiguous(), x, u, ctx.weight.detach(), ctx.bias.detach(), ctx.dropout, ctx.seed, sample_ids,
            positions, means, rstds, "auto",
        )  # fmt: skip
        ctx.accumulator.add(ctx.weight, dweight)
        ctx.accumulator.add(ctx.bias, dbias)
        return None, dx, None if u is None else du, *(None,) * 7


class _RelativeAggregate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, accumulator, v, table, seq_offsets, max_seq_len, timestamps):
        ctx.save_for_backward(v, seq_offsets, timestamps)
        ctx.accumulator, ctx.table, ctx.max_seq_len = accumulator, table, max_seq_len
        return ops.relative_aggregate(v, table, seq_offsets, max_seq_len, timestamps)

    @staticmethod
    def backward(ctx, dy):
        v, seq_offsets, timestamps = ctx.saved_tensors
        dv, dtable = _kernels.relative_aggregate_backward(
            dy, v, ctx.table.detach(), seq_offsets, ctx.max_seq_len, timestamps, "auto"
        )
        ctx.accumulator.add(ctx.table, dtable)
        return None, dv, None, None, None, None


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx, accumulator, weight, rows):
        ctx.accumulator, ctx.weight = accumulator, weight
        ctx.save_for_backward(rows)
        return ops.gather_rows(weight, rows)

    @staticmethod
    def backward(ctx, dy):
        ctx.accumulator.add(ctx.weight, dy.contiguous(), ctx.saved_tensors[0])
        return None, None, None
