"""Two pieces of a step's work, each with its input and results, and how another rank computes them again.

Both run the stage itself: `compute` on one micro-batch, and the schedule's `sparse_update` on some rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...kernels import launch
from ...kernels.checksums import checksum
from ...pipeline.dist_plan import InputDist, RowDist
from ...pipeline.places import (
    Buffer,
    Context,
    Dense,
    DenseGradient,
    Embeddings,
    GradientNorm,
    Gradients,
    Losses,
    MeanGradient,
    Outputs,
    OwnedRows,
    Routes,
    RowGradient,
    TableRows,
)
from ...pipeline.stage import Stage, signature_of
from ...pipeline.stages import compute
from ...pipeline.window import Window
from .messages import rebuilt

NOWHERE = RowDist([], [])


@dataclass(frozen=True)
class Work:
    """What a rank computed: `inputs` that another rank can repeat it from, and the `results`."""

    inputs: list[torch.Tensor]
    results: list[torch.Tensor]

    @property
    def checksums(self) -> torch.Tensor:
        """(n,) int64 of the results."""
        return checksums(self.results)


def checksums(results: Sequence[torch.Tensor]) -> torch.Tensor:
    """(n,) int64, on the host."""
    return torch.stack([checksum(each).cpu() for each in results])


class MicroBatch:
    """The forward and backward of one micro-batch, from before its `compute` to after it.

    Sums of gradients are int64, or this is the first micro-batch of the window, whose sums begin at zero.
    """

    def __init__(
        self, micro_batch: int, routes: Routes, gradients: Gradients, embeddings: Embeddings, dense: Dense
    ):
        self._at, self._routes, self._gradients = micro_batch, routes, gradients
        self._random = torch.get_rng_state()
        self._looked_up = [launch.unique(table.inverse[micro_batch])[:2] for table in routes.tables]
        received = zip(embeddings, self._looked_up, strict=True)
        self._rows = [launch.gather_rows(values, rows) for values, (rows, _inverse) in received]
        # Integer sums: what this micro-batch added is the difference of after and before, exactly. The first
        # micro-batch finds no sums yet (`gradients` is empty).
        self._before = [sums[rows] for sums, (rows, _) in zip(gradients, self._looked_up, strict=False)]
        self._dense_before = dense.flight.accumulator.so_far()

    def done(self, batch: Any, losses: Losses, dense: Dense) -> Work:
        """The work, after `compute` of the `batch`."""
        sums = [each[rows] for each, (rows, _) in zip(self._gradients, self._looked_up, strict=True)]
        if self._before:
            sums = [after - before for after, before in zip(sums, self._before, strict=True)]
        of_parameters = dense.flight.accumulator.so_far() - self._dense_before
        inputs = [self._random, *batch.tensors()]
        for (_rows, inverse), values in zip(self._looked_up, self._rows, strict=True):
            inputs += [inverse, values]
        parameters = dense.flight.accumulator.views(of_parameters).values()
        return Work(inputs, [losses[self._at].clone(), *sums, *parameters])


def names_of_micro_batch(context: Context, dense: Dense) -> list[str]:
    """Names of the results of `MicroBatch`."""
    tables = [f"the gradient of the rows of {group.layout}" for group in context.tables.groups]
    parameters = dense.flight.accumulator.views(dense.flight.accumulator.so_far())
    return ["the losses", *tables, *(f"the gradient of {name}" for name in parameters)]


def compute_again(
    inputs: Sequence[torch.Tensor], like: Any, context: Context, window: Window, routes: Routes, dense: Dense
) -> list[torch.Tensor]:
    """The results of a `MicroBatch` from its inputs; `like` is a micro-batch of the same batch.

    No micro-batch may be under way; it leaves no trace in the model.
    """
    random, *rest = inputs
    values = iter(rest)
    batch = rebuilt(like, values)
    tables, embeddings = [], Embeddings([])
    # One iterator twice: it has the inverse and the rows of a table by turns, as `MicroBatch.done` wrote
    # them.
    for inverse, rows in zip(values, values, strict=True):
        tables.append(InputDist([inverse], [], NOWHERE, inverse.new_empty(len(rows)), None))
        embeddings.append(rows)
    own = Routes(tables, [], routes.loss_normalizer, routes.row_normalizer, False)
    gradients, losses = Gradients([]), Losses({})
    assert compute.function is not None
    with dense.flight.beside(random) as accumulator:
        # As micro-batch 0 of a window of its own: places that begin empty, and an accumulator beside the
        # trainer's.
        compute.function(
            0,
            context,
            window,
            [batch],
            own,
            embeddings,
            dense,
            DenseGradient(dense.flight),
            gradients,
            None,  # no window_loss: `Replay` refuses it
            losses,
            Outputs({}),
        )
        parameters = accumulator.views(accumulator.so_far())
    return [losses[0], *gradients, *parameters.values()]


class RowUpdate:
    """The update of every n-th row of a window, from before its `sparse_update` to after it.

    Args:
        first, every: which of a table's rows.
    """

    def __init__(
        self,
        stage: Stage,
        first: int,
        every: int,
        routes: Routes,
        owned: OwnedRows,
        row_gradient: RowGradient,
        mean_gradient: MeanGradient,
        norm: GradientNorm | None,
        buffer: Buffer,
    ):
        self._rows, self._buffer = slice(first, None, every), buffer
        self._inputs = [
            torch.tensor([routes.row_normalizer, routes.loss_normalizer], dtype=torch.int64, device="cpu")
        ]
        if norm is not None:
            self._inputs += [norm.norm, norm.scale]
        gradients = mean_gradient or row_gradient  # replicas and limits of gradients have means
        for table, rows, gradient in zip(owned.tables, buffer, gradients, strict=True):
            self._inputs += [rows[self._rows].clone(), gradient[self._rows], table.handles[self._rows]]
            if table.count is not None:
                # How many of rows first, first + every, ... are before the count.
                self._inputs.append(((table.count - first + every - 1) // every).clamp(min=0))
            if table.low_precision is not None:
                self._inputs.append(table.low_precision[self._rows])

    def done(self) -> Work:
        """The work, after `sparse_update`."""
        return Work(self._inputs, [rows[self._rows].clone() for rows in self._buffer])


def update_again(
    inputs: Sequence[torch.Tensor], stage: Stage, context: Context, window: Window, owned: OwnedRows
) -> list[torch.Tensor]:
    """The results of a `RowUpdate` from its inputs; `owned` are this rank's rows of the same window."""
    signature = signature_of(_function(stage))
    kinds = {each.kind for each in signature.parameters if each.access in stage.touches}
    values = iter(inputs)
    row_normalizer, loss_normalizer = next(values).tolist()
    norm = GradientNorm(next(values), next(values)) if GradientNorm in kinds else None
    tables, buffer, gradients = [], Buffer([]), []
    for group, own in zip(context.tables.groups, owned.tables, strict=True):
        buffer.append(next(values).clone())
        gradients.append(next(values))
        handles = next(values).to(group.table.device)
        count = None if own.count is None else next(values).to(group.table.device)
        low = None if own.low_precision is None else next(values).to(group.table.device)
        tables.append(TableRows(handles, handles, count, low, NOWHERE, NOWHERE, [], []))
    given: dict[Any, Any] = {
        Context: context,
        Window: window,
        Routes: Routes([], [], loss_normalizer, row_normalizer, False),
        OwnedRows: OwnedRows(tables),
        RowGradient: gradients,
        MeanGradient: gradients if MeanGradient in kinds else None,
        GradientNorm: norm,
        Buffer: buffer,
    }
    _function(stage)(**{each.name: given[each.kind] for each in signature.parameters})
    return list(buffer)


def _function(stage: Stage) -> Any:
    assert stage.function is not None
    return stage.function
