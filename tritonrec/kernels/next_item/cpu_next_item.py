"""Small micro-batches of a next-item model on the CPU, for trainers that sum gradients exactly.

A micro-batch of a few hundred tokens pays for each tensor that is made, looked at or asked for its address.
Here memory and the tables of addresses are made once for many micro-batches, of which each one writes down
where its own tensors are, and kernels follow each other. The kernels are those of `cpu_hstu_layer`,
`cpu_normed_losses` and `cpu_token_rows`, so the bits are theirs.

Dimensions: L tokens, B samples, K negatives per token, D features, N layers, R rows of a matrix.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from tritonrec.kernels.deferred import refuse
from tritonrec.kernels.fixed_point.errors import report_sum, sum_error
from tritonrec.kernels.gradients import Targets
from tritonrec.kernels.hstu_layer.cpu_hstu_layer import ALIGNED, Layer, report_sums
from tritonrec.kernels.normed_losses.cpu_normed_losses import report_terms
from tritonrec.kernels.op import annotation
from tritonrec.kernels.philox.reference import derive_seed, halves

SPARE = 1.25
"""Room over what the largest micro-batch so far has needed."""


class Sizes(NamedTuple):
    """Of a micro-batch: L, B and L * K."""

    tokens: int
    samples: int
    pairs: int


class Parts(NamedTuple):
    """The model: its parameters in float32, and the sums of their gradients.

    Args:
        layers, sums_of_layers: of each layer.
        positions: (longest sequence, D). norm: weight and bias (D,), eps: of it.
        timed: layers look at timestamps. factor: of the rows of tokens. scale: 1 / temperature.
    """

    layers: list[Layer]
    sums_of_layers: list[Targets]
    positions: torch.Tensor
    sums_of_positions: Targets
    norm: tuple[torch.Tensor, torch.Tensor]
    sums_of_norm: Targets
    eps: float
    timed: bool
    factor: float
    scale: float


class Room:
    """Memory for one micro-batch at a time: `begin`, `forward`, then `backward`.

    Args:
        parts: whose memory stays where it is.
        sizes: the largest that fit.
    """

    def __init__(self, parts: Parts, sizes: Sizes):
        from tritonrec.kernels.hstu_layer import numba_hstu_layer
        from tritonrec.kernels.normed_losses import numba_normed_losses
        from tritonrec.kernels.rows import numba_segment_sum
        from tritonrec.kernels.token_rows import numba_token_rows

        self._parts, self.sizes = parts, sizes
        self._of_layers, self._of_losses = numba_hstu_layer, numba_normed_losses
        self._of_tokens, self._of_rows = numba_token_rows, numba_segment_sum
        room, dim, count = sizes.tokens, parts.positions.shape[1], len(parts.layers)
        self._dim, self._places = dim, _new((3, room), torch.int64)
        self._valid = _new((sizes.pairs,), torch.bool)
        self._rows, self._drows = _new((2 * room, dim)), _new((2 * room, dim))
        self._x, self._dx = _new((count + 1, room, dim)), _new((count + 1, room, dim))
        self._kept = [_new((_aligned(room) * int(layer.starts[-1]),)) for layer in parts.layers]
        self._hidden, self._slopes = _new((room, dim)), _new((sizes.pairs,))
        self._terms = [_new((room, dim)) for _ in range(2)]  # of the norm's weight and bias
        self._dhidden, self._statistics = _new((room, dim)), _new((2, room))
        self._tokens = self._table_of_tokens()
        self._layers = self._table_of_layers()
        self._losses = self._table_of_losses()
        # the same memory, as kernels of few arguments take it
        self._first_dx, self._first_drows = self._dx[0].numpy().reshape(-1), self._drows.numpy().reshape(-1)
        self._positions = self._places[1].numpy()
        self._sums_of_positions = parts.sums_of_positions.sums[0].numpy().reshape(-1)
        self._limits = [_limits(each.fraction_bits) for each in parts.sums_of_layers]
        self._bad = np.full((numba_hstu_layer.SUMS, 3), -1, np.int64), np.zeros(10, np.float32)
        self._seed: int | None = None
        self._now = Sizes(0, 0, 0)

    def _table_of_tokens(self) -> np.ndarray:
        at, weight = self._of_tokens, self._parts.positions
        table = np.zeros(at.SIZE, np.int64)
        table[[at.DIM, at.LONGEST, at.STRIDE]] = self._dim, len(weight), self.sizes.tokens
        table[[at.ROWS, at.WEIGHT, at.PLACES]] = _addresses(self._rows, weight, self._places)
        table[[at.X, at.VALID]] = _addresses(self._x, self._valid)
        return table

    def _table_of_layers(self) -> np.ndarray:
        """(N, ...), one for each layer."""
        at, layers, room = self._of_layers, self._parts.layers, self.sizes.tokens
        tables = np.zeros((len(layers), at.SUM_UVQK_BIAS + 1), np.int64)
        self._reads = np.zeros((len(layers), at.NORM_WEIGHT - at.OFFSETS), np.int64)
        for number, (layer, sums) in enumerate(zip(layers, self._parts.sums_of_layers, strict=True)):
            table, drops, timed = tables[number], layer.shape.dropout > 0, layer.entries[1] > 0
            # Factors of the addresses in `begin`: 0 for what the layer does not read.
            self._reads[number] = 1, 0, drops, drops, timed, timed
            table[:] = layer.table
            table[at.X], table[at.OUT] = _addresses(self._x[number], self._x[number + 1])
            table[at.DX], table[at.DY] = _addresses(self._dx[number], self._dx[number + 1])
            places = self._kept[number].data_ptr() + 4 * _aligned(room) * layer.starts
            # Kept parts lie one after another, each over all rows of the room: part p begins at starts[p]
            # columns.
            table[at.Z : at.OUT] = places[:8]
            table[at.NORMED] = places[8] if layer.shape.keep_normed else 0
            table[at.SUM_OUTPUT_WEIGHT :] = layer.sums_of(sums)
        return tables

    def _table_of_losses(self) -> np.ndarray:
        at, parts = self._of_losses, self._parts
        table = np.zeros(at.SIZE, np.int64)
        table[at.DIM] = self._dim
        table[[at.HIDDEN, at.VALID, at.DHIDDEN]] = _addresses(self._hidden, self._valid, self._dhidden)
        table[[at.SLOPES, at.X]] = _addresses(self._slopes, self._x[-1])
        table[[at.WEIGHT, at.BIAS]] = _addresses(*parts.norm)
        table[[at.MEANS, at.RSTDS]] = _addresses(*self._statistics)
        table[[at.DX, at.DWEIGHT, at.DBIAS]] = _addresses(self._dx[-1], *self._terms)
        table[[at.SUM_WEIGHT, at.SUM_BIAS]] = _addresses(*parts.sums_of_norm.sums)
        return table

    def holds(self, sizes: Sizes) -> bool:
        """Whether a micro-batch fits."""
        own = self.sizes
        return own.tokens >= sizes.tokens and own.samples >= sizes.samples and own.pairs >= sizes.pairs

    def begin(
        self,
        seq_offsets: torch.Tensor,
        sample_ids: torch.Tensor,
        timestamps: torch.Tensor | None,
        labels: torch.Tensor,
        negatives: torch.Tensor,
        matrix: torch.Tensor,
        rows: torch.Tensor,
        seed: int,
    ) -> bool:
        """Place a micro-batch here; False where its offsets or numbers of rows do not fit.

        Args:
            seq_offsets: (B + 1,). sample_ids: (B,). timestamps, labels: (L,). negatives: (L, K).
            matrix: (R, D) float32. rows: (L + L + L*K,), of tokens, labels and negatives; those of negatives
                are taken to be right. All but the matrix are int64, and all are contiguous.
            seed: of dropout.

        They stay until the end of `backward`.
        """
        tokens, count = negatives.shape
        self._now = now = Sizes(tokens, sample_ids.shape[0], tokens * count)
        offsets, times = seq_offsets.data_ptr(), 0 if timestamps is None else timestamps.data_ptr()
        values, height, first = matrix.data_ptr(), matrix.shape[0], rows.data_ptr()
        at, table = self._of_tokens, self._tokens
        table[at.SAMPLES : at.DIM] = now.samples, tokens
        table[at.OFFSETS : at.ROWS] = (
            offsets, sample_ids.data_ptr(), times, values, height, first, labels.data_ptr(),
            negatives.data_ptr(), count,
        )  # fmt: skip
        if not at.begin(table, np.float32(self._parts.factor)):
            return False
        # The three rows of `_places`: int64, one entry a token.
        own, positions, asked = (self._places.data_ptr() + 8 * self.sizes.tokens * each for each in range(3))
        where = self._of_layers
        tables = self._layers
        tables[:, : where.DIM] = now.samples, tokens
        np.multiply(
            self._reads, (offsets, 0, own, positions, times, asked if times else 0),
            out=tables[:, where.OFFSETS : where.NORM_WEIGHT],
        )  # fmt: skip
        if seed != self._seed:
            seeds = (derive_seed(seed, number, 0) for number in range(len(tables)))
            tables[:, where.KEY_0 : where.TAG] = np.reshape([halves(each) for each in seeds], (-1, 2))
            self._seed = seed
        losses, table = self._of_losses, self._losses
        table[losses.TOKENS], table[losses.COUNT] = tokens, count
        table[losses.SAMPLES : losses.HIDDEN] = now.samples, offsets
        # 16 bytes a token: behind the numbers of the rows of tokens and of labels come those of negatives.
        table[losses.MATRIX : losses.SLOPES] = values, height, first + 16 * tokens
        return True

    def forward(self) -> torch.Tensor:
        """Losses (B,)."""
        losses = _new((self._now.samples,))
        of_layers, of_losses, samples = self._of_layers, self._of_losses, self._now.samples
        for table, layer in zip(self._layers, self._parts.layers, strict=True):
            with annotation("hstu_layer"):
                of_layers.forward(table, layer.numbers, 0, samples)
        table, eps, scale = self._losses, np.float32(self._parts.eps), np.float32(self._parts.scale)
        # Rows of the labels follow those of the L tokens, without a gap, whatever the room.
        labels = self._rows.data_ptr() + 4 * self._now.tokens * self._dim
        with annotation("normed_losses"):
            table[of_losses.ITEMS], table[of_losses.LOSSES] = labels, losses.data_ptr()
            of_losses.forward(table, eps, scale, 0, samples)
        return losses

    def backward(self, dlosses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """By the gradients of the losses (B,), contiguous: values (L + L, D) of tokens and labels, hidden
        states (L, D) and slopes (L * K,) of negatives. Those of parameters are added to their sums.

        All are views of memory that the next micro-batch writes to. Raises `ExactSumError`.
        """
        of_layers, of_losses, samples = self._of_layers, self._of_losses, self._now.samples
        tokens, pairs, dim = self._now.tokens, self._now.pairs, self._dim
        table, scale = self._losses, np.float32(self._parts.scale)
        dlabels = self._drows.data_ptr() + 4 * tokens * dim
        with annotation("normed_losses_backward"):
            table[of_losses.LOSSES], table[of_losses.DITEMS] = dlosses.data_ptr(), dlabels
            of_losses.backward(table, scale, 0, samples)
            targets = self._parts.sums_of_norm
            found = of_losses.add_terms(table, *_limits(targets.fraction_bits))
            if found != (-1, -1):
                report_terms(found, [each[:tokens] for each in self._terms], targets)
        #     x[0] -> layer 0 -> x[1] -> ... -> x[N] -> norm, losses        and back: dx[N] -> ... -> dx[0]
        for number in reversed(range(len(self._layers))):
            with annotation("hstu_layer_backward"):
                if of_layers.backward_exact(
                    self._layers[number],
                    self._parts.layers[number].numbers,
                    *self._limits[number],
                    *self._bad,
                ):
                    self._report_layer(number)
        self._add_positions()
        # x[0] = factor * row + position: a row's gradient is multiplied by the factor, a position's is not.
        first = self._first_dx[: tokens * dim]
        np.multiply(first, np.float32(self._parts.factor), out=self._first_drows[: tokens * dim])
        return self._drows[: 2 * tokens], self._hidden[:tokens], self._slopes[:pairs]

    def _report_layer(self, number: int) -> None:
        bad, values = (each.copy() for each in self._bad)
        self._bad[0].fill(-1)
        report_sums(self._parts.layers[number], bad, values, self._parts.sums_of_layers[number])

    def _add_positions(self) -> None:
        tokens, dim, targets = self._now.tokens, np.uintp(self._dim), self._parts.sums_of_positions
        at = self._of_rows
        bad = at.add_batch(
            self._sums_of_positions, dim, self._first_dx, dim, self._positions[:tokens], at.NO_ROWS, dim,
            *_limits(targets.fraction_bits),
        )  # fmt: skip
        if bad >= 0:
            name, places = f"gradient of {targets.names[0]}", self._places[1, :tokens]
            report_sum(bad + 1, None, name, self._dx[0, :tokens], places, targets.fraction_bits)


def add_row_gradients(
    out: torch.Tensor,
    rows: torch.Tensor,
    values: torch.Tensor,
    hidden: torch.Tensor,
    slopes: torch.Tensor,
    fraction_bits: int,
    name: str,
) -> None:
    """Add the gradients of a micro-batch's rows to exact sums, occurrence by occurrence in their order.

    Args:
        out: (R, D) int64. rows: (L + L + L*K,) int64, which are taken to be right.
        values: (L + L, D), of tokens and labels. hidden: (L, D), slopes: (L * K,): a negative's is its slope
            times its token's hidden state. All are contiguous.

    Raises `ExactSumError`, which calls the gradients `name`.
    """
    from tritonrec.kernels.next_item import numba_next_item as at

    (count, dim), tokens, pairs = values.shape, hidden.shape[0], slopes.shape[0]
    if not count or not dim:
        return
    table = np.array(
        [
            out.data_ptr(), out.shape[0], dim, rows.data_ptr(), values.data_ptr(), count, hidden.data_ptr(),
            tokens, slopes.data_ptr(), pairs,
        ],
        np.int64,
    )  # fmt: skip
    bad = at.add_row_gradients(table, *_limits(fraction_bits))
    if bad >= 0:
        row, column = divmod(bad, dim)
        # pairs = L K: a negative's number over K is its token.
        at_token = (row - count) * tokens // max(pairs, 1)
        value = values[row, column] if row < count else slopes[row - count] * hidden[at_token, column]
        refuse(sum_error(name, (row, column), value.item(), int(rows[row]), fraction_bits))


def _limits(fraction_bits: int) -> tuple[float, np.float32]:
    """What a value is multiplied by, and what it has to stay below."""
    return 2.0**fraction_bits, np.float32(2.0 ** (62 - fraction_bits))


def _new(shape: Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="cpu")


def _aligned(tokens: int) -> int:
    return -(-tokens // ALIGNED) * ALIGNED


def _addresses(*tensors: torch.Tensor) -> list[int]:
    return [each.data_ptr() for each in tensors]
