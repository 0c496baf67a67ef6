"""Registration of `gather_rows`, `scatter_rows` and `segment_sum`, of which each is another's derivative."""

from __future__ import annotations

from typing import Any

import torch

from tritonrec.kernels.autocast import FLOAT32, LOW
from tritonrec.kernels.dispatch import Impl, implementation, is_compiling
from tritonrec.kernels.fixed_point.errors import FRACTION_BITS, check_fraction_bits
from tritonrec.kernels.gradients import Terms
from tritonrec.kernels.op import Op
from tritonrec.kernels.padding import check_scalar
from tritonrec.kernels.row_layout import check_matrix, check_rows
from tritonrec.kernels.rows import reference


def _check_gather(source, rows, count) -> None:
    _check_rows_of("source", source, "rows", rows)
    check_scalar("count", count)


def _check_rows_of(name: str, matrix: torch.Tensor, name_of_rows: str, rows: torch.Tensor) -> None:
    if matrix.dim() != 2:
        raise ValueError(f"{name} must be (R, D), got shape {tuple(matrix.shape)}")
    if rows.dtype != torch.int64 or rows.dim() != 1:
        raise ValueError(f"{name_of_rows} must be (K,) int64, got shape {tuple(rows.shape)} {rows.dtype}")


def _check_source(source, rows, count) -> None:
    check_rows("rows", rows, source.shape[0], count)


def _fake_gather(source, rows):
    return source.new_empty((rows.shape[0], source.shape[1]))


def _save_gather(ctx, inputs, output) -> None:
    source, rows, count, ctx.impl = inputs
    ctx.num_rows = source.shape[0]
    ctx.save_for_backward(rows, count)


def _differentiate_gather(ctx, grad: torch.Tensor):
    rows, count = ctx.saved_tensors
    if grad.dtype not in (torch.float32, *LOW):
        raise ValueError(
            f"gather_rows is differentiable in a source of float32, bfloat16 or float16, got {grad.dtype}: "
            "use .float()"
        )
    return IndexedTerms(grad, rows, ctx.num_rows, count, ctx.impl), None, None


class IndexedTerms(Terms):
    """Terms (K, D), of which the k-th belongs to row ``rows[k]`` of a parameter (R, D).

    With `source` (K,) the k-th one is ``values[source[k]]``, of values (N, D).
    """

    def __init__(
        self,
        values: torch.Tensor,
        rows: torch.Tensor,
        num_rows: int,
        count: torch.Tensor | None = None,
        impl: Impl = "auto",
        source: torch.Tensor | None = None,
    ):
        self._values, self._rows, self._num_rows = values, rows, num_rows
        self._count, self._impl, self._source = count, impl, source

    def total(self) -> torch.Tensor:
        """Sums (R, D) float32, in order of occurrence."""
        options = "window", FRACTION_BITS, "gradient", self._count, self._source
        return SEGMENT_SUM(self._values, self._rows, self._num_rows, *options, impl=self._impl)

    def add_to(self, sums: torch.Tensor, fraction_bits: int, name: str) -> None:
        """As `Terms.add_to`."""
        options = "batch", fraction_bits, f"gradient of {name}", self._count, self._source
        values = self._values.detach()
        SEGMENT_SUM_INTO.launch(sums, values, self._rows, self._num_rows, *options, impl=self._impl)


class ProductTerms(Terms):
    """Terms ``factors[l, k] * values[l]`` of rows ``rows[l, k]`` of a parameter (R, D); all are (L, K).

    But for a reference the L K terms are in no memory.
    """

    def __init__(
        self, values: torch.Tensor, factors: torch.Tensor, rows: torch.Tensor, num_rows: int, impl: Impl
    ):
        self._values, self._factors, self._rows = values, factors, rows.reshape(-1)
        self._num_rows, self._impl = num_rows, impl

    def total(self) -> torch.Tensor:
        """Sums (R, D) float32, in order of occurrence."""
        # in a gradient that is to be differentiated again, autograd has to see the products
        if not self._fused() or torch.is_grad_enabled():
            return self._apart().total()
        sums = self._values.new_zeros(self._num_rows, self._values.shape[1])
        self._add(sums, "window", FRACTION_BITS, "gradient")
        return sums

    def add_to(self, sums: torch.Tensor, fraction_bits: int, name: str) -> None:
        """As `Terms.add_to`."""
        if self._fused():
            self._add(sums, "batch", fraction_bits, f"gradient of {name}")
        else:
            self._apart().add_to(sums, fraction_bits, name)

    def _fused(self) -> bool:
        if is_compiling() or self._values.dtype != torch.float32:
            return False
        return implementation(self._impl, self._values) != "reference"

    def _add(self, sums: torch.Tensor, *options: Any) -> None:
        if implementation(self._impl, self._values) == "triton":
            from tritonrec.kernels.rows.triton_segment_sum import add_products
        else:
            from tritonrec.kernels.rows.numba_segment_sum import add_products

        add_products(sums, self._values.detach(), self._factors.detach().reshape(-1), self._rows, *options)

    def _apart(self) -> IndexedTerms:
        """The same terms, each in memory."""
        terms = self._factors.unsqueeze(2) * self._values.unsqueeze(1)
        return IndexedTerms(terms.flatten(0, 1), self._rows, self._num_rows, None, self._impl)


GATHER_ROWS = Op(
    "gather_rows(Tensor source, Tensor rows, Tensor? count) -> Tensor",
    reference=reference.gather_rows, cpu="numba_rows:gather_rows", triton="triton_rows:gather_rows",
    check=_check_gather, check_memory=_check_source, fake=_fake_gather,
    save=_save_gather, backward=_differentiate_gather,
)  # fmt: skip


def _check_scatter(destination, rows, values, source, count) -> None:
    _check_rows_of("destination", destination, "rows", rows)
    if source is not None:
        _check_rows_of("values", values, "source", source)
        if source.shape != rows.shape:
            raise ValueError(f"rows and source must be equally many, got {len(rows)} and {len(source)}")
    length = rows.shape[0] if source is None else values.shape[0]
    if values.shape != (length, destination.shape[1]) or values.dtype != destination.dtype:
        raise ValueError(
            f"values must be {(length, destination.shape[1])} {destination.dtype}, "
            f"got {tuple(values.shape)} {values.dtype}"
        )
    check_scalar("count", count)


def _check_places(destination, rows, values, source, count) -> None:
    check_rows("rows", rows, destination.shape[0], count)
    if source is not None:
        check_rows("source", source, values.shape[0], count)


def _save_scatter(ctx, inputs, output) -> None:
    _, rows, values, source, count, ctx.impl = inputs
    ctx.num_values, ctx.dtype = len(values), values.dtype
    ctx.save_for_backward(rows, source, count)


def _differentiate_scatter(ctx, grad: torch.Tensor):
    rows, source, count = ctx.saved_tensors
    kept = taken = None
    if ctx.needs_input_grad[0]:
        kept = grad.clone()
        zeros = kept.new_zeros(len(rows), kept.shape[1])
        SCATTER_ROWS(kept, rows, zeros, None, count, impl=ctx.impl)
    if ctx.needs_input_grad[2]:
        taken = GATHER_ROWS(grad, rows, count, impl=ctx.impl)
        if source is not None and ctx.dtype not in (torch.float32, *LOW):
            raise ValueError(
                "scatter_rows with source is differentiable in values of float32, bfloat16 or float16, got "
                f"{ctx.dtype}: use .float()"
            )
        if source is not None:
            taken = IndexedTerms(taken, source, ctx.num_values, count, ctx.impl).total()
    return kept, None, taken, None, None


SCATTER_ROWS = Op(
    "scatter_rows(Tensor(a!) destination, Tensor rows, Tensor values, Tensor? source, Tensor? count) -> ()",
    reference=reference.scatter_rows, cpu="numba_rows:scatter_rows", triton="triton_rows:scatter_rows",
    check=_check_scatter, check_memory=_check_places,
    save=_save_scatter, backward=_differentiate_scatter,
)  # fmt: skip


def _check_sums(values, segments, num_segments, consistency, fraction_bits, count, source) -> None:
    if consistency not in ("window", "batch"):
        raise ValueError(f"consistency must be 'window' or 'batch', got {consistency!r}")
    in_fixed_point = consistency == "batch" and values.dtype == torch.int64
    taken = in_fixed_point or values.dtype in LOW
    check_matrix("values", values, values.dtype if taken else torch.float32)
    if source is not None:
        _check_rows_of("values", values, "source", source)
    other, occurrences = ("values", values) if source is None else ("source", source)
    if segments.dim() != 1 or segments.dtype != torch.int64 or segments.shape[0] != occurrences.shape[0]:
        raise ValueError(
            f"segments must be ({occurrences.shape[0]},) int64 to go with {other} "
            f"{tuple(occurrences.shape)}, got {tuple(segments.shape)} {segments.dtype}"
        )
    if num_segments < 0:
        raise ValueError(f"num_segments must not be negative, got {num_segments}")
    check_fraction_bits(fraction_bits)
    check_scalar("count", count)


def _check_segments(values, segments, num_segments, count, source) -> None:
    check_rows("segments", segments, num_segments, count)
    if source is not None:
        check_rows("source", source, values.shape[0], count)


def _fake_sums(values, num_segments, consistency):
    if isinstance(num_segments, int) and isinstance(values.shape[1], int):  # not of a traced graph
        reference.check_room(num_segments, values.shape[1])
    dtype = torch.float32 if consistency == "window" else torch.int64
    return torch.empty(num_segments, values.shape[1], dtype=dtype, device=values.device)


def _save_sums(ctx, inputs, output) -> None:
    values, segments, _, _, _, _, count, source, ctx.impl = inputs
    ctx.num_values = values.shape[0]
    ctx.save_for_backward(segments, count, source)


def _differentiate_sums(ctx, grad: torch.Tensor):
    segments, count, source = ctx.saved_tensors
    if source is None:
        return GATHER_ROWS(grad, segments, count, impl=ctx.impl), *(None,) * 7
    # the same sum with the two lists of rows exchanged
    return IndexedTerms(grad, source, ctx.num_values, count, ctx.impl, segments), *(None,) * 7


SEGMENT_SUM = Op(
    "segment_sum(Tensor values, Tensor segments, int num_segments, str consistency, int fraction_bits, "
    "str name, Tensor? count, Tensor? source) -> Tensor",
    reference=reference.segment_sum, cpu="numba_segment_sum:segment_sum",
    triton="triton_segment_sum:segment_sum",
    check=_check_sums, check_memory=_check_segments, fake=_fake_sums,
    save=_save_sums, backward=_differentiate_sums, widens=True, autocast={"values": FLOAT32},
)  # fmt: skip


def _check_out(out, values, num_segments, consistency, status) -> None:
    check_matrix("out", out, torch.float32 if consistency == "window" else torch.int64, in_place=True)
    if out.shape[0] != num_segments or out.shape[1] != values.shape[1]:
        raise ValueError(f"out must be ({num_segments}, {values.shape[1]}), got {tuple(out.shape)}")
    check_scalar("status", status)


SEGMENT_SUM_INTO = Op(
    "segment_sum_into(Tensor(a!) out, Tensor values, Tensor segments, int num_segments, str consistency, "
    "int fraction_bits, str name, Tensor? count, Tensor? source, Tensor(b!)? status) -> ()",
    reference=reference.segment_sum_into, cpu="numba_segment_sum:segment_sum_into",
    triton="triton_segment_sum:segment_sum_into",
    check=(_check_sums, _check_out), check_memory=_check_segments, widens=True,
    autocast={"values": FLOAT32},
)  # fmt: skip
