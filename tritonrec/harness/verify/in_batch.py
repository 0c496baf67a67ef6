"""Injected faults of a loss over the whole global batch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ...data import JaggedBatch
from ...pipeline import Program
from ...pipeline.model_call import Shown
from ...pipeline.places import Dense
from ...pipeline.window_loss import BatchLoss
from .faults import case, fault
from .variants import IN_BATCH

IN_WINDOW = case(variant=IN_BATCH)


def _showing(batch: BatchLoss, **others: torch.Tensor) -> BatchLoss:
    """The loss of a batch whose samples show something else."""
    return replace(batch, gathered=batch.gathered._replace(shown={**batch.gathered.shown, **others}))


@fault(IN_WINDOW)
def candidates_of_the_window_before(program: Program) -> None:
    """Samples are ranked against the items of the window before."""
    flight, windows = program.run_places[Dense].flight, list[Shown]()
    loss = flight.window_loss

    def stale(part: Any, positions: torch.Tensor, batch: BatchLoss, sums: Shown) -> Any:
        window = batch.gathered.shown
        if not windows or window is not windows[-1]:
            windows.append(window)
        before = windows[-2] if len(windows) > 1 else window
        fits = before["item"].shape == window["item"].shape
        return loss(part, positions, _showing(batch, item=before["item"] if fits else window["item"]), sums)

    flight.window_loss = stale


@fault(IN_WINDOW)
def samples_of_a_rank_missing(program: Program) -> None:
    """Rank 0 does not get what the samples of rank 1 show."""
    reduce = program.communicators.reduce
    exchange = reduce.exchange

    def without(values: torch.Tensor, send: list[int], receive: list[int], out: Any = None) -> torch.Tensor:
        received = exchange(values, send, receive, out)
        if values.dtype == torch.uint8 and values.dim() == 2 and reduce.rank == 0:
            received[receive[0] : receive[0] + receive[1], :-8] = 0  # before the ids
        return received

    reduce.exchange = without  # type: ignore[method-assign]


@fault(IN_WINDOW)
def gradients_of_candidates_dropped(program: Program) -> None:
    """Rank 1 does not send the gradients of candidates to the ranks that have them."""
    flight = program.run_places[Dense].flight
    loss = flight.window_loss

    def dropped(*call: Any) -> Any:
        *given, sums = call
        rank = program.context.rank
        return loss(*given, {name: each.clone() for name, each in sums.items()} if rank == 1 else sums)

    flight.window_loss = dropped


@fault(IN_WINDOW)
def negatives_of_a_micro_batch(program: Program) -> None:
    """Samples are ranked against those of their micro-batch."""
    flight = program.run_places[Dense].flight
    loss = flight.window_loss

    def own(part: Any, positions: torch.Tensor, batch: BatchLoss, sums: Shown) -> Any:
        window = batch.gathered.shown
        rows = torch.isin(window["id"], part.labels)
        return loss(part, positions, _showing(batch, log_q=window["log_q"] + 20.0 * ~rows), sums)

    flight.window_loss = own


@fault(IN_WINDOW, says="second forward of a micro-batch differs from its first")
def dropout_drawn_again(program: Program) -> None:
    """The second forward of a micro-batch drops other values than the first."""
    forward = program.model.forward

    def other_each_time(batch: JaggedBatch, rows: dict[str, torch.Tensor], seed: int) -> Shown:
        shown: Shown = forward(batch, rows, seed)
        return {**shown, "user": torch.nn.functional.dropout(shown["user"], 0.1)}

    program.model.forward = other_each_time
