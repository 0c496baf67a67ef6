"""Parameters whose gradients add up the same however a batch is cut.

A parameter with a grid (`attach_grids`, `own_gradients`) takes its gradient there: the backward of the
functions below rounds each sample's or token's contribution once to a multiple of 2**-bits, adds it to
``parameter.grid`` as int64, and leaves ``parameter.grad`` alone. Without a grid they give ordinary float32
gradients.

Dimensions: L tokens, B samples, D columns.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from .. import ops

_kernels = ops.registered
_GRID = ("grid", "fraction_bits", "grid_name")  # attributes of a parameter with a grid


def attach_grids(module: torch.nn.Module, bits: int = ops.FRACTION_BITS) -> dict[str, torch.Tensor]:
    """Give every parameter of `module` a zero grid of its shape; returns them by parameter name.

    Calling it again sets all grids and ``.grad`` s back.
    """
    grids = {}
    for name, parameter in module.named_parameters():
        parameter.grad = None
        parameter.grid = torch.zeros(  # type: ignore[attr-defined]
            parameter.shape, dtype=torch.int64, device=parameter.device
        )  # contiguous, whatever the parameter's order in memory
        parameter.fraction_bits, parameter.grid_name = bits, name  # type: ignore[attr-defined]
        grids[name] = parameter.grid  # type: ignore[attr-defined]
    return grids


def detach_grids(module: torch.nn.Module) -> None:
    """Take the grids away; gradients are ordinary float32 ones again, and start from nothing."""
    for parameter in module.parameters():
        parameter.grad = None
        for attribute in _GRID:
            vars(parameter).pop(attribute, None)


@contextmanager
def own_gradients(module: torch.nn.Module, bits: int | None) -> Iterator[None]:
    """Inside, gradients of `module` start from nothing: on zero grids of 2**-bits, or in ``.grad`` for None.

    Afterwards every parameter has the ``.grad`` and the grid of before.
    """
    before = [
        (
            parameter,
            parameter.grad,
            {name: vars(parameter)[name] for name in _GRID if name in vars(parameter)},
        )
        for parameter in module.parameters()
    ]
    try:
        if bits is None:
            detach_grids(module)
        else:
            attach_grids(module, bits)
        yield
    finally:
        for parameter, gradient, grid in before:
            for attribute in _GRID:
                vars(parameter).pop(attribute, None)
            vars(parameter).update(grid)
            parameter.grad = gradient


def has_grid(parameter: torch.Tensor) -> bool:
    """Whether gradients of `parameter` go to a grid."""
    return hasattr(parameter, "grid")


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, seq_offsets: torch.Tensor | None = None
) -> torch.Tensor:
    """`ops.linear`; with a grid, the weight's gradient is added sample by sample, the bias's token by token.

    Args:
        x: (L, in). weight: (out, in). bias: (out,) or None.
        seq_offsets: (B + 1,), which rows of x belong to which sample; needed with a grid.
    """
    if not has_grid(weight):
        return ops.linear(x, weight, bias)
    if seq_offsets is None:
        raise ValueError("a linear layer with an exact gradient needs seq_offsets to tell samples apart")
    return _Linear.apply(x, weight, bias, seq_offsets)


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
    """`ops.norm_mul_dropout`; with a grid, gradients of weight and bias are added token by token."""
    if not has_grid(weight):
        return ops.norm_mul_dropout(x, u, weight, bias, eps, dropout, seed, sample_ids, positions)
    return _NormMulDropout.apply(x, u, weight, bias, eps, dropout, seed, sample_ids, positions)


def relative_aggregate(
    v: torch.Tensor,
    table: torch.Tensor,
    seq_offsets: torch.Tensor,
    max_seq_len: int,
    timestamps: torch.Tensor | None = None,
) -> torch.Tensor:
    """`ops.relative_aggregate`; with a grid, the table's gradient is added sample by sample."""
    if not has_grid(table):
        return ops.relative_aggregate(v, table, seq_offsets, max_seq_len, timestamps)
    return _RelativeAggregate.apply(v, table, seq_offsets, max_seq_len, timestamps)


def lookup(weight: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Rows (L,) of a dense parameter (R, D); with a grid, gradients are added occurrence by occurrence."""
    return _Lookup.apply(weight, rows) if has_grid(weight) else ops.gather_rows(weight, rows)


def sum_by_sample(values: torch.Tensor, seq_offsets: torch.Tensor) -> torch.Tensor:
    """Sums (B,) of each sample's values (L,), in the order of its tokens; 0 for an empty sample."""
    lengths = seq_offsets[1:] - seq_offsets[:-1]
    samples = torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)
    return ops.segment_sum(values.unsqueeze(1), samples, len(lengths)).squeeze(1)


def add_or_sum(parameter: torch.Tensor, terms: torch.Tensor) -> torch.Tensor | None:
    """The gradient of `parameter` from its terms (n, *shape); with a grid they go there, and it is None."""
    if not has_grid(parameter):
        return terms.sum(0)
    _add_rows(parameter, terms.flatten(1))
    return None


def linear_gradients(
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    dy: torch.Tensor,
    x: torch.Tensor,
    seq_offsets: torch.Tensor,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Gradients of weight (out, in) and bias (out,) from dy (L, out) and x (L, in), as `add_or_sum`."""
    dbias = None if bias is None else add_or_sum(bias, dy)
    if not has_grid(weight):
        return dy.t() @ x, dbias
    ops.linear_weight_grad(
        weight.grid, dy, x, seq_offsets, weight.fraction_bits, weight.grid_name,  # type: ignore[attr-defined]
    )  # fmt: skip
    return None, dbias


def _add_rows(parameter: torch.Tensor, terms: torch.Tensor, rows: torch.Tensor | None = None) -> None:
    """Add terms (L, D) to the grid's rows (R, D); without `rows`, all to a grid of D elements."""
    grid = parameter.grid.view(-1, terms.shape[1])  # type: ignore[attr-defined]
    to = torch.zeros(len(terms), dtype=torch.int64, device=terms.device) if rows is None else rows
    ops.segment_sum(
        terms, to, len(grid), consistency="batch", out=grid,
        fraction_bits=parameter.fraction_bits, name=f"gradient of {parameter.grid_name}",  # type: ignore[attr-defined]
    )  # fmt: skip


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, seq_offsets):
        ctx.save_for_backward(x, seq_offsets)
        ctx.weight, ctx.bias = weight, bias
        return ops.linear(x, weight, bias)

    @staticmethod
    def backward(ctx, dy):
        x, seq_offsets = ctx.saved_tensors
        dy = dy.contiguous()
        linear_gradients(ctx.weight, ctx.bias, dy, x, seq_offsets)
        dx = ops.linear(dy, ctx.weight.detach().t(), None) if ctx.needs_input_grad[0] else None
        return dx, None, None, None


class _NormMulDropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, u, weight, bias, eps, dropout, seed, sample_ids, positions):
        if not dropout:
            sample_ids = positions = None
        y, means, rstds = _kernels.norm_mul_dropout(
            x, u, weight, bias, eps, dropout, seed, sample_ids, positions, "auto"
        )
        ctx.save_for_backward(x, u, sample_ids, positions, means, rstds)
        ctx.weight, ctx.bias, ctx.dropout, ctx.seed = weight, bias, dropout, seed
        return y

    @staticmethod
    def backward(ctx, dy):
        x, u, sample_ids, positions, means, rstds = ctx.saved_tensors
        weight, bias = ctx.weight, ctx.bias
        dx, du, dweight, dbias = _kernels.norm_mul_dropout_backward(
            dy.contiguous(), x, u, weight.detach(), bias.detach(), ctx.dropout, ctx.seed, sample_ids,
            positions, means, rstds, "auto",
        )  # fmt: skip
        add_or_sum(weight, dweight)
        add_or_sum(bias, dbias)
        return dx, None if u is None else du, *(None,) * 7


class _RelativeAggregate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, v, table, seq_offsets, max_seq_len, timestamps):
        ctx.save_for_backward(v, seq_offsets, timestamps)
        ctx.table, ctx.max_seq_len = table, max_seq_len
        return ops.relative_aggregate(v, table, seq_offsets, max_seq_len, timestamps)

    @staticmethod
    def backward(ctx, dy):
        v, seq_offsets, timestamps = ctx.saved_tensors
        dv, dtable = _kernels.relative_aggregate_backward(
            dy, v, ctx.table.detach(), seq_offsets, ctx.max_seq_len, timestamps, "auto"
        )
        add_or_sum(ctx.table, dtable)
        return dv, None, None, None, None


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight, rows):
        ctx.weight = weight
        ctx.save_for_backward(rows)
        return ops.gather_rows(weight, rows)

    @staticmethod
    def backward(ctx, dy):
        _add_rows(ctx.weight, dy.contiguous(), ctx.saved_tensors[0])
        return None, None
