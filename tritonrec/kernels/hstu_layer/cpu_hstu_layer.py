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
from tritonrec.kernels.linear.op import no_sum
from tritonrec.kernels.offsets import check_lengths, check_offsets
from tritonrec.kernels.philox.reference import DROPOUT, halves
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


class Layer:
    """A layer with its parameters, and what the tables of its calls share."""

    def __init__(self, shape: Shape, parameters: Parameters):
        from tritonrec.kernels.hstu_layer import numba_hstu_layer as at

        self.kernels = at  # of tables
        self.shape, self.parameters, self.numbers = shape, parameters, _numbers(shape)
        pos, ts = parameters[8:]
        self.entries = 0 if pos is None else len(pos), 0 if ts is None else len(ts)
        # A table of positions has max_seq_len entries for the past alone (entry = i - j),
        # or 2 max_seq_len - 1 for both sides (entry = max_seq_len - 1 + j - i).
        one_sided = self.entries[0] == shape.max_seq_len and shape.max_seq_len > 1
        base, sign = (0, -1) if one_sided or pos is None else (shape.max_seq_len - 1, 1)
        self.widths = shape.kept_widths
        self.starts = np.cumsum([0, *self.widths])  # of what is kept, in columns
        self._sums: tuple[Any, Any] = None, None  # of the last targets, and their addresses
        self.table = np.zeros(at.SUM_UVQK_BIAS + 1, np.int64)
        self.table[at.DIM : at.POS_ENTRIES] = shape.dim, shape.heads, shape.qk_dim, shape.v_dim
        self.table[at.POS_ENTRIES : at.KEY_0] = *self.entries, base, 0 if pos is None else sign
        self.table[at.TAG : at.OFFSETS] = DROPOUT, int(shape.dropout * 2**32)
        self.table[at.NORM_WEIGHT : at.X] = list(map(_address, parameters))
        self.table[at.HAS_NORMED] = shape.keep_normed

    def sums_of(self, targets: Targets) -> np.ndarray:
        """Addresses of the sums, in the order of the table."""
        if targets.sums is not self._sums[0]:
            into = iter(targets.sums)
            sums = [0 if each is None else next(into).data_ptr() for each in self.parameters]
            norm, uvqk, gate, output, tables = (sums[at : at + 2] for at in range(0, 10, 2))
            self._sums = targets.sums, np.array([*output, *gate, *tables, *norm, *uvqk], np.int64)
        return self._sums[1]


class Bound:
    """One call of a layer: `forward`, then `backward` or `backward_exact`.

    `forward` returns what these need of it, one tensor; the caller keeps it and x.
    """

    def __init__(self, layer: Layer, place: Place, tokens: int, seed: int):
        at = layer.kernels
        self._layer, self._place = layer, place  # the addresses of whose tensors are taken
        self._tokens, self._samples = tokens, place.seq_offsets.shape[0] - 1
        self._at: tuple[int, int] | None = None  # x and what is kept
        # One tensor for all that is kept: part p begins at
        # column starts[p] times `room` rows, on a cache line.
        self._room = -(-tokens // ALIGNED) * ALIGNED
        drops = layer.shape.dropout > 0
        times = place.timestamps if layer.entries[1] else None
        asked = times if place.query_timestamps is None or times is None else place.query_timestamps
        self._table = table = layer.table.copy()
        table[: at.DIM] = self._samples, tokens
        table[at.KEY_0 : at.TAG] = halves(seed)
        table[at.OFFSETS : at.NORM_WEIGHT] = (
            # An address of 0 says that a part is not there.
            place.seq_offsets.data_ptr(), _address(place.num_targets), place.sample_ids.data_ptr() * drops,
            place.positions.data_ptr() * drops, _address(times), _address(asked),
        )  # fmt: skip

    def _place_kept(self, x: torch.Tensor, kept: torch.Tensor) -> None:
        layer, table, at = self._layer, self._table, self._layer.kernels
        if (x.data_ptr(), kept.data_ptr()) == self._at:
            return  # as a rule; hooks of saved tensors move them
        self._at = x.data_ptr(), kept.data_ptr()
        places = kept.data_ptr() + 4 * self._room * layer.starts
        table[at.X] = x.data_ptr()
        table[at.Z : at.OUT] = places[:8]
        table[at.NORMED] = places[8] if layer.shape.keep_normed else 0

    def saved(self, kept: torch.Tensor) -> Saved:
        """Views of what `forward` kept."""
        starts = (self._room * self._layer.starts).tolist()
        parts = [
            kept[start : start + self._tokens * width].view(self._tokens, width)
            for start, width in zip(starts, self._layer.widths, strict=False)
        ]
        z, uvqk, attended, gated = parts[:4]
        means, rstds, gate_means, gate_rstds = (each.view(-1) for each in parts[4:8])
        normed = parts[8] if self._layer.shape.keep_normed else None
        return Saved(means, rstds, gate_means, gate_rstds, normed, z, uvqk, attended, gated)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The output (L, d), the residual added; and what backward needs."""
        at = self._layer.kernels
        out, kept = torch.empty_like(x), x.new_empty(self._room * int(self._layer.starts[-1]))
        table, numbers = self._table, self._layer.numbers
        self._place_kept(x, kept)
        table[at.OUT] = out.data_ptr()
        self._over_samples(lambda start, stop: at.forward(table, numbers, start, stop), 1.0)
        return out, kept

    def backward(self, dy: torch.Tensor, x: torch.Tensor, kept: torch.Tensor) -> tuple[torch.Tensor, Terms]:
        """dx, and the terms of the parameters' gradients."""
        at = self._layer.kernels
        shape, dx = self._layer.shape, torch.empty_like(x)
        duvqk = x.new_empty(self._tokens, shape.columns)
        gate_weight, gate_bias = (x.new_empty(self._tokens, shape.values) for _ in range(2))
        norm_weight, norm_bias = (x.new_empty(x.shape) for _ in range(2))
        pos, ts = (x.new_empty(self._samples, entries) for entries in self._layer.entries)
        of = self.saved(kept)
        normed = x.new_empty(x.shape) if of.normed is None else of.normed
        left = duvqk, gate_weight, gate_bias, norm_weight, norm_bias, pos, ts
        self._place_kept(x, kept)
        table, numbers = self._table, self._layer.numbers
        table[at.NORMED] = normed.data_ptr()
        table[at.DY : at.DUVQK] = dy.data_ptr(), dx.data_ptr()
        table[at.DUVQK : at.DTS + 1] = list(map(_address, left))
        self._over_samples(lambda start, stop: at.backward(table, numbers, start, stop), 2.5)
        return dx, Terms(duvqk, normed, of.gated, *left[1:])

    def backward_exact(
        self, dy: torch.Tensor, x: torch.Tensor, kept: torch.Tensor, targets: Targets
    ) -> torch.Tensor:
        """dx; exact gradients are added to the sums of `targets`, of all parameters that are not None."""
        at = self._layer.kernels
        dx, table, bits = torch.empty_like(x), self._table, targets.fraction_bits
        self._place_kept(x, kept)
        table[at.DY : at.DUVQK] = dy.data_ptr(), dx.data_ptr()
        table[at.SUM_OUTPUT_WEIGHT :] = self._layer.sums_of(targets)
        bad, values = np.full((at.SUMS, 3), -1, np.int64), np.zeros(at.SUMS, np.float32)
        scale, limit = 2.0**bits, np.float32(2.0 ** (62 - bits))
        if at.backward_exact(table, self._layer.numbers, scale, limit, bad, values):
            report_sums(self._layer, bad, values, targets)
        return dx

    def _over_samples(self, run: Callable[[int, int], None], weight: float) -> None:
        over_ranges(run, self._samples, weight * _cost(self._layer.shape, self._tokens))

    def is_small(self) -> bool:
        """Whether one thread does all of backward."""
        return torch.get_num_threads() == 1 or 2.5 * _cost(self._layer.shape, self._tokens) < 20_000_000


def report_sums(layer: Layer, bad: Any, values: Any, targets: Targets) -> None:
    """Refuse the values that sums could not take, in the order of the ops."""
    into = iter(targets.names)
    names = ["" if each is None else next(into) for each in layer.parameters]
    # From the order of the sums in the kernels' table to that of `Parameters`.
    order = [6, 7, 4, 5, 8, 9, 0, 1, 2, 3]
    for at, (first, row, column), value in zip(order, bad.tolist(), values.tolist(), strict=True):
        if first < 0:
            continue
        if at in (2, 6):
            refuse(no_sum((first, row, column, value), targets.fraction_bits, names[at]))
        else:
            name = f"gradient of {names[at]}"
            refuse(sum_error(name, (first, row), value, 0, targets.fraction_bits))


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


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def prepare(shape: Shape, parameters: Parameters) -> Layer | None:
    """The layer, or None where its parameters are of other kinds than those it takes, or do not fit."""
    dim, values, columns, most = shape.dim, shape.values, shape.columns, shape.max_seq_len
    if min(dim, shape.heads, shape.qk_dim, shape.v_dim, most) < 1:
        return None
    *given, pos, ts = parameters
    shapes = (dim,), (dim,), (columns, dim), (columns,), (values,), (values,), (dim, values), (dim,)
    for parameter, wanted in zip(given, shapes, strict=True):
        if parameter is None or parameter.shape != wanted:
            return None
    for parameter in parameters:
        if parameter is None:
            continue
        if parameter.dtype != torch.float32 or not parameter.is_contiguous() or not parameter.is_cpu:
            return None
    if pos is not None and pos.shape not in ((most,), (2 * most - 1,)):
        return None
    if ts is not None and (ts.dim() != 1 or ts.numel() == 0):
        return None
    return Layer(shape, parameters)


def bind(shape: Shape, place: Place, x: torch.Tensor, parameters: Parameters, seed: int) -> Bound | None:
    """The layer's call, or None where its arguments are of other kinds than those it takes, or do not fit.

    Offsets, lengths and counts are checked as by the ops, with their errors.
    """
    layer = prepare(shape, parameters)
    if layer is None or not _fits(layer, place, x):
        return None
    check_offsets("seq_offsets", place.seq_offsets, x.shape[0])
    check_lengths(place.seq_offsets, shape.max_seq_len)
    if place.num_targets is not None:
        _check_targets(place.num_targets, place.seq_offsets)
    return Bound(layer, place, x.shape[0], seed)


def _check_targets(counts: torch.Tensor, offsets: torch.Tensor) -> None:
    def check() -> None:
        check_counts("num_targets", counts, offsets.diff())

    if offsets.is_inference():
        check()
    else:  # `check_offsets` has them remembered, so that no other tensor gets their id meanwhile
        remembered(counts, ("targets", id(offsets), offsets._version), check)


def _fits(layer: Layer, place: Place, x: torch.Tensor) -> bool:
    tokens, samples = x.shape[0], place.seq_offsets.numel() - 1
    if tokens < 1 or x.shape != (tokens, layer.shape.dim) or x.dtype != torch.float32:
        return False
    if not x.is_contiguous() or x.is_neg() or (layer.entries[1] and place.timestamps is None):
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
