"""A loss over the whole global batch in the job: two towers with in-batch softmax; and what breaks it."""

from __future__ import annotations

from typing import Any

import torch

from ... import nn, ops
from ...data import JaggedBatch
from ...pipeline import Program
from ...pipeline.model_call import Shown
from ...pipeline.places import Dense
from ..job import Job


class TwoTowers(torch.nn.Module):
    """A user of the sum of his items' rows, the item that follows them, and a learned scale of logits."""

    def __init__(self, sizes: nn.HSTUConfig):
        super().__init__()
        self.user, self.item = nn.Linear(sizes.dim, sizes.dim), nn.Linear(sizes.dim, sizes.dim)
        self.norm, self.drop = nn.LayerNorm(sizes.dim), nn.Dropout(sizes.dropout)
        self.scale = torch.nn.Parameter(torch.tensor([1.5], dtype=torch.float32))

    def forward(self, batch: JaggedBatch, rows: dict[str, torch.Tensor], seed: int) -> Shown:
        items, labels, _negatives = rows["item"].split(
            [batch.num_tokens, batch.num_tokens, batch.negatives.numel()]
        )
        owners = torch.repeat_interleave(
            torch.arange(batch.num_samples, dtype=torch.int64, device=items.device), batch.lengths
        )
        last = batch.offsets[1:] - 1
        with nn.padded():
            user = self.user(self.drop(self.norm(ops.segment_sum(items, owners, batch.num_samples))))
            item = self.item(labels[last])
        ids = batch.labels[last]
        return {"user": user, "item": item, "id": ids, "log_q": (ids % 7).float() / -3}

    def window_loss(self, own: Shown, window: Shown, positions: torch.Tensor) -> torch.Tensor:
        queries = own["user"] * nn.expand(self.scale, len(positions))
        return nn.in_batch_softmax(queries, window["item"], positions, window["id"], window["log_q"], 0.5)


class InBatchJob(Job):
    """The job with `TwoTowers` in place of its model."""

    def _model(self) -> torch.nn.Module:
        return TwoTowers(self.sizes)


def candidates_of_the_window_before(program: Program) -> None:
    flight, windows = program.run_places[Dense].flight, list[Shown]()
    loss = flight.window_loss

    def stale(part: Any, window: Shown, *rest: Any) -> Any:
        if not windows or window is not windows[-1]:
            windows.append(window)
        before = windows[-2] if len(windows) > 1 else window
        fits = before["item"].shape == window["item"].shape
        return loss(part, {**window, "item": before["item"] if fits else window["item"]}, *rest)

    flight.window_loss = stale


def samples_of_rank_1_missing(program: Program) -> None:
    reduce = program.communicators.reduce
    exchange = reduce.exchange

    def without(values: torch.Tensor, send: list[int], receive: list[int], out: Any = None) -> torch.Tensor:
        received = exchange(values, send, receive, out)
        if values.dtype == torch.uint8 and values.dim() == 2 and reduce.rank == 0:
            received[receive[0] : receive[0] + receive[1], 8:] = 0  # behind the ids
        return received

    reduce.exchange = without  # type: ignore[method-assign]


def gradients_of_candidates_dropped(program: Program) -> None:
    flight = program.run_places[Dense].flight
    loss = flight.window_loss

    def dropped(*call: Any) -> Any:
        *given, sums = call
        rank = program.context.rank
        return loss(*given, {name: each.clone() for name, each in sums.items()} if rank == 1 else sums)

    flight.window_loss = dropped


def negatives_of_a_micro_batch(program: Program) -> None:
    flight = program.run_places[Dense].flight
    loss = flight.window_loss

    def own(part: Any, window: Shown, positions: torch.Tensor, *rest: Any) -> Any:
        rows = torch.isin(window["id"], part.labels)
        return loss(part, {**window, "log_q": window["log_q"] + 20.0 * ~rows}, positions, *rest)

    flight.window_loss = own


def dropout_drawn_again(program: Program) -> None:
    forward = program.model.forward

    def other_each_time(batch: JaggedBatch, rows: dict[str, torch.Tensor], seed: int) -> Shown:
        shown: Shown = forward(batch, rows, seed)
        return {**shown, "user": torch.nn.functional.dropout(shown["user"], 0.1)}

    program.model.forward = other_each_time


FAULTS = [
    (
        "candidates-of-the-window-before",
        "samples are ranked against the items of the window before",
        candidates_of_the_window_before,
        "",
    ),
    (
        "samples-of-a-rank-missing",
        "rank 0 does not get what the samples of rank 1 show",
        samples_of_rank_1_missing,
        "",
    ),
    (
        "gradients-of-candidates-dropped",
        "rank 1 does not send the gradients of candidates to the ranks that have them",
        gradients_of_candidates_dropped,
        "",
    ),
    (
        "negatives-of-a-micro-batch",
        "samples are ranked against those of their micro-batch",
        negatives_of_a_micro_batch,
        "",
    ),
    (
        "dropout-drawn-again",
        "the second forward of a micro-batch drops other values than the first",
        dropout_drawn_again,
        "second forward of a micro-batch differs from its first",
    ),
]
"""Name, description, what is done to the program, and the error's words; without words the bits tell."""
