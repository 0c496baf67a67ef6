"""Steps of autograd over whole parameters, parts of them and views, with exact gradients.

`ops` know a parameter by its identity, and a slice of one, ``in_proj_weight[:d]``, is another tensor. These
steps take the parameter and cut it inside.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from ..kernels.autocast import LOW, autocast_dtype, to_dtype, widen, without_autocast
from ..kernels.dispatch import default_impl, use_impl
from ..kernels.gradients import Terms, finish, note_parameters
from ..kernels.linear.op import LINEAR, ProductTerms
from ..kernels.row_terms import RowTerms


class _PartTerms(Terms):
    """Terms of rows [start, stop) of a parameter, seen as a matrix where it has more than two dimensions."""

    def __init__(self, terms: Terms, parameter: torch.Tensor, start: int, stop: int):
        self._terms, self._like, self._rows = terms, parameter.detach(), slice(start, stop)

    def total(self) -> torch.Tensor:
        total = torch.zeros_like(self._like, memory_format=torch.contiguous_format)
        self._part(total).copy_(self._terms.total())
        return total

    def add_to(self, sums: torch.Tensor, fraction_bits: int, name: str) -> None:
        self._terms.add_to(self._part(sums), fraction_bits, name)

    def _part(self, whole: torch.Tensor) -> torch.Tensor:
        rows = whole[self._rows]
        return rows.flatten(1) if rows.dim() > 2 else rows


class _Product(torch.autograd.Function):
    """x @ weight[start:stop].T + bias[start:stop], the weight (out, ...) seen as (out, in)."""

    @staticmethod
    def forward(ctx: Any, x, weight, bias, seq_offsets, start: int, stop: int):
        note_parameters(ctx, (x, weight, bias))
        ctx.impl, ctx.rows = default_impl(), (start, stop)
        x = to_dtype(x, autocast_dtype(x.device) or x.dtype)
        ctx.save_for_backward(x, weight, bias, seq_offsets)
        part = None if bias is None else bias[start:stop].to(x.dtype)
        return LINEAR.launch(x, weight.flatten(1)[start:stop].to(x.dtype), part, impl=ctx.impl)

    @staticmethod
    def backward(ctx: Any, dy):
        x, weight, bias, seq_offsets = ctx.saved_tensors
        start, stop = ctx.rows
        with use_impl(ctx.impl), without_autocast(dy.device):
            part = weight.flatten(1)[start:stop].to(x.dtype)
            dx = LINEAR.launch(dy, part.t()) if ctx.needs_input_grad[0] else None
            dweight = _PartTerms(ProductTerms(dy, x, seq_offsets), weight, start, stop)
            dbias = None if bias is None else _PartTerms(RowTerms(dy), bias, start, stop)
            return *finish(ctx, (dx, dweight, dbias)), None, None, None


def product(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    seq_offsets: torch.Tensor | None,
    start: int = 0,
    stop: int | None = None,
) -> torch.Tensor:
    """`ops.linear` by rows [start, stop) of the parameters: (n, in) -> (n, stop - start).

    Args:
        x: float32, or of lower precision as the weight is; autocast casts both.
        weight: (out, ...), seen as (out, in). bias: (out,). seq_offsets: (B + 1,) of the rows of x.
    """
    taken, cast = (torch.float32, *LOW), autocast_dtype(x.device) is not None
    if x.dtype not in taken or weight.dtype not in taken or (x.dtype != weight.dtype and not cast):
        raise ValueError(
            f"x and weight must share float32, bfloat16 or float16, got {x.dtype} and {weight.dtype}"
        )
    return _Product.apply(x, weight, bias, seq_offsets, start, len(weight) if stop is None else stop)


class _Expand(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter, leading):
        note_parameters(ctx, (parameter,))
        ctx.leading = len(leading)
        return parameter.expand(*leading, *parameter.shape).clone()

    @staticmethod
    def backward(ctx: Any, dy):
        return *finish(ctx, (RowTerms(dy.flatten(0, ctx.leading - 1)),)), None


def expand(parameter: torch.Tensor, *leading: int) -> torch.Tensor:
    """A copy of a parameter for each row, (\\*leading, \\*shape): the exact way to broadcast one.

    ``x * scale`` with a parameter (D,) sums its gradient over the rows of the batch in float32; ``x *
    nn.expand(scale, *x.shape[:-1])`` gives each row's term to the accumulator.

    Args:
        parameter: float32 of any shape. leading: at least one dimension.
    """
    if not leading:
        raise ValueError("expand needs the dimensions in front of the parameter's own")
    return _Expand.apply(parameter, leading)


class _Sigmoid(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x):
        e = torch.exp(-x.abs())
        s = torch.where(x >= 0, torch.ones_like(e), e) / (1 + e)
        ctx.save_for_backward(s)
        return s

    @staticmethod
    def backward(ctx: Any, ds):
        (s,) = ctx.saved_tensors
        return ds * (s * (1 - s))


def differentiable_sigmoid(x: torch.Tensor) -> torch.Tensor:
    """1 / (1 + exp(-x)), whose value at an element depends on that element alone; any shape.

    In float32 inside, rounded once to x's dtype.
    """
    return _Sigmoid.apply(widen(x)).to(x.dtype)


SQRT_HALF, SQRT_2_OVER_PI, INV_SQRT_2_PI = 0.5**0.5, (2 / math.pi) ** 0.5, (2 * math.pi) ** -0.5
CUBIC = 0.044715


class _GELU(torch.autograd.Function):
    """x * c(x), where c is the normal distribution, or (1 + tanh(inner(x))) / 2 for it."""

    @staticmethod
    def forward(ctx: Any, x, approximate: bool):
        ctx.approximate = approximate
        ctx.save_for_backward(x)
        return x * _share(x, approximate)

    @staticmethod
    def backward(ctx: Any, dy):
        (x,) = ctx.saved_tensors
        share = _share(x, ctx.approximate)
        if ctx.approximate:
            inner_slope = SQRT_2_OVER_PI * (1 + 3 * CUBIC * x * x)
            slope = 2 * share * (1 - share) * inner_slope  # of (1 + tanh) / 2, by 1 - tanh**2
        else:
            slope = torch.exp(-0.5 * x * x) * INV_SQRT_2_PI
        return dy * (share + x * slope), None


def _share(x: torch.Tensor, approximate: bool) -> torch.Tensor:
    if approximate:
        return 0.5 * (1 + torch.tanh(SQRT_2_OVER_PI * (x + CUBIC * x * x * x)))
    return 0.5 * (1 + torch.erf(x * SQRT_HALF))


def gelu(x: torch.Tensor, approximate: bool = False) -> torch.Tensor:
    """`torch.nn.functional.gelu`, whose value at an element depends on that element alone; any shape.

    torch's own takes another path for a tensor of one element, and in its tanh form for an array's end.
    In float32 inside, rounded once to x's dtype.
    """
    return _GELU.apply(widen(x), approximate).to(x.dtype)


class _RMSNorm(torch.autograd.Function):
    """normed = x / sqrt(mean(x**2) + eps), row by row; sums along a row are products with ones."""

    @staticmethod
    def forward(ctx: Any, x, eps: float):
        ctx.impl, dim = default_impl(), x.shape[1]
        ones = x.new_ones(1, dim)
        mean = LINEAR.launch(x * x, ones, impl=ctx.impl) / max(dim, 1)
        rstd = torch.rsqrt(mean + eps)
        normed = x * rstd
        ctx.save_for_backward(normed, rstd)
        return normed

    @staticmethod
    def backward(ctx: Any, dy):
        normed, rstd = ctx.saved_tensors
        dim = normed.shape[1]
        along = LINEAR.launch(dy * normed, normed.new_ones(1, dim), impl=ctx.impl) / max(dim, 1)
        return rstd * (dy - normed * along), None


def rms_normed(x: torch.Tensor, eps: float) -> torch.Tensor:
    """(L, D) float32 divided row by row by the root of its mean square."""
    return _RMSNorm.apply(x, eps)
