"""Rows of embeddings moved and summed: `gather_rows`, `scatter_rows`, `segment_sum`.

A move does no arithmetic, so every implementation returns the same bits, NaN payloads included.

A sum is out[segments[i]] += values[i], in a fixed order or in fixed point. D dim, K occurrences, S segments.
With values (5, D) and S = 4, of which segment 1 is empty::

    segments   2  0  2  3  2
    out[0] = values[1]                               out[1] = 0
    out[2] = (values[0] + values[2]) + values[4]     out[3] = values[3]

`consistency="window"` adds float32 in order of occurrence: deterministic, and equal in every bit between
implementations, but a function of the order. `consistency="batch"` rounds each value once to fixed point and
adds int64: the same for every order, split and rank. An int64 sum that would leave its range is an error,
never a wrap-around.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch

from tritonrec.kernels.autocast import FLOAT32, LOW
from tritonrec.kernels.dispatch import Impl, implementation, is_compiling
from tritonrec.kernels.fixed_point.errors import FRACTION_BITS, check_fraction_bits, report_sum
from tritonrec.kernels.fixed_point.op import round_to_fixed_point
from tritonrec.kernels.gradients import Terms
from tritonrec.kernels.op import Op
from tritonrec.kernels.padding import check_scalar, first_valid
from tritonrec.kernels.row_layout import check_matrix, check_rows

Consistency = Literal["window", "batch"]


class IndexedRows(NamedTuple):
    """Rows that are not gathered: row k is ``values[rows[k]]``."""

    values: torch.Tensor  # (R, D)
    rows: torch.Tensor  # (K,) int64 in [0, R)

    def gathered(self) -> torch.Tensor:
        """(K, D), as `gather_rows`."""
        return gather_rows(self.values, self.rows)

    def pooled(self, bags: torch.Tensor, num_bags: int) -> torch.Tensor:
        """(num_bags, D), the sums over the rows of each bag, of which ``bags[k]`` is that of row k.

        The bits, and those of the gradients, of ``segment_sum(self.gathered(), bags, num_bags)``.
        """
        return segment_sum(self.values, bags, num_bags, source=self.rows)


def gather_rows(
    source: torch.Tensor, rows: torch.Tensor, *, count: torch.Tensor | None = None, impl: Impl = "auto"
) -> torch.Tensor:
    """``out[k] = source[rows[k]]``.

    Args:
        source: (R, D), any dtype; row stride arbitrary, so a view of a wider buffer is fine.
        rows: (K,) int64 in [0, R); a row may occur many times.
        count: () int64, the number of valid rows (`kernels.padding`).
        impl: ``"auto"``, ``"triton"``, ``"cpu"`` or ``"reference"``.

    Returns:
        (K, D), contiguous, dtype of `source`; zeros behind `count`.

    Raises:
        IndexError: a row is outside the source (on an accelerator: an asynchronous device assertion).

    Differentiable in a `source` of float32, bf16 or fp16: the gradient of a row is the float32 sum of the
    gradients of its occurrences, added in order of occurrence (`segment_sum`, consistency "window").
    """
    return GATHER_ROWS(source, rows, count, impl=impl)


def scatter_rows(
    destination: torch.Tensor,
    rows: torch.Tensor,
    values: torch.Tensor,
    *,
    source: torch.Tensor | None = None,
    count: torch.Tensor | None = None,
    impl: Impl = "auto",
) -> None:
    """``destination[rows[k]] = values[k]``, in place; with `source` ``values[source[k]]``, in one pass.

    Args:
        destination: (R, D), any dtype, row stride arbitrary; mutated.
        rows: (K,) int64 in [0, R), distinct (not checked: with a repeated row the winner is unspecified).
        values: (K, D), with `source` (N, D) of any N; dtype of `destination`.
        source: (K,) int64 in [0, N); a row of `values` may be taken many times, or never.
        count: () int64, the number of valid rows (`kernels.padding`); the others are not written.
        impl: ``"auto"``, ``"triton"``, ``"cpu"`` or ``"reference"``.

    Raises:
        IndexError: a row is outside the destination or the values; the destination is unchanged (on an
            accelerator: an asynchronous device assertion).
        ValueError: shapes, dtypes or devices that do not fit; `destination` shares memory with another
            argument.

    Differentiable in destination and values, as `Tensor.index_copy_`: rows that are written get no gradient,
    and values the gradient of the row they went to; with `source` the float32 sum over the rows they went to
    (`segment_sum`, consistency "window"), for all floats but float64.
    """
    SCATTER_ROWS(destination, rows, values, source, count, impl=impl)


def segment_sum(
    values: torch.Tensor,
    segments: torch.Tensor,
    num_segments: int,
    *,
    consistency: Consistency = "window",
    out: torch.Tensor | None = None,
    fraction_bits: int = FRACTION_BITS,
    name: str = "tensor",
    source: torch.Tensor | None = None,
    count: torch.Tensor | None = None,
    status: torch.Tensor | None = None,
    impl: Impl = "auto",
) -> torch.Tensor:
    """Sum rows by segment; with `source` ``out[segments[k]] += values[source[k]]``, in one pass.

    With `source` it is the pooled lookup of an embedding bag (`IndexedRows.pooled`), and its derivative is
    the same sum with `segments` and `source` exchanged: what neither writes are the (K, D) rows in between.

    Args:
        values: (K, D), with `source` (N, D) of any N; float32, bf16 or fp16, for consistency "batch" also
            int64, in fixed point already.
        segments: (K,) int64 in [0, num_segments), in any order.
        consistency: "window" (float32 in order of occurrence) or "batch" (int64, of 2**-fraction_bits).
        out: (S, D) to add to in place, float32 or int64 as the consistency asks, contiguous rows; not
            differentiable. Without it the sums start from zero.
        name: what an error calls the rows that are added.
        source: (K,) int64 in [0, N); a row of `values` may be taken many times, or never.
        count: () int64, the number of valid occurrences; the others are not added (`kernels.padding`).
        status: () int64, mutated: takes 1 + row * D + column of the first value that cannot be added, for
            `check_summed`, where otherwise the host would wait to raise ExactSumError. Consistency "window"
            can add every value and leaves it alone.
        impl: ``"auto"``, ``"triton"``, ``"cpu"`` or ``"reference"``.
    Returns:
        (S, D) float32 or int64; `out` itself where it was given. "window" without `out` is differentiable
        in `values`: the gradient of a row is that of its segment, with `source` the float32 sum over its
        occurrences in their order.
    Raises:
        ExactSumError: consistency "batch": a value is not finite or too large, or a sum leaves int64. `out`
            then holds a part of the sum and has to be discarded. A device without int64 atomics adds up more
            than 128 rows of a segment in parts: where their sum leaves int64, it names the first row of one.
        IndexError: a segment outside [0, num_segments), or a source outside [0, N); nothing was added.
        ValueError: an argument of another shape, dtype or range; `out` or `status` shares memory with
            another argument.
        RuntimeError: `out` is float32, and it or `values` requires a gradient.
    """
    options = consistency, fraction_bits, name, count, source
    if out is None and (status is None or consistency == "window"):
        check_scalar("status", status)
        return SEGMENT_SUM(values, segments, num_segments, *options, impl=impl)
    if out is None:
        out = zero_sums(values, num_segments, consistency)
    SEGMENT_SUM_INTO(out, values, segments, num_segments, *options, status, impl=impl)
    return out


# Reference: rows moved and summed one at a time; in fixed point with Python's unbounded integers.


def gather_rows_reference(source, rows, count) -> torch.Tensor:
    """See `gather_rows`."""
    out = source.new_zeros((rows.numel(), source.shape[1]))
    for position, row in enumerate(first_valid(rows, count).tolist()):
        out[position] = source[row]
    return out


def scatter_rows_reference(destination, rows, values, source, count) -> None:
    """See `scatter_rows`."""
    for position, row in enumerate(first_valid(rows, count).tolist()):
        destination[row] = values[position if source is None else source[position]]


def segment_sum_into_reference(
    out, values, segments, num_segments, consistency, fraction_bits, name, count, source, status=None
) -> None:
    """See `segment_sum`, with `out`."""
    if source is not None:
        values = gather_rows_reference(values, source, count)
    code, segments_of_rows = 0, first_valid(segments, count)
    if consistency == "window":
        for row, segment in enumerate(segments_of_rows.tolist()):
            out[segment] = out[segment] + values[row]
    else:
        code = add_batch(out, values.tolist(), segments_of_rows, fraction_bits)
    report_sum(code, status, name, values, segments, fraction_bits)


def zero_sums(values: torch.Tensor, num_segments: int, consistency: str) -> torch.Tensor:
    """(S, D) zeros to add `values` to: float32 for consistency "window", int64 for "batch"."""
    if not isinstance(values, torch.Tensor) or values.dim() != 2:
        check_matrix("values", values, torch.float32)
    check_room(num_segments, values.shape[1])
    dtype = torch.float32 if consistency == "window" else torch.int64
    return torch.zeros(num_segments, values.shape[1], dtype=dtype, device=values.device)


def check_room(num_segments: int, dim: int) -> None:
    """Refuse a number of sums that no memory has room for; torch's error would not name it."""
    if not 0 <= num_segments * dim < 1 << 60:
        raise ValueError(f"num_segments = {num_segments} rows of {dim} columns fit no memory")


def segment_sum_of_zeros(
    add: Callable[..., None], values, segments, num_segments, consistency, *rest
) -> torch.Tensor:
    """See `segment_sum`: zeros to which the op with `out` adds."""
    out = zero_sums(values, num_segments, consistency)
    add(out, values, segments, num_segments, consistency, *rest)
    return out


def add_batch(
    out: torch.Tensor, values: list[list[int | float]], segments: torch.Tensor, fraction_bits: int
) -> int:
    """1 + row * D + column of the first value that cannot be added, or 0."""
    for row, segment in enumerate(segments.tolist()):
        for column, value in enumerate(values[row]):
            # Python's integers have no bound: a sum that leaves int64 is seen before it is stored.
            term = value if isinstance(value, int) else round_to_fixed_point(value, fraction_bits)
            if term is None or not -(2**63) <= out[segment, column].item() + term < 2**63:
                return 1 + row * out.shape[1] + column
            out[segment, column] += term
    return 0


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
    # Terms and no sum: an active accumulator adds them in fixed
    # point, and autograd gets their float32 sum otherwise.
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

    def add_in_order(self, sums: torch.Tensor, scale_exponent: int = 0) -> None:
        """As `Terms.add_in_order`."""
        options = "window", FRACTION_BITS, "gradient", self._count, self._source
        values = self._values.detach()
        if scale_exponent:
            # A power of two: no bit is lost but in subnormal numbers.
            values = values * 2.0**-scale_exponent
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
    reference=gather_rows_reference, cpu="numba_rows:gather_rows", triton="triton_rows:gather_rows",
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
        # What was overwritten has no part in the result.
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
    reference=scatter_rows_reference, cpu="numba_rows:scatter_rows", triton="triton_rows:scatter_rows",
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
        check_room(num_segments, values.shape[1])
    dtype = torch.float32 if consistency == "window" else torch.int64
    return torch.empty(num_segments, values.shape[1], dtype=dtype, device=values.device)


def _save_sums(ctx, inputs, output) -> None:
    values, segments, _, _, _, _, count, source, ctx.impl = inputs
    ctx.num_values = values.shape[0]
    ctx.save_for_backward(segments, count, source)


def _differentiate_sums(ctx, grad: torch.Tensor):
    segments, count, source = ctx.saved_tensors
    if source is None:
        # A row's gradient is its segment's.
        return GATHER_ROWS(grad, segments, count, impl=ctx.impl), *(None,) * 7
    # the same sum with the two lists of rows exchanged
    return IndexedTerms(grad, source, ctx.num_values, count, ctx.impl, segments), *(None,) * 7


def _check_out(out, values, num_segments, consistency, status) -> None:
    check_matrix("out", out, torch.float32 if consistency == "window" else torch.int64, in_place=True)
    if out.shape[0] != num_segments or out.shape[1] != values.shape[1]:
        raise ValueError(f"out must be ({num_segments}, {values.shape[1]}), got {tuple(out.shape)}")
    check_scalar("status", status)


SEGMENT_SUM_INTO = Op(
    "segment_sum_into(Tensor(a!) out, Tensor values, Tensor segments, int num_segments, str consistency, "
    "int fraction_bits, str name, Tensor? count, Tensor? source, Tensor(b!)? status) -> ()",
    reference=segment_sum_into_reference, cpu="numba_segment_sum:segment_sum_into",
    triton="triton_segment_sum:segment_sum_into",
    check=(_check_sums, _check_out), check_memory=_check_segments, widens=True,
    autocast={"values": FLOAT32},
)  # fmt: skip
SEGMENT_SUM = Op(
    "segment_sum(Tensor values, Tensor segments, int num_segments, str consistency, int fraction_bits, "
    "str name, Tensor? count, Tensor? source) -> Tensor",
    reference=segment_sum_of_zeros, over=SEGMENT_SUM_INTO,
    check=_check_sums, check_memory=_check_segments, fake=_fake_sums,
    save=_save_sums, backward=_differentiate_sums, widens=True, autocast={"values": FLOAT32},
)  # fmt: skip
