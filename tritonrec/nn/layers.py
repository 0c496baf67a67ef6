"""torch's small modules with rows that depend on one sample only and exact gradients.

Constructors, parameter names, shapes and initial distributions are those of ``torch.nn``, so `state_dict`
goes both ways; what a module cannot do it refuses by name. Rows may have any leading dimensions; whose they
are, `context` tells. Parameters are float32, whatever torch's default is.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from .. import ops
from ..kernels.autocast import LOW, autocast_dtype, widen
from ..settings import check_number
from . import context
from .exact import differentiable_sigmoid, expand, gelu, rms_normed


def new_parameter(*shape: int, device=None, dtype=None) -> torch.nn.Parameter:
    """An empty parameter, float32 unless a dtype is given."""
    return torch.nn.Parameter(torch.empty(shape, device=device, dtype=dtype or torch.float32))


def refuse(module: str, **options: object) -> None:
    """Raise ValueError for an option that is not at the value where it does nothing."""
    for name, value in options.items():
        if value not in (None, False):
            raise ValueError(f"nn.{module} has no {name}={value!r}")


class Linear(torch.nn.Linear):
    """``x @ weight.T + bias``, as ``torch.nn.Linear``, with rows that do not depend on the batch.

    Args:
        in_features, out_features: sizes. bias: whether there is one.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = True, device=None, dtype=None):
        super().__init__(in_features, out_features, bias, device, dtype or torch.float32)

    def forward(self, x: torch.Tensor, seq_offsets: torch.Tensor | None = None) -> torch.Tensor:
        """(..., in) -> (..., out); `seq_offsets` (B + 1,) tell which rows of an (L, in) are one sample's."""
        if seq_offsets is None:
            seq_offsets = context.row_offsets(tuple(x.shape[:-1]), self.weight, self, x.device)
        if x.dim() == 2:
            return ops.linear(x, self.weight, self.bias, seq_offsets)
        y = ops.linear(x.reshape(-1, x.shape[-1]), self.weight, self.bias, seq_offsets)
        return y.view(*x.shape[:-1], self.out_features)


def _last_dimension(module: str, normalized_shape: int | Sequence[int]) -> int:
    shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
    if len(shape) != 1:
        raise ValueError(f"nn.{module} has no normalized_shape={shape}: it norms the last dimension")
    return shape[0]


class LayerNorm(torch.nn.LayerNorm):
    """``torch.nn.LayerNorm`` over the last dimension."""

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device=None,
        dtype=None,
    ):
        check_number("eps", eps)
        dim = _last_dimension("LayerNorm", normalized_shape)
        super().__init__(dim, eps, elementwise_affine, bias, device, dtype or torch.float32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., dim) -> (..., dim)."""
        weight = x.new_ones(self.normalized_shape) if self.weight is None else self.weight
        bias = x.new_zeros(self.normalized_shape) if self.bias is None else self.bias
        y = ops.norm_mul_dropout(
            x if x.dim() == 2 else x.reshape(-1, x.shape[-1]), None, weight, bias, self.eps
        )
        return y if x.dim() == 2 else y.view(x.shape)


class RMSNorm(torch.nn.RMSNorm):
    """``torch.nn.RMSNorm`` over the last dimension."""

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None = None,
        elementwise_affine: bool = True,
        device=None,
        dtype=None,
    ):
        check_number("eps", eps or 0.0)
        dim = _last_dimension("RMSNorm", normalized_shape)
        super().__init__(dim, eps, elementwise_affine, device, dtype or torch.float32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., dim) -> (..., dim); float32 inside, and under autocast the result too."""
        if x.dtype not in (torch.float32, *LOW) or x.shape[-1] != self.normalized_shape[0]:
            raise ValueError(
                f"x must be (..., {self.normalized_shape[0]}) float32, bfloat16 or float16, got "
                f"{tuple(x.shape)} {x.dtype}"
            )
        rows = widen(x.reshape(-1, x.shape[-1]))
        y = rms_normed(rows, torch.finfo(torch.float32).eps if self.eps is None else self.eps)
        y = y if self.weight is None else y * expand(self.weight, rows.shape[0])
        return y.to(torch.float32 if autocast_dtype(x.device) else x.dtype).view(x.shape)


class Embedding(torch.nn.Embedding):
    """``torch.nn.Embedding``: a learned row for each of a few ids, such as positions or categories.

    An id table that grows, is sharded or has a sparse optimizer is a feature (`tritonrec.embedding`).
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        _weight: torch.Tensor | None = None,
        _freeze: bool = False,
        device=None,
        dtype=None,
    ):
        refuse("Embedding", max_norm=max_norm, scale_grad_by_freq=scale_grad_by_freq, sparse=sparse)
        if padding_idx is not None and not -num_embeddings <= padding_idx < num_embeddings:
            raise ValueError(f"padding_idx {padding_idx} is outside [0, {num_embeddings})")
        super().__init__(
            num_embeddings, embedding_dim, padding_idx, _weight=_weight, _freeze=_freeze, device=device,
            dtype=dtype or torch.float32,
        )  # fmt: skip

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """(...) int64 or int32 -> (..., dim). The row of `padding_idx` gets no gradient.

        While a trainer computes, ids (1, T) of padded rows are those of every sample, and the result is
        (B, T, dim): a result (1, T, dim) would be summed over the batch in backward.
        """
        now = context.current()
        if now is not None and self.weight.requires_grad and torch.is_grad_enabled():
            if now.seq_offsets is None and ids.dim() > 1 and len(ids) == 1:
                ids = ids.expand(len(now.sample_ids), *ids.shape[1:])
            if context.sums_exactly(self.weight):
                now.check(tuple(ids.shape), self)
        rows = ops.gather_rows(self.weight, ids.reshape(-1).long())
        if self.padding_idx is not None:
            rows = torch.where((ids.reshape(-1) == self.padding_idx)[:, None], rows.detach(), rows)
        return rows.view(*ids.shape, self.embedding_dim)


class Dropout(torch.nn.Module):
    """``torch.nn.Dropout`` whose mask is a function of (seed, module, sample, position, column).

    A trainer gives the seed and the samples (`context`); the module's number is its place in the model. A
    direct call outside of a trainer draws from torch's global generator, as torch's module does. `eval`
    does nothing.
    """

    def __init__(self, p: float = 0.5, inplace: bool = False):
        super().__init__()
        if not 0 <= p <= 1:
            raise ValueError(f"p must lie in [0, 1], got {p}")
        self.p, self.inplace = p, inplace

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Any shape whose first dimension, or first two, are the rows of `context`."""
        if not self.training or self.p == 0:
            return x
        now = context.current()
        if now is None or self.p == 1:
            return F.dropout(x, self.p)
        owners, positions = now.places(tuple(x.shape[:-1]), self)
        rows = x.reshape(len(owners), -1) if x.numel() else x.reshape(len(owners), 0)
        return ops.dropout(rows, self.p, now.draw_seed(self), owners, positions).view(x.shape)

    def extra_repr(self) -> str:
        return f"p={self.p}"


class SiLU(torch.nn.Module):
    """``torch.nn.SiLU`` by `ops.silu`."""

    def __init__(self, inplace: bool = False):
        super().__init__()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Any shape."""
        return ops.silu(x)


class GELU(torch.nn.Module):
    """``torch.nn.GELU`` whose value at an element depends on that element alone."""

    def __init__(self, approximate: str = "none"):
        super().__init__()
        if approximate not in ("none", "tanh"):
            raise ValueError(f"approximate must be 'none' or 'tanh', got {approximate!r}")
        self.approximate = approximate

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Any shape."""
        return gelu(x, self.approximate == "tanh")


class PReLU(torch.nn.PReLU):
    """``torch.nn.PReLU``: x where it is positive, else weight * x; channels are dimension 1, as there."""

    def __init__(self, num_parameters: int = 1, init: float = 0.25, device=None, dtype=None):
        super().__init__(num_parameters, init, device, dtype or torch.float32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, C, ...) -> the same, C being any number for one weight, else that of weights."""
        if self.num_parameters == 1:
            slope = expand(self.weight, *x.shape)[..., 0]
        elif x.dim() < 2 or x.shape[1] != self.num_parameters:
            raise ValueError(f"x must be (B, {self.num_parameters}, ...), got {tuple(x.shape)}")
        else:
            slope = expand(self.weight, x.shape[0], *x.shape[2:]).movedim(-1, 1)
        return torch.where(x > 0, x, slope.to(x.dtype) * x)


class Sigmoid(torch.nn.Module):
    """``torch.nn.Sigmoid`` whose value at an element depends on that element alone."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Any shape."""
        return differentiable_sigmoid(x)
