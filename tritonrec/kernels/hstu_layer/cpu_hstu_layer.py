"""A whole HSTU layer in one call of the CPU, for trainers.

The ops of a layer are checked, converted and launched one by one, which for a micro-batch of a few hundred
tokens takes longer than their loops. Here they run in one call, in float32, with the bits that they have one
by one: `bind` says whether a call fits, and what does not fit takes the ops, with their errors.

Dimensions: L tokens, B samples, H heads, d model dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch

from tritonrec.kernels.deferred import refuse
from tritonrec.kernels.fixed_point.errors import sum_error
from tritonrec.kernels.gradients import Targets, remembered
from tritonrec.kernels.hstu_attention.checks import check_counts
from tritonrec.kernels.linear.reference import no_sum
from tritonrec.kernels.offsets import check_lengths, check_offsets
from tritonrec.kernels.philox import DROPOUT
from tritonrec.kernels.philox.reference import halves
from tritonrec.kernels.workers import over_ranges

Parameters = tuple[torch.Tensor | None, ...]
"""norm, uvqk, gate and output, each weight and bias; pos_weights and ts_weights of attention, or None."""

ALIGNED = 16  # floats of a cache line


class Shape(NamedTuple):
    """Sizes and numbers of a layer."""

    dim: int
    heads: int
    qk_dim: int
    v_dim: int
    max_seq_len: int
    eps: float
    gate_eps: float
    dropout: float
    keep_normed: bool

    @property
    def values(self) -> int:
        return self.heads * self.v_dim

    @property
    def columns(self) -> int:
        return 2 * self.heads * (self.v_dim + self.qk_dim)

    @property
    def kept_widths(self) -> tuple[int, ...]:
        """Columns of z, uvqk, attended, gated, means and rstds of both norms, normed, as they are kept."""
        normed = (self.dim,) if self.keep_normed else ()
        return self.columns, self.columns, self.values, self.values, 1, 1, 1, 1, *normed


class Place(NamedTuple):
    """Where the tokens stand (`tritonrec.nn.Tokens`); all int64."""

    seq_offsets: torch.Tensor
    sample_ids: torch.Tensor
    positions: torch.Tensor
    timestamps: torch.Tensor | None
    num_targets: torch.Tensor | None
    query_timestamps: torch.Tensor | None


class Saved(NamedTuple):
    """What forward keeps for backward; all float32."""

    means: torch.Tensor  # (L,), of the norm's rows
    rstds: torch.Tensor
    gate_means: torch.Tensor  # (L,), of the gate's
    gate_rstds: torch.Tensor
    normed: torch.Tensor | None  # (L, d)
    z: torch.Tensor  # (L, columns)
    uvqk: torch.Tensor
    attended: torch.Tensor  # (L, H * v_dim)
    gated: torch.Tensor


class Terms(NamedTuple):
    """What the gradients of the parameters are made of, row by row; all float32."""

    duvqk: torch.Tensor  # (L, columns), of the linear layer's result
    normed: torch.Tensor  # (L, d)
    gated: torch.Tensor  # (L, H * v_dim)
    gate_weight: torch.Tensor  # (L, H * v_dim)
    gate_bias: torch.Tensor
    norm_weight: torch.Tensor  # (L, d)
    norm_bias: torch.Tensor
    pos_weights: torch.Tensor  # (B, entries)
    ts_weights: torch.Tensor


class Bound:
    """One call of a layer: `forward`, then `backward` or `backward_exact`.

    `forward` returns what these need of it, one tensor; the caller keeps it, x and the parameters.
    """

    def __init__(self, shape: Shape, place: Place, x: torch.Tensor, parameters: Parameters, seed: int):
        self._shape, self._place = shape, place  # the addresses of whose tensors are taken
        self._tokens, self._samples = x.shape[0], place.seq_offsets.shape[0] - 1
        self._widths = shape.kept_widths
        self._starts, self._size = _layout(self._tokens, self._widths)
        pos, ts = parameters[8:]
        self._entries = 0 if pos is None else len(pos), 0 if ts is None else len(ts)
        one_sided = self._entries[0] == shape.max_seq_len and shape.max_seq_len > 1
        base, sign = (0, -1) if one_sided or pos is None else (shape.max_seq_len - 1, 1)
        times = place.timestamps if ts is not None else None
        asked = times if place.query_timestamps is None or times is None else place.query_timestamps
        drops = shape.dropout > 0
        self._numbers = _numbers(shape)
        self._described = [
            self._samples, self._tokens, shape.dim, shape.heads, shape.qk_dim, shape.v_dim, *self._entries,
            base, 0 if pos is None else sign, *halves(seed), DROPOUT, int(shape.dropout * 2**32),
            place.seq_offsets.data_ptr(), _address(place.num_targets), place.sample_ids.data_ptr() * drops,
            place.positions.data_ptr() * drops, _address(times), _address(asked),
        ]  # fmt: skip

    def _table(self, x: torch.Tensor, kept: torch.Tensor, parameters: Parameters, out: torch.Tensor) -> list:
        first = kept.data_ptr()
        places = [first + 4 * start for start in self._starts]
        normed = places[8] if self._shape.keep_normed else 0
        return [
            *self._described, *map(_address, parameters), x.data_ptr(), *places[:8], out.data_ptr(),
            int(self._shape.keep_normed), normed,
        ]  # fmt: skip

    def saved(self, kept: torch.Tensor) -> Saved:
        """Views of what `forward` kept."""
        parts = [
            kept[start : start + self._tokens * width].view(self._tokens, width)
            for start, width in zip(self._starts, self._widths, strict=True)
        ]
        z, uvqk, attended, gated = parts[:4]
        means, rstds, gate_means, gate_rstds = (each.view(-1) for each in parts[4:8])
        normed = parts[8] if self._shape.keep_normed else None
        return Saved(means, rstds, gate_means, gate_rstds, normed, z, uvqk, attended, gated)

    def forward(self, x: torch.Tensor, parameters: Parameters) -> tuple[torch.Tensor, torch.Tensor]:
        """The output (L, d), the residual added; and what backward needs."""
        from tritonrec.kernels.hstu_layer.numba_hstu_layer import forward

        out, kept = torch.empty_like(x), x.new_empty(self._size)
        table = np.array(self._table(x, kept, parameters, out), np.int64)
        self._over_samples(lambda start, stop: forward(table, self._numbers, start, stop), 1.0)
        return out, kept

    def backward(
        self, dy: torch.Tensor, x: torch.Tensor, kept: torch.Tensor, parameters: Parameters
    ) -> tuple[torch.Tensor, Terms]:
        """dx, and the terms of the parameters' gradients."""
        from tritonrec.kernels.hstu_layer.numba_hstu_layer import backward

        shape, dx = self._shape, torch.empty_like(x)
        duvqk = x.new_empty(self._tokens, shape.columns)
        gate_weight, gate_bias = (x.new_empty(self._tokens, shape.values) for _ in range(2))
        norm_weight, norm_bias = (x.new_empty(x.shape) for _ in range(2))
        pos, ts = (x.new_empty(self._samples, entries) for entries in self._entries)
        of = self.saved(kept)
        normed = x.new_empty(x.shape) if of.normed is None else of.normed
        table = self._table(x, kept, parameters, dx)
        table[-1] = normed.data_ptr()
        left = duvqk, gate_weight, gate_bias, norm_weight, norm_bias, pos, ts
        addresses = np.array([*table, dy.data_ptr(), dx.data_ptr(), *map(_address, left)], np.int64)
        self._over_samples(lambda start, stop: backward(addresses, self._numbers, start, stop), 2.5)
        return dx, Terms(duvqk, normed, of.gated, *left[1:])

    def backward_exact(
        self, dy: torch.Tensor, x: torch.Tensor, kept: torch.Tensor, parameters: Parameters, targets: Targets
    ) -> torch.Tensor:
        """dx; exact gradients are added to the sums of `targets`, of all parameters that are not None."""
        from tritonrec.kernels.hstu_layer.numba_hstu_layer import SUMS, backward_exact

        dx = torch.empty_like(x)
        into = iter(targets.sums)
        sums = [0 if each is None else next(into).data_ptr() for each in parameters]
        norm, uvqk, gate, output, tables = (sums[at : at + 2] for at in range(0, 10, 2))
        order = [*output, *gate, *tables, *norm, *uvqk]
        table = [*self._table(x, kept, parameters, dx), dy.data_ptr(), dx.data_ptr(), *order]
        bits = targets.fraction_bits
        bad, values = np.full((SUMS, 3), -1, np.int64), np.zeros(SUMS, np.float32)
        scale, limit = 2.0**bits, np.float32(2.0 ** (62 - bits))
        if backward_exact(np.array(table, np.int64), self._numbers, scale, limit, bad, values):
            self._report(bad, values, parameters, targets)
        return dx

    def _report(self, bad: Any, values: Any, parameters: Parameters, targets: Targets) -> None:
        """Refuse the values that sums could not take, in the order of the ops."""
        into = iter(targets.names)
        names = ["" if each is None else next(into) for each in parameters]
        order = [6, 7, 4, 5, 8, 9, 0, 1, 2, 3]
        for at, (first, row, column), value in zip(order, bad.tolist(), values.tolist(), strict=True):
            if first < 0:
                continue
            if at in (2, 6):
                refuse(no_sum((first, row, column, value), targets.fraction_bits, names[at]))
            else:
                name = f"gradient of {names[at]}"
                refuse(sum_error(name, (first, row), value, 0, targets.fraction_bits))

    def _over_samples(self, run: Callable[[int, int], None], weight: float) -> None:
        shape = self._shape
        over_ranges(run, self._samples, weight * _cost(shape, self._tokens))

    def is_small(self) -> bool:
        """Whether one thread does it all."""
        return torch.get_num_threads() == 1 or 2.5 * _cost(self._shape, self._tokens) < 20_000_000


def _cost(shape: Shape, tokens: int) -> float:
    """Floating-point operations of a forward, roughly."""
    inner = shape.dim * (shape.columns + shape.values)
    return tokens * (2.0 * inner + shape.max_seq_len * shape.heads * (shape.qk_dim + shape.v_dim))


@lru_cache(maxsize=64)
def _numbers(shape: Shape) -> Any:
    kept = 1 / (1 - shape.dropout)
    return np.array(
        [shape.eps, shape.gate_eps, shape.qk_dim**-0.5, 1 / shape.max_seq_len, kept, 1.0], np.float32
    )


@lru_cache(maxsize=256)
def _layout(tokens: int, columns: tuple[int, ...]) -> tuple[list[int], int]:
    """Starts of parts (tokens, columns) of a buffer, each on a cache line, and its size."""
    starts, end = [], 0
    for each in columns:
        starts.append(end)
        end += -(-tokens * each // ALIGNED) * ALIGNED
    return starts, end


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def bind(shape: Shape, place: Place, x: torch.Tensor, parameters: Parameters, seed: int) -> Bound | None:
    """The layer's call, or None where its arguments are of other kinds than those it takes, or do not fit.

    Offsets, lengths and counts are checked as by the ops, with their errors.
    """
    if not _fits(shape, place, x, parameters):
        return None
    check_offsets("seq_offsets", place.seq_offsets, x.shape[0])
    check_lengths(place.seq_offsets, shape.max_seq_len)
    if place.num_targets is not None:
        _check_targets(place.num_targets, place.seq_offsets)
    return Bound(shape, place, x, parameters, seed)


def _check_targets(counts: torch.Tensor, offsets: torch.Tensor) -> None:
    def check() -> None:
        check_counts("num_targets", counts, offsets.diff())

    if offsets.is_inference():
        check()
    else:  # `check_offsets` has them remembered, so that no other tensor gets their id meanwhile
        remembered(counts, ("targets", id(offsets), offsets._version), check)


def _fits(shape: Shape, place: Place, x: torch.Tensor, parameters: Parameters) -> bool:
    dim, values, columns = shape.dim, shape.values, shape.columns
    most, tokens, samples = shape.max_seq_len, x.shape[0], place.seq_offsets.numel() - 1
    if min(dim, shape.heads, shape.qk_dim, shape.v_dim, most, tokens) < 1:
        return False
    if x.shape != (tokens, dim) or x.dtype != torch.float32 or not x.is_contiguous() or x.is_neg():
        return False
    *given, pos, ts = parameters
    shapes = (dim,), (dim,), (columns, dim), (columns,), (values,), (values,), (dim, values), (dim,)
    for parameter, wanted in zip(given, shapes, strict=True):
        if parameter is None or parameter.shape != wanted:
            return False
    for parameter in parameters:
        if parameter is None:
            continue
        if parameter.dtype != torch.float32 or not parameter.is_contiguous() or not parameter.is_cpu:
            return False
    if pos is not None and pos.shape not in ((most,), (2 * most - 1,)):
        return False
    if ts is not None and (ts.dim() != 1 or ts.numel() == 0 or place.timestamps is None):
        return False
    of_tokens = place.sample_ids, place.positions, place.timestamps, place.query_timestamps
    for tensor, count in (
        (place.seq_offsets, samples + 1), (place.num_targets, samples), *((one, tokens) for one in of_tokens)
    ):  # fmt: skip
        if tensor is None:
            continue
        if tensor.shape != (count,) or tensor.dtype != torch.int64:
            return False
        if not tensor.is_contiguous() or not tensor.is_cpu:
            return False
    return samples >= 1
